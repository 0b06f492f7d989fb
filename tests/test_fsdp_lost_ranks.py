"""Ranks that wait for others that do not come: Ctrl-C ends it; a group may go while a collective is under way."""

import datetime
import functools
import gc
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from gloo import note, run_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy

pytestmark = pytest.mark.multiprocess

LIMIT = 4.0  # seconds that a collective of these groups may take


def model_of(group, **kwargs):
    torch.manual_seed(0)
    return FSDP(
        nn.Sequential(*(FSDP(nn.Linear(4, 4), process_group=group, **kwargs) for _ in range(3)), nn.Linear(4, 1)),
        process_group=group,
        **kwargs,
    )


def made(strategy="FULL_SHARD", limit=LIMIT, **kwargs):
    """A model over a group of its own: one that cannot be used any more shall not disturb the others."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=limit))
    return model_of(group, sharding_strategy=ShardingStrategy[strategy], **kwargs)


def step(model):
    model(torch.ones(2, 4)).sum().backward()


def after_ctrl_c(call):
    """Seconds from Ctrl-C, while ``call`` waits for another rank, to the KeyboardInterrupt."""
    pressed = []

    def press():
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.5, press)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    return time.monotonic() - pressed[0]


def waits(strategy):
    """What a rank may wait in, each over a group of its own."""
    for where in ("forward", "backward") if strategy == "FULL_SHARD" else ("backward",):
        model = made(strategy)
        step(model)
        loss = model(torch.ones(2, 4)).sum() if where == "backward" else None
        yield f"{where} of {strategy}", loss.backward if loss is not None else functools.partial(step, model)


def wait_in_vain():
    seconds = {}
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        for what, wait in waits(strategy):
            note(what)
            if dist.get_rank() == 0:
                seconds[what] = after_ctrl_c(wait)
            dist.barrier()
    return seconds


def test_ctrl_c_ends_every_wait_within_a_second():
    seconds = run_ranks(wait_in_vain, 2)[0]
    assert len(seconds) == 3
    assert max(seconds.values()) < 1.0, seconds


def go_on_after_ctrl_c():
    """The gather that was given up ends after all; then the model is as good as another that nobody interrupted."""
    model, other = made(limit=30.0), made(limit=30.0)
    for _ in range(2):
        step(model)
        step(other)
    if dist.get_rank():
        time.sleep(2.0)
        with pytest.raises(TypeError):
            model(torch.ones(2, 4), "too many")
    else:
        after_ctrl_c(lambda: step(model))
    for one in (model, other):
        one.zero_grad()
        step(one)
    for param, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad)


def test_a_model_goes_on_after_ctrl_c():
    run_ranks(go_on_after_ctrl_c, 2)


def let_go():
    """Of a group and a model over it, while the group's thread works on a collective whose tensor nobody else has."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=30))
    model = model_of(group)
    step(model)
    if dist.get_rank():
        time.sleep(1.0)
    dist.all_reduce(torch.ones(4), group=group, async_op=True)
    note("destroy_process_group() is next")
    dist.destroy_process_group(group)
    del group, model
    note("the model is gone")
    gc.collect()
    return True


def test_a_group_goes_while_a_collective_is_under_way():
    assert run_ranks(let_go, 2, timeout=20.0) == [True, True]
