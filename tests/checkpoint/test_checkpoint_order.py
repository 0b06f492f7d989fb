"""A rank that saves or loads a checkpoint while another runs the model: all are told at once. Ranks are simulated.

Promises:
- if some ranks call `checkpoint.save` or `checkpoint.load` and others run a unit, all raise one OrderError that says
  which rank does which, long before the group's time-out: `test_a_checkpoint_on_some_ranks_is_told_at_once`
- ranks may come to a save or load as late as they like: `test_ranks_wait_for_a_late_one_beyond_the_time_out`
- ranks that are not in the call's group may be elsewhere: `test_ranks_outside_of_the_call_go_on`
"""

import datetime
import re
import time

import pytest
import torch
import torch.distributed as dist
from simulated_ranks import simulate_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, checkpoint
from flatparam.fsdp.errors import OrderError

pytestmark = pytest.mark.multiprocess

SOON = 10.0  # seconds in which a difference is told; the time-out of the group is 120


def made(group=None, strategy=ShardingStrategy.FULL_SHARD, seed=0):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for i in range(2):
        module[i] = FSDP(module[i], process_group=group, sharding_strategy=strategy)
    return FSDP(module, process_group=group, sharding_strategy=strategy)


def step(model):
    model(torch.ones(2, 3)).sum().backward()


def on_some_ranks(folder, ranks, call, before):
    """What this rank was told, and after how many seconds, when ``ranks`` alone ``call``."""
    model = made(dist.new_group())  # it cannot be used after this, and the world can
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    calls = {
        "save": lambda: checkpoint.save(f"{folder}/new", model, optimizer, overwrite=True),
        "async_save": lambda: checkpoint.async_save(f"{folder}/new", model, optimizer, overwrite=True),
        "load": lambda: checkpoint.load(f"{folder}/old", model, optimizer),
    }
    if before:
        for _ in range(2):
            step(model)
            optimizer.step()
        checkpoint.save(f"{folder}/old", model, optimizer)
    for _ in range(3 if before == "each step" else 0):  # the next one is expected
        step(model)
        done = calls[call]()
        if call == "async_save":
            done.wait()
    if before == "each step":
        step(model)

    def differ():
        if dist.get_rank() in ranks:
            calls[call]()
        step(model)
        calls[call]()
        step(model)

    begin = time.monotonic()
    with pytest.raises(OrderError) as raised:
        differ()
    return str(raised.value), time.monotonic() - begin


@pytest.mark.parametrize("before", ["", "a save", "each step"])
@pytest.mark.parametrize(
    ("world", "ranks", "call"),
    [(2, [0], "save"), (2, [1], "save"), (3, [0, 1], "save"), (3, [1, 2], "load"), (2, [0], "async_save")],
)
def test_a_checkpoint_on_some_ranks_is_told_at_once(tmp_path, world, ranks, call, before):
    told = simulate_ranks(on_some_ranks, world, str(tmp_path), ranks, call, before)
    texts = {text for text, _ in told}
    assert len(texts) == 1, texts
    [text] = texts
    does = rf"rank {ranks} {'loads' if call == 'load' else 'saves'} a checkpoint, in step \d"
    assert re.search(f"the ranks do different things: .*{does}", text), text
    assert re.search(r"rank \d gathers the unit of ", text), text
    assert max(seconds for _, seconds in told) < SOON, told


def with_a_late_rank(folder):
    model = made(dist.new_group(timeout=datetime.timedelta(seconds=10)))
    for i in range(2):
        step(model)
        if dist.get_rank() == i:
            time.sleep(12)
        checkpoint.save(f"{folder}/{i}", model)
        step(model)
        if dist.get_rank() == i:
            time.sleep(12)
        checkpoint.load(f"{folder}/{i}", model)
    step(model)
    return True


def test_ranks_wait_for_a_late_one_beyond_the_time_out(tmp_path):
    """As before the check: a rank may prepare its save, or evaluate, for longer than a collective may take."""
    assert simulate_ranks(with_a_late_rank, 2, str(tmp_path), timeout=200.0) == [True, True]


def outside(folder):
    """Ranks 0 and 1 have one model, ranks 2 and 3 another, and all four a third one."""
    me = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model, common = made(pairs[me // 2]), made(seed=1)
    for i in range(2):
        if me < 2:
            checkpoint.save(f"{folder}/{i}", model, process_group=pairs[0])
            checkpoint.load(f"{folder}/{i}", nn.Sequential(model, common), process_group=pairs[0], strict=False)
        step(model)
        step(common)
    return True


def test_ranks_outside_of_the_call_go_on(tmp_path):
    assert simulate_ranks(outside, 4, str(tmp_path)) == [True] * 4
