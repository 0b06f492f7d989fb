"""A wait for a gather that is broken off, or a gather that fails, and is caught: nothing is computed with garbage.

Promises:
- the next call repeats a wait for a gather that a signal has ended; a failed gather's values are not used
"""

import contextlib
import datetime
import itertools
import signal
import time

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Block, data, full_grads, make
from gloo import note, run_ranks, say, wait_until_said
from layer_zero_ranks import pair
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.fsdp.desync import stores

pytestmark = pytest.mark.multiprocess


class Impatient(nn.Module):
    """It calls its block again if that has raised."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.block = Block(5)
        self.block.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.last = nn.Linear(5, 1)
        self.before, self.raised = contextlib.nullcontext, 0

    def forward(self, x):
        x = self.first(x)
        try:
            with self.before():
                y = self.block(x)
        except (TimeoutError, RuntimeError):
            self.raised += 1
            y = self.block(x)
        return self.last(y)


@contextlib.contextmanager
def interrupted():
    """Rank 0 waits for the others, and gets a signal meanwhile; they come a moment later."""

    def interrupt(number, frame):
        raise TimeoutError

    if dist.get_rank() > 0:
        wait_until_said("rank 0 was interrupted")
        time.sleep(0.1)
        yield
        return
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        say("rank 0 was interrupted")


def signals():
    module = make(cls=Impatient)
    ranks = range(dist.get_world_size())
    losses = [module(data(0, rank)).square().mean() for rank in ranks]
    sum(losses).backward()
    for (strategy, inner), uo in itertools.product(
        (("FULL_SHARD", 0), ("ZERO_1", 0), ("LAYER_ZERO", 2), ("LAYER_ZERO_NESTED", 2)), (False, True)
    ):
        note(f"{strategy} {uo}")
        model = make(cls=Impatient)
        arguments = {
            "sharding_strategy": ShardingStrategy[strategy],
            "use_orig_params": uo,
            "segments": True,
            "process_group": pair(inner) if inner else None,
        }
        model.block = FSDP(model.block, **arguments)
        model = FSDP(model, **arguments)
        for times in (1, 2):  # the first time all is asked of the others beforehand
            model.zero_grad()
            model.module.before = interrupted if times == 2 else contextlib.nullcontext
            loss = model(data(0)).square().mean()
            assert model.module.raised == (times == 2 and dist.get_rank() == 0), (strategy, uo)
            assert torch.equal(loss, losses[dist.get_rank()]), (strategy, uo)
            loss.backward()
            for (name, grad), param in zip(full_grads(model).items(), module.parameters(), strict=True):
                if param.grad is not None:
                    torch.testing.assert_close(grad, param.grad / len(ranks), rtol=1e-5, atol=1e-7, msg=name)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.0)  # all is gathered from the shards again


def test_a_wait_that_a_signal_ends_goes_on_in_the_next_call():
    run_ranks(signals, 4)


def failures():
    """A group whose gathers fail after half a second, once there are units, and nobody who says so before."""
    stores.WITHOUT_STORE = (*stores.WITHOUT_STORE, "gloo")
    for strategy, uo in itertools.product(("FULL_SHARD", "SHARD_GRAD_OP"), (False, True)):
        group = dist.new_group(timeout=datetime.timedelta(seconds=30))
        model = make(cls=Impatient)
        arguments = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo, "process_group": group}
        model.block = FSDP(model.block, segments=True, **arguments)
        model = FSDP(model, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=uo)
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.5), group)
        dist.barrier()
        if dist.get_rank() == 0:
            with torch.no_grad(), pytest.raises(RuntimeError, match=r"(?i)timeout|timed out|closed"):
                model(data(0))
            assert model.module.raised == 1
        dist.barrier()


def test_a_gather_that_fails_is_not_computed_with():
    run_ranks(failures, 2)
