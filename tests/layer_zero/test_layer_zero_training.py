"""LayerZero's handle driven step by step in other ways than the docs': equal to the unsharded module.

Promises:
- the calls of the reference's runtime, in its order, train as the unsharded module: with kept and prefetched units, and
  the collectives that it makes: `test_training` (`the_calls_of_the_references_runtime`)
- gradients of uneven units, pipelines, abandoned micro-batches, exceptions: `test_training` (`unevenly_used`),
  `test_random_programs`, `test_layer_zero_phases.py::test_phases` (`in_flight_together`, `after_an_exception`,
  `a_gradient_is_not_thrown_away`, `a_gradient_that_does_not_come`, `whole_gradients`)
- one of several gradients cleared, and sums of zeros: `test_layer_zero_phases.py::test_phases` (`clearing`)
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import data
from gloo import note, run_ranks
from layer_zero_checks import LOW, Example, assert_close, named, train
from layer_zero_driver import (
    AsTheReference,
    State,
    drive,
    full_grads,
    losses,
    one,
    reshard,
    unshard,
)
from layer_zero_programs import chain, programs
from layer_zero_ranks import counted
from torch import nn

pytestmark = pytest.mark.multiprocess


def the_calls_of_the_references_runtime(inner, count, offload):
    """A root that returns what its last unit does, kept units, gathers ahead, offloading all but the last unit."""
    note(f"as the reference: micro-batches={count} offload={offload}")
    model, reference = chain(), chain()
    driver = AsTheReference(list(model), inner, offload=offload)
    train(model, driver, reference, count, lambda params: torch.optim.SGD(params, lr=0.1))
    with counted(inner) as log:
        driver.backward(losses(model, 0, count))
    units = len(driver.handles)
    over = [(kind, group) for kind, group, *_ in log]
    assert over.count(("gather", "wide")) == over.count(("reduce", "wide")) == units
    # Twice a micro-batch but for the first forward, the last unit in backward, the first in later forwards
    assert over.count(("gather", "inner")) == units * (2 * count - 1) - count - (count - 1)
    assert len(over) == 2 * units + over.count(("gather", "inner"))


def the_dtype_of_the_reduction_is_honoured():
    handle = one(Example(), 2, LOW, LOW)
    unshard(handle, State.FORWARD)
    reshard(handle)
    whole, shard = handle._get_reduce_scatter_tensors()
    assert whole.dtype == shard.dtype == LOW
    handle.set_shard_grad(shard.fill_(1.5))
    handle.prepare_gradient_for_zero1()
    assert handle.flat_param.grad.dtype == torch.float32
    assert bool((handle.flat_param.grad == 1.5).all())


def unevenly_used():
    """Units that get no gradient on some ranks, frozen ones, and a root that returns what its last unit does."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x, used=True):
            x = self.blocks[0](x * self.scale)
            aside = self.blocks[1](x)
            x = x + aside if used else x
            return self.blocks[3](self.blocks[2](x))

    model, reference = Chain(), Chain()
    for module in (model, reference):
        module.blocks[0].requires_grad_(False)
        module.blocks[2].bias.requires_grad_(False)
    driver = drive(model, 2)
    after_backward = driver.after_backward

    def without_reducing(handle):
        driver.sync, sync = False, driver.sync
        after_backward(handle)
        driver.sync = sync

    for count, least in itertools.product((1, 2), (2, 5)):
        # Where only some ranks have a gradient, all reduce at the end, in one order
        driver.after_backward = without_reducing if least == 2 else after_backward
        driver.backward([lambda least=least: model(data(0), used=dist.get_rank() >= least).square().mean()] * count)
        for _ in range(count):
            for rank in range(4):
                (reference(data(0, rank), used=rank >= least).square().mean() / 4).backward()
        expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in reference.parameters()]
        found = full_grads(driver.handles, model)
        assert_close(
            [g for g, p in zip(found, reference.parameters(), strict=True) if p.requires_grad],
            [g for g, p in zip(expected, reference.parameters(), strict=True) if p.requires_grad],
        )
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert other.requires_grad or param.grad is None
            param.grad = other.grad = None
    with pytest.raises(RuntimeError, match="nothing to reduce of the flat parameter of Linear"):
        driver.handles[0]._get_reduce_scatter_tensors()


CASES = [
    (4, the_calls_of_the_references_runtime, 2, 1, False),
    (4, the_calls_of_the_references_runtime, 2, 3, True),
    pytest.param((4, the_calls_of_the_references_runtime, 2, 1, True), marks=pytest.mark.thorough),
    pytest.param((4, the_calls_of_the_references_runtime, 2, 3, False), marks=pytest.mark.thorough),
    (4, the_dtype_of_the_reduction_is_honoured),
    (4, unevenly_used),
]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_training(case):
    world_size, function, *arguments = case
    run_ranks(function, world_size, *arguments)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("first", [0, 4, 8])
def test_random_programs(first):
    """Of 260 that were run, on one, two and four ranks, when this was written."""
    run_ranks(programs, 2, range(first, first + 4))
