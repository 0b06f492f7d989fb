"""Simulated ranks with the simulated device, whose backend calls itself "nccl": what is told where a device waits.

The device's work is done forward only: autograd has one thread for a device, which would belong to one rank.

Promises:
- ranks compute as the unsharded module, bit for bit, whichever streams of their devices are late:
  `test_ranks_with_devices_compute_as_the_unsharded_module`
- a rank that lives and does not come to a collective for which devices wait is named by all, before the time-out; the
  communicators are aborted, and new process groups work: `test_where_devices_wait_a_rank_that_does_not_come_is_named`
- a rank that is killed, stopped or raises while devices wait for it is named by all alike, in the promised seconds:
  `test_where_devices_wait_a_lost_rank_is_named`
"""

import dataclasses
import datetime
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp.errors import OrderError
from tests.simulation import checkers
from tests.simulation.faults import draw, user_code
from tests.simulation.process import simulated

STEPS = 5
TIME_OUT = 60.0
LATE = ("others", "computing")  # which streams of the device
NEW_GROUP = 12  # points of the seams in which torch makes the group: it waits there, and names no rank


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def batch(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def expected(rank, first=0):
    net = model()
    return [net(batch(step, rank)).detach() for step in range(first, STEPS)]


class Sharded:
    """A sharded model on a new process group of the device."""

    def __init__(self):
        self.device = torch.device("sim", 0)
        self.group = dist.new_group(backend="sim:simulated", timeout=datetime.timedelta(seconds=TIME_OUT))
        net = model()
        for i in range(len(net)):
            net[i] = FSDP(net[i], process_group=self.group, device_id=self.device)
        self.net = FSDP(net, process_group=self.group, device_id=self.device)

    @torch.no_grad()
    def outputs(self, rank, first=0):
        for step in range(first, STEPS):
            user_code()
            yield self.net(batch(step, rank).to(self.device)).cpu()


def run_all(rank):
    return list(Sharded().outputs(rank))


def be_absent(rank, absent):
    """The ranks ``absent`` do not come to step 2 in time. All then make process groups anew, and go on."""
    again = time.monotonic() + 4 * TIME_OUT
    sharded = Sharded()
    outputs = sharded.outputs(rank)
    found = [next(outputs) for _ in range(2)]
    if rank in absent:
        time.sleep(2 * TIME_OUT)
    begin = time.monotonic()
    with pytest.raises(OrderError) as raised:
        list(outputs)
    waited = time.monotonic() - begin
    time.sleep(1.0)  # the watch says why before it aborts
    with pytest.raises(RuntimeError, match="the communicator was aborted"):
        dist.all_reduce(torch.ones(1, device=sharded.device), group=sharded.group)
    time.sleep(again - time.monotonic())
    found += list(Sharded().outputs(rank, first=2))
    return str(raised.value), waited, found


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_with_devices_compute_as_the_unsharded_module(size, late):
    run = simulated(run_all, size, seed=size, device=late)
    assert run.reason == 0, run.stacks
    assert not run.errors, run.errors
    for rank in range(size):
        assert all(map(torch.equal, run.results[rank], expected(rank)))


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(("size", "absent", "named"), [(2, [1], "rank 1"), (4, [1, 2], "ranks [1, 2]")])
def test_where_devices_wait_a_rank_that_does_not_come_is_named(size, absent, named, late):
    run = simulated(be_absent, size, 0, absent, device=late, timeout=TIME_OUT)
    assert run.reason == 0, run.stacks
    assert not run.errors, run.errors
    assert len({text for text, _, _ in run.results.values()}) == 1, run.results
    for rank, (text, waited, found) in run.results.items():
        assert f": {named} came to no collective of this model" in text, text
        assert waited <= (TIME_OUT if rank not in absent else checkers.AT_ONCE), (rank, waited)
        assert all(map(torch.equal, found, expected(rank)))


@pytest.mark.parametrize("kind", ["is killed", "is stopped", "raises in user code"])
def test_where_devices_wait_a_lost_rank_is_named(kind):
    seen = 0
    for seed in range(15):
        size = 2 + seed % 3
        (fault,) = draw(seed, size, 1, (45, STEPS), [kind])
        if kind != "raises in user code":
            fault = dataclasses.replace(fault, point=fault.point + NEW_GROUP)
        run = simulated(run_all, size, seed, device=LATE[seed % 2], faults=[fault])
        checkers.nobody_waits_for_ever(run)
        checkers.all_are_told_in_time(run)
        checkers.all_are_told_alike(run)
        seen += bool(checkers.told(run))
    assert seen > 5
