"""An exception of the user's code in the middle of a forward, a backward or a state dict on one rank, which lives on.

Promises:
- an exception in a tensor's hook, an autograd function, a module's backward hook, a checkpoint or `autograd.grad`
  ends a backward on one rank: the ranks that have waited for it for 2 s raise it with its text: `test_others_are_told`
- the same if it comes before the first collective of a step, or after the last one so that the others wait in a later
  step or call: `test_others_are_told_wherever_they_wait`; if it comes from a hook of a model's or optimizer's state
  dict, or a function of `apply`: `test_others_are_told_of_an_exception_outside_of_a_step`
- a rank that goes on, or whose other backwards fail, is waited for: `test_nobody_is_told`,
  `test_nobody_is_told_of_another_graph`; so is one that evaluates alone a model that is not sharded:
  `test_nobody_is_told_of_what_one_rank_does_alone`
- two ranks raise and one goes on: the other is named all the same:
  `test_a_rank_that_goes_on_hides_no_other_rank_that_has_raised`; all ranks catch an exception and one raises again:
  `test_a_rank_that_raises_again_is_not_taken_for_one_that_is_slow`
- a load hook that raises between units on one rank is named by all:
  `test_a_load_hook_that_raises_between_units_is_named`; also before the first collective of an unpickled model:
  `test_a_load_hook_that_raises_in_a_new_process_is_named`
- once the process group is destroyed, a backward outside of the model raises the user's exception unchanged:
  `test_an_exception_after_the_process_group_stays_as_it_is`
"""

import datetime
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from gloo import ends_of_ranks, note, run_ranks, say, wait_until_said
from simulated_ranks import simulate_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.fsdp import OrderError

pytestmark = pytest.mark.multiprocess


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("batch 17 is bad")


class Between(nn.Module):
    """Between two units; ``change`` may change what goes through."""

    change = None

    def forward(self, x):
        return x if self.change is None else self.change(x)


def fail(*args):
    raise ValueError("batch 17 is bad")


def hooked(hook):
    def change(x):
        x.register_hook(hook)
        return x

    return change


def made(strategy):
    torch.manual_seed(0)
    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    settings = {"process_group": group, "sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True}
    first, *units = (FSDP(nn.Linear(4, 4), **settings) for _ in range(4))
    return FSDP(nn.Sequential(nn.Sequential(first, units[0]), Between(), *units[1:]), **settings)


def step(model, how=None, fails=True):
    between, unit = model.module[1], model.module[2]
    x = torch.ones(2, 4, requires_grad=True)
    handle = None
    change = {"tensor": hooked(fail), "function": Fails.apply, "grad": Fails.apply}.get(how)
    between.change = change if fails else None
    if how == "module":
        handle = unit.module.register_full_backward_hook(fail)
    if how == "checkpoint":
        between.change = lambda x: checkpoint(Fails.apply, x, use_reentrant=True)
    loss = model(x).sum()
    if how == "retained":
        loss.backward(retain_graph=True)
    if fails and how in ("loss", "retained"):
        loss.register_hook(fail)
    try:
        torch.autograd.grad(loss, x) if how == "grad" else loss.backward()
    finally:
        if handle is not None:
            handle.remove()


WAYS = ("tensor", "function", "grad", "module", "loss", "checkpoint", "retained")


def told(strategy, how):
    model = made(strategy)
    for _ in range(2):
        step(model)
    begin = time.monotonic()
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="batch 17"):
            step(model, how)
        wait_until_said("rank 0 was told")
        wait_until_said("rank 2 was told")
        return None
    with pytest.raises(OrderError) as error:
        step(model, how if how in ("retained", "grad") else None, fails=False)
    seconds = time.monotonic() - begin
    say(f"rank {dist.get_rank()} was told")
    return str(error.value), seconds


@pytest.mark.parametrize("how", WAYS)
def test_others_are_told(how):
    first, _, last = simulate_ranks(told, 3, "FULL_SHARD", how, environment={"FLATPARAM_HEARTBEAT": "0"})
    for text, seconds in (first, last):
        assert re.match(
            r"rank 1 has raised an error of its own in .* and has not gone on since: ValueError: batch 17 is bad", text
        )
        assert 1.9 < seconds < 8.0  # 3 s, but for a busy machine


@pytest.mark.parametrize("how", ["function", "loss"])
def test_others_are_told_where_nothing_is_sharded(how):
    first, _, last = simulate_ranks(told, 3, "NO_SHARD", how, environment={"FLATPARAM_HEARTBEAT": "0"})
    for text, seconds in (first, last):
        assert "batch 17 is bad" in text
        assert 1.9 < seconds < 8.0


@torch.no_grad()
def evaluate(model):
    model(torch.ones(2, 4))


def write_another_shape(model):
    next(model.parameters()).data = torch.ones(3)
    step(model)


def told_elsewhere(strategy, fails, goes_on):
    """Rank 1 fails in ``fails``; the others go on with what ``goes_on`` names."""
    model, me = made(strategy), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    calls = {
        "step": step,
        "evaluate": evaluate,
        "write": write_another_shape,
        "optim_state_dict": lambda model: FSDP.optim_state_dict(model, optimizer),
    }
    for _ in range(2):
        step(model)
    optimizer.step()
    evaluate(model)
    if me == 1:
        at = model.module if fails == "evaluate" else model.module[0][0].module
        if fails != "write":
            (at.register_forward_hook if fails == "evaluate" else at.register_forward_pre_hook)(fail)
        with pytest.raises(ValueError, match=r"batch 17|to have its shape"):
            calls[fails](model)
        wait_until_said("rank 0 was told")
        wait_until_said("rank 2 was told")
        return None
    *before, last = goes_on
    for each in before:
        calls[each](model)
    begin = time.monotonic()
    with pytest.raises(OrderError) as error:
        calls[last](model)
    say(f"rank {me} was told")
    return str(error.value), time.monotonic() - begin


@pytest.mark.parametrize(
    ("strategy", "fails", "goes_on", "debug"),
    [
        ("NO_SHARD", "step", ["step"], "OFF"),  # in the forward, which has no collective
        ("FULL_SHARD", "write", ["step"], "OFF"),  # before the first gather
        ("FULL_SHARD", "evaluate", ["evaluate", "step"], "OFF"),  # after the last gather
        ("FULL_SHARD", "evaluate", ["evaluate", "optim_state_dict"], "OFF"),
        ("FULL_SHARD", "evaluate", ["evaluate", "optim_state_dict"], "DETAIL"),
    ],
)
def test_others_are_told_wherever_they_wait(strategy, fails, goes_on, debug):
    environment = {"FLATPARAM_HEARTBEAT": "0", "TORCH_DISTRIBUTED_DEBUG": debug}
    first, _, last = simulate_ranks(told_elsewhere, 3, strategy, fails, goes_on, environment=environment)
    for text, seconds in (first, last):
        assert re.match(r"rank 1 has raised an error of its own in .* and has not gone on since: ", text)
        assert ("expected the new data of parameter" if fails == "write" else "batch 17 is bad") in text
        assert 1.9 < seconds < 8.0


def outside_of_a_step(how):
    model, me = made("FULL_SHARD"), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2 if how == "optimizer" else 0):
        step(model)
        optimizer.step()
    unit = model.module[2].module
    if me == 1 and how == "optimizer":
        optimizer.register_state_dict_pre_hook(fail)
    elif me == 1 and how != "apply":
        getattr(unit, f"register_state_dict_{how}_hook")(fail)
    calls = {
        "apply": lambda: model.apply(lambda module: fail() if module is unit and me == 1 else None),
        "optimizer": lambda: FSDP.optim_state_dict(model, optimizer),
    }
    begin = time.monotonic()
    with pytest.raises((OrderError, ValueError)) as error:
        calls.get(how, model.state_dict)()
    if me == 1:
        wait_until_said("rank 0 was told")
        wait_until_said("rank 2 was told")
    else:
        say(f"rank {me} was told")
    return str(error.value), time.monotonic() - begin


@pytest.mark.parametrize("how", ["pre", "post", "optimizer", "apply"])
def test_others_are_told_of_an_exception_outside_of_a_step(how):
    first, _, last = simulate_ranks(outside_of_a_step, 3, how, environment={"FLATPARAM_HEARTBEAT": "0"})
    for text, seconds in (first, last):
        assert re.match(r"rank 1 has raised .* and has not gone on since: ValueError: batch 17 is bad", text)
        assert 1.9 < seconds < 8.0


def fails_and_goes_on(how):
    model, me = made("FULL_SHARD"), dist.get_rank()
    step(model)
    note(how)
    if how in ("all", "all, at the end"):  # they catch it
        if how == "all, at the end":
            failing = model.module.register_forward_hook(fail)
            with pytest.raises(ValueError, match="batch 17"):
                evaluate(model)
            failing.remove()
        else:
            with pytest.raises(ValueError, match="batch 17"):
                step(model, "function")
        time.sleep(4.0 * me)
        step(model)
        return
    if how == "at the end" and me == 1:
        failing = model.module.register_forward_hook(fail)
        with pytest.raises(ValueError, match="batch 17"):
            evaluate(model)
        failing.remove()
        model.module[1].change = lambda x: time.sleep(4.0) or x
        evaluate(model)
        return
    if how == "at the end":
        evaluate(model)
        evaluate(model)
        return

    def other(*args):
        """A backward of another graph fails, and this rank computes for a while."""
        if me == 1:
            with torch.enable_grad(), pytest.raises(ValueError, match="batch 17"):
                Fails.apply(torch.ones(1, requires_grad=True)).backward()
            time.sleep(4.0)

    if how == "another graph's inside":
        model.module[1].change = hooked(other)
    loss = model(torch.ones(2, 4)).sum()
    if how == "another graph's":
        other()
    if how == "again" and me == 1:
        failing = loss.register_hook(fail)
        with pytest.raises(ValueError, match="batch 17"):
            loss.backward()
        failing.remove()
        loss.register_hook(lambda grad: time.sleep(4.0))
    loss.backward()
    step(model)


@pytest.mark.parametrize("how", ["all", "all, at the end", "at the end", "again"])
def test_nobody_is_told(how):
    simulate_ranks(fails_and_goes_on, 2, how)


@pytest.mark.parametrize("how", ["another graph's", "another graph's inside"])
def test_nobody_is_told_of_another_graph(how):
    """Processes: a backward that fails looks at all models of its process, those of ranks that are threads, too."""
    run_ranks(fails_and_goes_on, 2, how)


def one_comes_back():
    """Ranks 1 and then 2 raise behind the last gather of a forward; rank 2 goes on, rank 1 does not."""
    model, me = made("FULL_SHARD"), dist.get_rank()
    step(model)
    if me == 0:
        evaluate(model)
    else:
        after = {1: fail, 2: lambda *args: (wait_until_said("rank 1 raised"), fail())}
        failing = model.module.register_forward_hook(after[me])
        with pytest.raises(ValueError, match="batch 17"):
            evaluate(model)
        failing.remove()
        say(f"rank {me} raised")
    if me == 1:
        wait_until_said("rank 0 was told")
        wait_until_said("rank 2 was told")
        return None
    if me == 0:
        wait_until_said("rank 2 raised")
    begin = time.monotonic()
    with pytest.raises(OrderError) as error:
        evaluate(model)
    say(f"rank {me} was told")
    return str(error.value), time.monotonic() - begin


def test_a_rank_that_goes_on_hides_no_other_rank_that_has_raised():
    first, _, last = simulate_ranks(one_comes_back, 3, environment={"FLATPARAM_HEARTBEAT": "0"})
    for text, seconds in (first, last):
        assert re.match(r"rank 1 has raised .* and has not gone on since: ValueError: batch 17 is bad", text)
        assert seconds < 10.0


def one_raises_again():
    """All ranks catch an exception in one step, then rank 1 raises before the first collective of the next."""
    model, me = made("FULL_SHARD"), dist.get_rank()
    step(model)
    with pytest.raises(ValueError, match="batch 17"):
        step(model, "function")
    dist.barrier()
    begin = time.monotonic()
    if me == 1:
        with pytest.raises(ValueError, match="to have its shape"):
            write_another_shape(model)
        wait_until_said("rank 0 was told")
        return None
    with pytest.raises(OrderError) as error:
        step(model)
    say("rank 0 was told")
    return str(error.value), time.monotonic() - begin


def test_a_rank_that_raises_again_is_not_taken_for_one_that_is_slow():
    (text, seconds), _ = simulate_ranks(one_raises_again, 2, environment={"FLATPARAM_HEARTBEAT": "0"})
    assert re.match(r"rank 1 has raised an error of its own in .* and has not gone on since: ", text)
    assert "expected the new data of parameter" in text
    assert 1.9 < seconds < 8.0


def evaluates_alone():
    model = made("NO_SHARD")
    for _ in range(2):
        step(model)
    if dist.get_rank() == 1:
        failing = model.module[2].module.register_forward_hook(fail)
        with pytest.raises(ValueError, match="batch 17"):
            evaluate(model)
        failing.remove()
        time.sleep(4.0)
    step(model)


def test_nobody_is_told_of_what_one_rank_does_alone():
    simulate_ranks(evaluates_alone, 2)


def load_hook_raises():
    """Between two units of a load, on rank 1."""
    model = made("FULL_SHARD")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if dist.get_rank() == 1:
        model.module[2].module.register_load_state_dict_pre_hook(fail)
    with pytest.raises((OrderError, ValueError)) as error:
        model.load_state_dict(state)
    return type(error.value).__name__, str(error.value)


def test_a_load_hook_that_raises_between_units_is_named():
    others = simulate_ranks(load_hook_raises, 3)
    assert [name for name, _ in others] == ["OrderError", "ValueError", "OrderError"]
    for _, text in others:
        assert "batch 17 is bad" in text


def pickles(folder):
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Sequential(FSDP(nn.Linear(4, 4)))))  # the root has no parameter
    torch.save(model, f"{folder}/{dist.get_rank()}.pt")


def load_hook_raises_in_a_new_process(folder):
    me = dist.get_rank()
    model = torch.load(f"{folder}/{me}.pt", weights_only=False)
    if me == 1:
        model.module[0].register_load_state_dict_pre_hook(fail)
    with pytest.raises((OrderError, ValueError)) as error:
        model.load_state_dict({"0.0.weight": torch.ones(4, 4), "0.0.bias": torch.ones(4)})
    note(f"{type(error.value).__name__}: {error.value}")
    os._exit(3)  # no collective of the world would end any more


def test_a_load_hook_that_raises_in_a_new_process_is_named(tmp_path):
    run_ranks(pickles, 3, str(tmp_path))
    ends = ends_of_ranks(load_hook_raises_in_a_new_process, 3, str(tmp_path))
    assert [code for code, _, _ in ends] == [3, 3, 3], ends
    for (_, _, said), name in zip(ends, ["OrderError", "ValueError", "OrderError"], strict=True):
        assert re.match(rf"{name}: .*batch 17 is bad", said), said


def raises_after_the_process_group():
    model = FSDP(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()
    x = torch.ones(2, requires_grad=True)
    # The graph of a reentrant checkpoint is not known: it may be the model's
    with pytest.raises(ValueError, match="batch 17") as error:
        checkpoint(Fails.apply, x, use_reentrant=True).sum().backward()
    note(str(error.value))
    os._exit(3)  # without the process group the rank does not end as others do


def test_an_exception_after_the_process_group_stays_as_it_is():
    ends = ends_of_ranks(raises_after_the_process_group, 2)
    assert [code for code, _, _ in ends] == [3, 3], ends
    assert ["batch 17 is bad" in said for _, _, said in ends] == [True, True], ends
