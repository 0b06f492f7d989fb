"""Simulated ranks with the simulated device, whose backend calls itself "nccl": what is told where a device waits.

Each rank has a device, and autograd's thread for it.

Promises:
- ranks train as the unsharded module, bit for bit, whichever streams of their devices are late:
  `test_ranks_with_devices_train_as_the_unsharded_module`; the same seed gives the same run
- a rank that lives and does not come to a collective for which devices wait is named by all, before the time-out; the
  communicators are aborted, and new process groups work: `test_where_devices_wait_a_rank_that_does_not_come_is_named`
- so is one that is killed while devices wait for it in the outer group of LAYER_ZERO_NESTED:
  `test_a_rank_that_is_lost_to_an_outer_group_is_named`
- random programs train as the unsharded module, and lost ranks are told: `test_random_programs_on_devices`
- a rank that is killed, stopped or raises while devices wait for it is named by all alike, in the promised seconds:
  `test_where_devices_wait_a_lost_rank_is_named`
"""

import datetime
import functools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.fsdp.errors import OrderError
from tests.simulation import checkers
from tests.simulation.faults import Fault, draw, user_code
from tests.simulation.faulty_programs import CallsUserCode
from tests.simulation.process import simulated
from tests.simulation.test_simulated_programs import play_all

STEPS, LR = 5, 0.125
TIME_OUT = 60.0
LATE = ("others", "computing")  # which streams of the device


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def batch(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def expected(size):
    """The outputs of each step, a list for each rank. Gradients are added in the order of ranks."""
    net, found = model(), [[] for _ in range(size)]
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for step in range(STEPS):
        grads = []
        for rank in range(size):
            output = net(batch(step, rank))
            found[rank].append(output.detach())
            grads.append(torch.autograd.grad(output.square().mean(), list(net.parameters())))
        for param, first, *rest in zip(net.parameters(), *grads, strict=True):
            param.grad = functools.reduce(torch.add, (each / size for each in rest), first / size)
        optimizer.step()
    return found


class Sharded:
    """A sharded model on a new process group of the device, and its optimizer."""

    def __init__(self):
        self.device = torch.device("sim", torch.sim.current_device())
        self.group = dist.new_group(backend="sim:simulated", timeout=datetime.timedelta(seconds=TIME_OUT))
        net = model()
        for i in range(len(net)):
            net[i] = FSDP(net[i], process_group=self.group, device_id=self.device)
        self.net = FSDP(net, process_group=self.group, device_id=self.device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=LR)

    def outputs(self, rank):
        """Train, and yield the output of each step once it is done."""
        for step in range(STEPS):
            user_code()
            output = CallsUserCode.apply(self.net(batch(step, rank).to(self.device)))
            output.square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield output.detach().cpu()


def run_in_a_grid(rank):
    """Train with LAYER_ZERO_NESTED: gathers go over groups of two ranks, and over the ranks of one place in these."""
    device, world = torch.device("sim", rank), dist.new_group(backend="sim:simulated")
    rows = [dist.new_group(ranks, backend="sim:simulated") for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks, backend="sim:simulated") for ranks in ([0, 2], [1, 3])]
    groups = rows[rank // 2], world, columns[rank % 2]
    arguments = {"process_group": groups, "sharding_strategy": ShardingStrategy.LAYER_ZERO_NESTED, "device_id": device}
    net = FSDP(nn.Sequential(*(FSDP(each, **arguments) for each in model())), **arguments)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for step in range(STEPS):
        user_code()
        net(batch(step, rank).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run_all(rank):
    return list(Sharded().outputs(rank))


def be_absent(rank, absent):
    """The ranks ``absent`` do not come to step 2 in time. All then make process groups anew, and begin again."""
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
    found += run_all(rank)
    return str(raised.value), waited, found


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_with_devices_train_as_the_unsharded_module(size, late):
    run, again = (simulated(run_all, size, seed=size, device=late) for _ in range(2))
    assert run.reason == 0, run.stacks
    assert not run.errors, run.errors
    assert run.digest == again.digest
    for rank, outputs in enumerate(expected(size)):
        assert all(map(torch.equal, run.results[rank], outputs))


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(("size", "absent", "named"), [(2, [1], "rank 1"), (4, [1, 2], "ranks [1, 2]")])
def test_where_devices_wait_a_rank_that_does_not_come_is_named(size, absent, named, late):
    run = simulated(be_absent, size, 0, absent, device=late, timeout=TIME_OUT)
    assert run.reason == 0, run.stacks
    assert not run.errors, run.errors
    assert len({text for text, _, _ in run.results.values()}) == 1, run.results
    outputs = expected(size)
    for rank, (text, waited, found) in run.results.items():
        assert f": {named} came to no collective of this model" in text, text
        assert waited <= (TIME_OUT if rank not in absent else checkers.AT_ONCE), (rank, waited)
        assert all(map(torch.equal, found, [*outputs[rank][:2], *outputs[rank]]))


@pytest.mark.parametrize("kind", ["is killed", "is stopped", "raises in user code"])
def test_where_devices_wait_a_lost_rank_is_named(kind):
    seen = 0
    for seed in range(15):
        size = 2 + seed % 3
        (fault,) = draw(seed, size, 1, (120, 2 * STEPS), [kind])
        run = simulated(run_all, size, seed, device=LATE[seed % 2], faults=[fault])
        checkers.nobody_waits_for_ever(run)
        checkers.all_are_told_in_time(run)
        checkers.all_are_told_alike(run)
        seen += bool(checkers.told(run))
    assert seen > 5


@pytest.mark.parametrize("late", LATE)
def test_a_rank_that_is_lost_to_an_outer_group_is_named(late):
    for point in range(94, 130, 12):
        run = simulated(run_in_a_grid, 4, device=late, faults=[Fault("is killed", 2, point)])
        assert run.struck
        checkers.nobody_waits_for_ever(run)
        checkers.all_are_told_in_time(run, least=checkers.WATCHED)
        checkers.all_are_told_alike(run)


def test_random_programs_on_devices():
    play_all(12, "device")
