"""Training by LayerZero's handle, driven step by step without a wrapper: equal to the unsharded module.

Promises:
- the example in the docs trains as the unsharded module, bit for bit on two ranks; offloaded gradients give the same
  bits: `test_training`
- the calls of the reference's runtime, in its order, do too: with kept and prefetched units, and the collectives that
  it makes: `test_training` (`the_calls_of_the_references_runtime`)
- gradients of uneven units, pipelines, cleared and abandoned micro-batches, exceptions: `test_training`
  (`unevenly_used`), `test_random_programs`, `test_layer_zero_phases.py::test_phases` (`in_flight_together`,
  `clearing`, `after_an_exception`, `a_gradient_is_not_thrown_away`, `a_gradient_that_does_not_come`,
  `whole_gradients`)
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import data, make
from gloo import note, run_ranks
from layer_zero_checks import LOW, Example, assert_close, assert_equal, named, train
from layer_zero_driver import (
    AsTheReference,
    State,
    drive,
    full_grads,
    full_params,
    gathered,
    losses,
    one,
    reshard,
    twins,
    unshard,
)
from layer_zero_programs import chain, programs
from layer_zero_ranks import counted
from torch import nn

pytestmark = pytest.mark.multiprocess


def training(inners, counts):
    for inner, count in itertools.product(inners, counts):
        note(f"inner={inner} micro-batches={count}")
        exact = dist.get_world_size() <= 2
        train(*twins(inner), count, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), exact=exact)
    train(*twins(inners[-1]), counts[-1], lambda params: torch.optim.Adam(params, 0.01))


def offloading(inner, cases):
    """What is offloaded gives the bits of what is not: all units, in all steps, however gradients are cleared."""
    for count, to_none, dtype in cases:
        note(f"offload: micro-batches={count} to none={to_none} {dtype}")
        seen = []
        for offload in (False, True):
            model = make().to(dtype or torch.float32)
            driver = drive(model, inner, dtype, offload)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                driver.backward(losses(model, step, count, of_dtype(dtype)))
                seen.append(full_grads(driver.handles, model))
                assert all(bool(grad.any()) for grad in seen[-1])
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            seen.append(full_params(driver.handles, model))
        for on, off in zip(seen[:4], seen[4:], strict=True):
            assert_equal(on, off)


def of_dtype(dtype):
    return lambda model, x: model(x if dtype is None else x.to(dtype)).float().square().mean()


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


def no_gradient_is_lost_in_low_precision():
    """16 equal micro-batches on all ranks: exactly 16 times the bf16 gradient of one."""
    model, reference = make().to(LOW), make().to(LOW)
    driver = drive(model, 2, LOW)
    x = data(0, rank=0).to(LOW)
    driver.backward([lambda: model(x).float().square().mean()] * 16)
    reference(x).float().square().mean().backward()
    assert_equal(full_grads(driver.handles, model), [p.grad.float() * 16 for p in reference.parameters()])


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


def padding_stays(steps=30):
    module = Example()
    driver = drive(module, 2, LOW, units=[module])
    optimizer = torch.optim.AdamW(module.parameters(), 0.1, weight_decay=0.5)
    [handle] = driver.handles
    before = gathered(handle.flat_param._zero1_shard)
    for _ in range(steps):
        driver.backward([lambda: module(torch.ones(2, 3, dtype=LOW)).sum()])
        assert not gathered(handle.flat_param.grad)[[6, 7, *range(11, 16), 18, 19]].any()
        optimizer.step()
        optimizer.zero_grad()
    after = gathered(handle.flat_param._zero1_shard)
    padding = [6, 7, *range(11, 16), 18, 19]
    assert not before[padding].any()
    assert not after[padding].any()
    assert not torch.equal(after, before)


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
    (4, training, (2,), (2,)),
    pytest.param((4, training, (2,), (1, 3)), marks=pytest.mark.thorough),
    (2, training, (1, 2), (1, 3)),
    pytest.param((2, training, (1, 2), (2,)), marks=pytest.mark.thorough),
    (1, training, (1,), (1, 2, 3)),
    (4, offloading, 2, [(2, True, None)]),
    pytest.param((4, offloading, 2, [(1, False, None), (3, False, LOW)]), marks=pytest.mark.thorough),
    (2, offloading, 1, [(1, True, LOW), (3, False, None)]),
    pytest.param((2, offloading, 1, [(2, False, LOW), (3, True, None)]), marks=pytest.mark.thorough),
    (4, the_calls_of_the_references_runtime, 2, 1, False),
    (4, the_calls_of_the_references_runtime, 2, 3, True),
    pytest.param((4, the_calls_of_the_references_runtime, 2, 1, True), marks=pytest.mark.thorough),
    pytest.param((4, the_calls_of_the_references_runtime, 2, 3, False), marks=pytest.mark.thorough),
    (4, no_gradient_is_lost_in_low_precision),
    (4, the_dtype_of_the_reduction_is_honoured),
    (4, padding_stays),
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
