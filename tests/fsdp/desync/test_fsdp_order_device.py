"""The order of collectives where a device waits, as with NCCL: ranks that differ, are lost or do not come are named.

The simulated device's collectives stand for NCCL's (simulated.py).

Promises:
- the same where the device waits, as with NCCL; and a rank that lives and does not come
"""

import json
import os
import re
import signal
import threading
import time

import pytest
import simulated
import torch
import torch.distributed as dist
from fsdp_models import wrap_blocks
from gloo import ends_of_ranks, meet_in_a_server, note, run_ranks, say, wait_until_said
from test_fsdp_order import ALL, Chosen

from flatparam import _C, FullyShardedDataParallel, ShardingStrategy
from flatparam.fsdp.desync.checked_collectives import trace_of
from flatparam.fsdp.desync.trace import _WATCHING
from flatparam.fsdp.errors import OrderError

pytestmark = pytest.mark.multiprocess

SOON = 10.0  # seconds in which a difference or a loss is told: 1 to 3, but for a busy machine


def on_a_device(library, scenario):
    """The device waits, as for NCCL: a thread finds that the ranks differ, and what has been put to it is aborted."""
    simulated.use(library)
    sim, me, begun = torch.device("sim", 0), dist.get_rank(), []
    torch.manual_seed(0)
    model = wrap_blocks(Chosen(), process_group=simulated.new_group(), device_id=sim)
    x = torch.ones(2, 3, device=sim)

    def train():
        for number in range(1, 7):
            begun.append(time.monotonic())
            loss = model(x, (0, 2, 3) if me and number == scenario else ALL).sum()
            loss.backward()
            loss.item()

    with pytest.raises(OrderError, match=rf"rank [01] .*`blocks\.[12]`, in step {scenario}"):
        train()
    return time.monotonic() - begun[scenario - 1]


@pytest.mark.parametrize("scenario", [1, 2, 4])
def test_where_the_device_waits_all_ranks_are_told(scenario):
    library = str(simulated.build())
    assert max(run_ranks(on_a_device, 2, library, scenario)) < SOON


# Seconds, 1.5 to 2 more than it takes to name who does not come; set after a step, as a store may be slow to connect to
TIME_OUT = 7.0
WAITS = {
    "for the device": lambda device, loss: loss.item(),
    "for the device, with the GIL": lambda device, loss: device.synchronize(with_gil=True),  # as torch.save() does
    "on the host": lambda device, loss: loss.item(),  # where ranks tell each other which copies are old
}


def lose_on_a_device(library, how, who, waits):
    """Rank ``who`` is lost while the device of the others waits for it; what they are told is their last note."""
    meet_in_a_server()
    device = simulated.use(library)
    sim, processes = torch.device("sim", 0), [None] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    on_host = waits == "on the host"
    group = simulated.new_group(on_host=on_host)
    strategy = ShardingStrategy.ZERO_1 if on_host else ShardingStrategy.FULL_SHARD
    model = wrap_blocks(Chosen(), process_group=group, device_id=sim, sharding_strategy=strategy)
    x = torch.ones(2, 3, device=sim)
    for number in range(6):
        begin = time.monotonic()
        if number == 3 and dist.get_rank() == who:
            if how == "raises":
                raise ValueError("batch 17 is bad")
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        try:
            loss = model(x, ALL).sum()
            loss.backward()
            WAITS[waits](device, loss.detach())
        except OrderError as error:
            note(json.dumps([str(error), time.monotonic() - begin]))
            if how == "stops":
                os.kill(processes[who], signal.SIGKILL)
            os._exit(3)


@pytest.mark.parametrize(
    ("how", "who", "told"),
    [
        ("dies", 1, r"the process of rank 1 \(\d+\) has ended without a word"),
        ("dies", 0, "the store of the process group cannot be reached any more"),  # which its process has
        ("raises", 1, "rank 1 has raised an error of its own .*ValueError: batch 17 is bad"),
        ("stops", 1, "rank 1 has given no sign of life for 2 s: it is stopped, or out of reach"),
    ],
)
@pytest.mark.parametrize("waits", WAITS)
def test_where_the_device_waits_for_a_rank_that_is_lost_the_others_are_told(how, who, told, waits):
    library = str(simulated.build())
    environment = {"FLATPARAM_HEARTBEAT": "2"} if how == "stops" else {}
    ends = ends_of_ranks(lose_on_a_device, 2, library, how, who, waits, timeout=60.0, environment=environment)
    code, _, said = ends[1 - who]
    assert code == 3, ends
    reason, seconds = json.loads(said)
    assert re.search(told, reason), reason
    assert seconds < SOON, seconds


def leave(code, told, absent=()):
    """End this process when all of the ranks ``told`` have come here; rank 0, which has the store, ends last."""
    me = dist.get_rank()
    say(f"rank {me} has come")
    for rank in set(told) - {me}:
        wait_until_said(f"rank {rank} has come")
    say(f"rank {me} ends")
    for rank in {*told, *absent} - {0} if me == 0 else ():
        wait_until_said(f"rank {rank} ends")
    os._exit(code)


def do_not_come(library, before):
    """Rank 1 lives, and comes to no collective any more; what the others are told is their last note."""
    meet_in_a_server()
    device = simulated.use(library)
    sim = torch.device("sim", 0)
    group = simulated.new_group()
    model = wrap_blocks(Chosen(), process_group=group, device_id=sim)
    for _ in range(1 if before == "clips" else 4):  # until all is new, or known: else the host asks the others first
        model(torch.ones(2, 3, device=sim), ALL).sum().backward()
    device.synchronize()
    device.set_time_out(group._get_backend(sim), TIME_OUT)
    if dist.get_rank() == 1:
        leave(0, told=[0, 2])
    begin = time.monotonic()
    try:
        if before != "gathers":  # which Python begins
            model.clip_grad_norm_(1.0)
            device.synchronize()
        for _ in range(3):
            model(torch.ones(2, 3, device=sim), ALL).sum().item()
    except OrderError as error:
        note(json.dumps([str(error), time.monotonic() - begin]))
        leave(3, told=[0, 2], absent=[1])


# "asks": the host asks the others before it clips, as it has always gathered there, and the device has nothing to do
@pytest.mark.parametrize("before", ["gathers", "clips", "asks"])
def test_where_the_device_waits_for_a_rank_that_does_not_come_the_others_are_told(before):
    library = str(simulated.build())
    (first, _, one), _, (third, _, other) = ends_of_ranks(do_not_come, 3, library, before)
    assert (first, third) == (3, 3), (one, other)
    (reason, seconds), (same, as_long) = json.loads(one), json.loads(other)
    waited = "and has waited 4 s for the others" if before == "asks" else "; the device has waited"
    does = "clips" if before == "asks" else before
    assert re.search(f"rank [02] {does} .*{waited}.*: rank 1 came to no collective", reason), reason
    assert same == reason
    assert max(seconds, as_long) < TIME_OUT + 5.0, (seconds, as_long)  # 5.5 s, but for a busy machine


def catch_in_a_forward(library, how):
    """Rank 1 catches what a forward raises, and lives on without a step; or both ranks do, and go on with the next."""
    simulated.use(library)
    sim, me = torch.device("sim", 0), dist.get_rank()
    model = wrap_blocks(Chosen(), process_group=simulated.new_group(), device_id=sim)

    def fail(*args):
        raise ValueError("batch 17 is bad")

    def step():
        loss = model(torch.ones(2, 3, device=sim), ALL).sum()
        loss.backward()
        return loss.item()

    losses = [step() for _ in range(3)]
    begin = time.monotonic()
    if me == 1 or how == "both":
        hook = model.module.blocks[2].module.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="batch 17"):
            step()
        hook.remove()
    if how == "both":
        time.sleep(4.0 * me)  # it loads data, say
        return step() == losses[0]
    if me == 1:
        wait_until_said("rank 0 was told")
        return None
    with pytest.raises(OrderError) as told:  # if the host had gone on, the next collective raises
        [step() for _ in range(2)]
    seconds = time.monotonic() - begin
    say("rank 0 was told")
    return str(told.value), seconds


def test_where_the_device_waits_for_a_rank_that_has_caught_an_exception_the_others_are_told():
    (reason, seconds), _ = run_ranks(catch_in_a_forward, 2, str(simulated.build()), "alone")
    said = r"rank 1 has raised an error of its own in .* and has not gone on since: ValueError: batch 17 is bad"
    assert re.match(said, reason), reason
    assert 1.9 < seconds < SOON, seconds


def test_where_the_device_waits_nobody_is_told_of_an_exception_that_all_ranks_have_caught():
    assert run_ranks(catch_in_a_forward, 2, str(simulated.build()), "both") == [True, True]


def do_not_come_on_a_grid(library, how):
    """Rank 3 does not come. Rank 0 waits for rank 1 or 2, which wait for rank 3."""
    meet_in_a_server()
    device = simulated.use(library)
    sim, me = torch.device("sim", 0), dist.get_rank()
    groups = [simulated.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    groups = groups[me // 2], groups[2 + me % 2]
    ways = {"process_group": groups, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    model = wrap_blocks(Chosen(), device_id=sim, **ways)

    def step():
        loss = model(torch.ones(2, 3, device=sim), ALL).sum()
        loss.backward()
        loss.item()

    step()
    for group in groups:
        device.set_time_out(group._get_backend(sim), TIME_OUT)
    if me == 3:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        leave(0, told=[0, 1, 2])
    begin = time.monotonic()
    try:
        step()
        step()
    except OrderError as error:
        note(json.dumps([str(error), time.monotonic() - begin]))
        leave(3, told=[0, 1, 2], absent=[3] if how == "stays away" else [])


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("stays away", r"rank [0-2] .*: rank 3 came to no collective"),
        ("dies", r"the process of rank 3 \(\d+\) has ended without a word"),
    ],
)
def test_on_a_grid_nobody_is_named_who_waits_for_another(how, told):
    # torch's store resolves the name of each process that connects, which may take it 5 s
    ends = ends_of_ranks(do_not_come_on_a_grid, 4, str(simulated.build()), how, timeout=150.0)
    assert [code for code, _, _ in ends] == [3, 3, 3, -9 if how == "dies" else 0], ends
    for reason, seconds in (json.loads(said) for _, _, said in ends[:3]):
        assert re.search(told, reason), ends
        assert seconds < TIME_OUT + 5.0, ends


def wait_or_compute(library, waits):
    """What a watch finds within 7 s while the device waits in a wait for a collective, or computes before it."""
    device = simulated.use(library, late="computing")
    sim, group = torch.device("sim", 0), simulated.new_group()
    device.set_time_out(group._get_backend(sim), 5.0)
    board = _C.HealthBoard(dist.group.WORLD.group_name, "here", 0.0, True)
    found, name = [], group.group_name
    watched = (_C.CollectiveTrace(*(lambda *args: None,) * 3), name, "sim", "there", [0, 1], 0.1)
    watch = threading.Thread(target=lambda: found.append(board.watch(*watched)))
    watch.start()
    if dist.get_rank() == 0:
        time.sleep(0.5)
        if not waits:
            device.compute_for(9.0)
        board.around_wait(name, "sim", lambda: device.compute_for(9.0) if waits else None)
        watch.join(7.0)
    board.stop()
    watch.join()
    return found


def wait_ahead(library, raised):
    """Whether a watch ends a wait: the host is in step 3, and rank 1, with ``raised`` this one too, has raised in 1."""
    device = simulated.use(library, late="computing")
    group = simulated.new_group()
    board = _C.HealthBoard(dist.group.WORLD.group_name, "here", 0.0, True)
    found, trace = [], _C.CollectiveTrace(*(lambda *args: None,) * 3)
    for event in range(3):
        trace.note(event, True)
        trace.begin()
    watched = (trace, group.group_name, "sim", "there", [0, 1], 0.1)
    watch = threading.Thread(target=lambda: found.append(board.watch(*watched)))
    watch.start()
    if dist.get_rank() == 0:
        store = dist.PrefixStore("there", dist.distributed_c10d._world.pg_map[group][1])
        if raised:
            store.set("raised by 0", _C.write_report(0, 1, 1, "batch 17 is bad"))
        store.set("trouble", _C.write_report(1, 1, 1, "batch 17 is bad"))
        time.sleep(0.5)
        board.around_wait(group.group_name, "sim", lambda: device.compute_for(5.0))
        watch.join(4.0)
    board.stop()
    watch.join()
    return found


@pytest.mark.parametrize("raised", [False, True])
def test_where_the_host_is_ahead_of_a_waiting_device_it_is_told_unless_it_has_raised_too(raised):
    assert run_ranks(wait_ahead, 2, str(simulated.build()), raised) == [[not raised], [False]]


def test_a_device_that_computes_before_a_wait_for_a_collective_does_not_wait_yet():
    library = str(simulated.build())
    assert run_ranks(wait_or_compute, 2, library, True) == [[True], [False]]
    assert run_ranks(wait_or_compute, 2, library, False) == [[False], [False]]


def end_after_the_last_collective(library, which):
    """Rank 1 ends; rank 0, whose device has work of its own, has all values. It is told when it waits again."""
    meet_in_a_server()
    device = simulated.use(library, late="computing")
    sim = torch.device("sim", 0)
    group = simulated.new_group()
    model = wrap_blocks(Chosen(), process_group=group, device_id=sim)
    x = torch.ones(2, 3, device=sim)

    def train(steps):
        for _ in range(steps):
            model(x, ALL).sum().backward()
            device.synchronize()

    if which == "step":
        train(2)
        model.clip_grad_norm_(1.0)
    else:
        model.state_dict()
    device.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    y = x + 1
    time.sleep(3 * _WATCHING)
    assert y.sum().item() == 12
    assert not trace_of(group, sim).core.broken
    with pytest.raises(OrderError, match=r"the process of rank 1 \(\d+\) has ended"):
        train(2)
    note("told")
    os._exit(3)


@pytest.mark.parametrize("which", ["step", "state_dict"])
def test_a_rank_that_ends_takes_nothing_from_another_that_waits_for_nobody(which):
    library = str(simulated.build())
    assert ends_of_ranks(end_after_the_last_collective, 2, library, which, timeout=60.0)[0] == (3, None, "told")


def lose_outside_of_a_step(library, before):
    """Rank 1 raises before a call that waits for it on the device: nothing of that call is there, and nobody hangs."""
    meet_in_a_server()
    simulated.use(library)
    sim = torch.device("sim", 0)
    group = simulated.new_group()

    def check(call):
        if call == before and dist.get_rank() == 1:
            raise ValueError("batch 17 is bad")

    begin = time.monotonic()
    try:
        check("constructor")
        model = wrap_blocks(Chosen(), process_group=group, device_id=sim)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 3, device=sim), ALL).sum().backward()
        optimizer.step()
        check("state_dict")
        begin = time.monotonic()
        model.state_dict()
        check("optim_state_dict")
        begin = time.monotonic()
        FullyShardedDataParallel.optim_state_dict(model, optimizer)
    except OrderError as error:
        note(json.dumps([str(error), time.monotonic() - begin]))
        os._exit(3)


@pytest.mark.parametrize("before", ["constructor", "state_dict", "optim_state_dict"])
def test_a_rank_that_is_lost_leaves_no_values_to_save(before):
    library = str(simulated.build())
    (code, _, said), _ = ends_of_ranks(lose_outside_of_a_step, 2, library, before, timeout=60.0)
    assert code == 3, said
    reason, seconds = json.loads(said)
    assert re.search("rank 1 has raised an error of its own .*ValueError: batch 17 is bad", reason), reason
    assert seconds < SOON, seconds
