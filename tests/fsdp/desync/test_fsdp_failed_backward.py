"""An exception of the user's code in the middle of a backward on one rank, which lives on.

Promises:
- an exception in a tensor's hook, an autograd function, a module's backward hook, a checkpoint or `autograd.grad`
  ends a backward on one rank: the ranks that have waited for it for 2 s raise it with its text: `test_others_are_told`
- a rank that goes on, or whose other backwards fail, is waited for: `test_nobody_is_told`
- a load hook that raises between units on one rank is named by all:
  `test_a_load_hook_that_raises_between_units_is_named`
"""

import datetime
import re
import time

import pytest
import torch
import torch.distributed as dist
from gloo import note, run_ranks, say, wait_until_said
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
    first, _, last = run_ranks(told, 3, "FULL_SHARD", how, environment={"FLATPARAM_HEARTBEAT": "0"})
    for text, seconds in (first, last):
        assert re.match(
            r"rank 1 has raised an error of its own in .* and has not gone on since: ValueError: batch 17 is bad", text
        )
        assert 1.9 < seconds < 8.0  # 3 s, but for a busy machine


def test_others_are_told_where_nothing_is_sharded():
    first, _, last = run_ranks(told, 3, "NO_SHARD", "function", environment={"FLATPARAM_HEARTBEAT": "0"})
    for text, seconds in (first, last):
        assert "batch 17 is bad" in text
        assert 1.9 < seconds < 8.0


def fails_and_goes_on(how):
    model, me = made("FULL_SHARD"), dist.get_rank()
    step(model)
    note(how)
    if how == "all":  # they catch it
        with pytest.raises(ValueError, match="batch 17"):
            step(model, "function")
        time.sleep(4.0 * me)
        step(model)
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


@pytest.mark.parametrize("how", ["all", "another graph's", "another graph's inside", "again"])
def test_nobody_is_told(how):
    run_ranks(fails_and_goes_on, 2, how)


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
    others = run_ranks(load_hook_raises, 3)
    assert [name for name, _ in others] == ["OrderError", "ValueError", "OrderError"]
    for _, text in others:
        assert "batch 17 is bad" in text
