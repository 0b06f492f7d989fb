"""The gather of small units that is broken off, fails or is never waited for: nothing is computed with other values.

Promises:
- after an exception in the middle of a group, at its begin, or a failed allocation there, the units train on as the
  unsharded module: `test_a_group_of_which_one_unit_cannot_begin`, `test_each_allocation_of_a_step_fails_once`,
  `test_an_exception_in_each_block`
- a hook of a collective that frees or uses a unit of the group is refused:
  `test_a_hook_of_the_gather_that_frees_a_unit`
- after Ctrl-C in the wait for a group the model trains on: `test_ctrl_c.py`
- ranks that gather the same number of units from the same one on, in different orders, are told:
  `test_groups_in_different_orders`
- wherever a rank is lost or interrupted, the others are told alike and in time: `test_ranks_that_are_lost`; what all
  ranks catch costs the step alone: `test_an_exception_that_all_ranks_catch_costs_the_step`
- a write to a unit's parameters after its group is gathered, which no forward before has done, is refused, and after
  `refresh()` computed with: `test_a_write_after_the_gather`
"""

import random

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Averaged, Block, assert_same_grads, data, full_params, loss_of, make, wrap_blocks
from gloo import fake_world
from simulated_ranks import simulate_ranks
from test_fsdp_small_units import SMALL, Chosen

from benchmarks.c_testing import _C_testing
from flatparam.fsdp.desync import torch_collectives
from flatparam.fsdp.errors import OrderError, StateError
from tests.simulation import checkers, faulty_programs
from tests.simulation.faults import LOSSES, Fault, draw
from tests.simulation.process import simulated

pytestmark = pytest.mark.multiprocess


def breaks_off(breaks):
    """In step 4 ``breaks(model)`` raises on all ranks; the other steps are those of the unsharded module."""
    module = make(cls=Chosen)
    model = wrap_blocks(make(cls=Chosen), use_orig_params=True, min_unit_bytes=SMALL)
    oracle = Averaged(module, 2)
    for number in range(7):
        if number == 4:
            breaks(model)
        module.zero_grad()
        model.zero_grad()
        oracle.backward(lambda rank, number=number: [data(number, rank)])
        loss_of(model, data(number)).backward()
        assert_same_grads(model, module, number)


def with_another_shape(model):
    """Block 2 cannot begin its gather."""
    param = model.blocks[2].module.scale
    kept = param.data
    param.data = torch.zeros(77)
    with pytest.raises(Exception, match="scale"):
        model(data(4))
    param.data = kept


def test_a_group_of_which_one_unit_cannot_begin():
    simulate_ranks(breaks_off, 2, with_another_shape)


def in_each_block(model):
    for i, resets in ((0, False), (2, True), (6, False)):
        for backward in (False, True):
            with pytest.raises(ZeroDivisionError):
                raise_in(model, model.blocks[i].module, backward)
            if resets:
                model.reset_state()


def raise_in(model, block, backward):
    register = block.register_full_backward_hook if backward else block.register_forward_hook
    hook = register(lambda *_: 1 / 0)
    try:
        loss_of(model, data(4)).backward()
    finally:
        hook.remove()


def test_an_exception_in_each_block():
    simulate_ranks(breaks_off, 2, in_each_block)


def test_each_allocation_of_a_step_fails_once():
    losses = []
    with fake_world(2):
        for fails in (False, True):
            model = wrap_blocks(make(cls=Chosen), use_orig_params=True, min_unit_bytes=SMALL)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(4):
                if number == 3 and fails:
                    failed = count_failures(lambda: loss_of(model, data(3)).backward())  # noqa: B023
                    assert failed > 1
                    optimizer.zero_grad()
                loss = loss_of(model, data(number))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append([loss, *full_params(model).values()])
    assert all(map(torch.equal, *losses))


def count_failures(call):
    """Make the first, the second, ... allocation of the core fail in ``call``, until it needs no more."""
    for k in range(1, 100):
        _C_testing.alloc_fail_at(k)
        try:
            call()
        except MemoryError:
            pass
        else:
            return k - 1
        finally:
            _C_testing.alloc_fail_at(0)
    raise AssertionError("more than 99 allocations")


@pytest.mark.parametrize("uses", ["frees", "calls"])
def test_a_hook_of_the_gather_that_frees_a_unit(monkeypatch, uses):
    with fake_world(2):
        model = wrap_blocks(make(cls=Chosen), use_orig_params=True, min_unit_bytes=SMALL)
        expected = [loss_of(model, data(0, 0)) for _ in range(3)][-1]
        root = model._unit.core.root
        root.always_python()
        gather = torch_collectives.all_gather

        def meddles(output, own, group):
            gather(output, own, group)
            block = model.blocks[3]
            if own.dtype != torch.uint8:  # of one unit
                return
            block._unit.core.release() if uses == "frees" else block(torch.ones(1, 5))

        monkeypatch.setattr(torch_collectives, "all_gather", meddles)
        with pytest.raises(RuntimeError, match="the unit of Block: it is used while its gather begins"):
            loss_of(model, data(0, 0))
        monkeypatch.undo()
        loss = loss_of(model, data(0, 0))
        assert torch.equal(loss, expected)
        loss.backward()
        assert root.state == "IDLE"


@pytest.mark.parametrize("kind", LOSSES)
def test_ranks_that_are_lost(kind):
    seen = 0
    for seed in range(6):
        size = random.Random(seed).choice((2, 3, 4))
        faults = draw(seed, size, 1, (120, 37), [kind])
        run = simulated(faulty_programs.train, size, seed, "FULL_SHARD", 0.01, False, SMALL, faults=faults)
        checkers.nobody_waits_for_ever(run)
        checkers.all_are_told_in_time(run)
        checkers.all_are_told_alike(run)
        seen += bool(checkers.told(run))
    assert seen > 2


@pytest.mark.parametrize("point", range(3, 37, 5))
def test_an_exception_that_all_ranks_catch_costs_the_step(point):
    faults = [Fault("raises in user code", rank, point) for rank in range(2)]
    run = simulated(faulty_programs.train_and_catch, 2, point, "FULL_SHARD", False, SMALL, faults=faults)
    checkers.nobody_waits_for_ever(run)
    assert not run.errors, run.story
    for params, skipped in run.results.values():
        assert len(skipped) == 1
        assert all(map(torch.equal, params, faulty_programs.unsharded(2, skipped))), run.story


def writes_late():
    module, model = make(cls=Chosen), wrap_blocks(make(cls=Chosen), use_orig_params=True, min_unit_bytes=SMALL)
    for number in range(3):
        assert torch.equal(loss_of(model, data(number)), loss_of(module, data(number)))
    model.module.writes = 2  # to block 6, which is gathered with block 0
    with pytest.raises(StateError, match=r"blocks\.6.*: its parameters were written to in this forward, after it was"):
        model(data(3))
    model.refresh()
    module.writes = 2
    with torch.no_grad():  # of the forward that was refused
        for param in module.blocks[-1].parameters():
            param.mul_(0.5)
    for number in range(3, 7):
        assert torch.equal(loss_of(model, data(number)), loss_of(module, data(number)))


def test_a_write_after_the_gather():
    simulate_ranks(writes_late, 2)


def in_different_orders():
    """Groups of three: rank 1 leaves out block 1, which was gathered for it; next time it gathers block 3 instead."""
    bytes_of_three = 3 * sum(param.nbytes for param in Block(5).parameters())
    model = wrap_blocks(make(cls=Chosen), process_group=dist.new_group(), min_unit_bytes=bytes_of_three)
    with torch.no_grad():
        for order in (range(7), range(7), (0, 2, 3, 4, 5, 6) if dist.get_rank() else range(7)):
            model(data(0), order)
        with pytest.raises(
            OrderError, match=r"order differs .*blocks\.0` and 2 flat .*blocks\.0` and 2 flat .* others\. "
        ):
            model(data(0))


def test_groups_in_different_orders():
    simulate_ranks(in_different_orders, 2)
