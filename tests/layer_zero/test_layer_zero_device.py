"""LayerZero's handle driven by hand on an accelerator: a simulated one (simulated.py). The oracle is the CPU.

Promises:
- on an accelerator with several streams, one of them for copies of gradients, the bits are those of the CPU
"""

import itertools

import pytest
import simulated
import torch
import torch.distributed as dist
from fsdp_models import data, loss_of, make
from gloo import run_ranks
from layer_zero_driver import Driver, full_grads, full_params

pytestmark = pytest.mark.multiprocess


class OnAnotherStream(Driver):
    """Copies gradients to and from the host on a stream of its own; the handle has to keep the order."""

    def before_backward(self, handle):
        with self.stream:
            handle.reload_full_prec_grad()
        super().before_backward(handle)

    def after_backward(self, handle):
        sync, self.offload = self.sync, False
        super().after_backward(handle)
        if not sync:
            with self.stream:
                handle.offload_grad()
            handle.free_full_prec_grad()


def trained(device, inner, outer, dtype, offload):
    """Gradients of three steps of two micro-batches, and the parameters after them, on this rank."""
    model = make().to(device)
    cls = OnAnotherStream if offload else Driver
    driver = cls([*model.blocks, model], device, inner, outer, dtype, offload)
    driver.stream = torch.Stream(device) if offload else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    def loss(k):
        return loss_of(model, data(k).to(device, dtype or torch.float32))

    for step in range(3):
        driver.backward([lambda k=10 * step + k: loss(k) for k in range(3)])
        seen += [grad.cpu() for grad in full_grads(driver.handles, model)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    return seen + [param.cpu() for param in full_params(driver.handles, model)]


def as_on_the_cpu(library, inner, dtype, offload, late):
    simulated.use(library, late)
    sim, rank = torch.device("sim", 0), dist.get_rank()
    wide = simulated.new_group()
    alone = [(dist.new_group([r]), simulated.new_group([r])) for r in range(2)][rank]
    both = dist.new_group([0, 1]), simulated.new_group([0, 1])
    on_cpu, on_sim = alone if inner == 1 else both
    expected = trained(torch.device("cpu"), on_cpu, dist.group.WORLD, dtype, False)
    found = trained(sim, on_sim, wide, dtype, offload)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("inner", "dtype", "offload", "late"),
    list(itertools.product((1, 2), (None, torch.bfloat16), (False, True), ("others", "computing"))),
)
def test_it_trains_as_on_the_cpu(inner, dtype, offload, late):
    run_ranks(as_on_the_cpu, 2, str(simulated.build()), inner, dtype, offload, late)
