"""The worlds of one rank of an elastic job, one after another.

Promises:
- an error of a rank that has had many worlds is printed with one prefix, and a hook of the user stays:
  `test_many_worlds_leave_one_hook`
- a rank that has come to a new world, and is killed before it connects, is missed after 1 s; a further try may take
  longer: `test_a_rank_that_is_lost_before_it_connects_is_missed_soon`
- if it is killed as it connects, no other rank waits for it so long that it is taken for lost itself:
  `test_a_rank_that_is_lost_as_it_connects_keeps_nobody_for_long`
- a rank is killed, and the others make a process group with it: they raise an error within seconds, also if it was
  killed as it connects: `test_a_group_does_not_wait_for_a_lost_rank`
- ranks that live and do not come to make a process group are waited for as long as its own time-out says:
  `test_a_group_knows_its_own_time_out`
- a group that gloo does not connect by itself has the time-out that was asked for, as with
  TORCH_DISTRIBUTED_DEBUG=DETAIL: `test_a_wrapped_group_has_its_time_out`
- a group that gloo connects has the time-out that was asked for; a script may make a world of its own after the loop,
  and call torch's function for it by names: `test_a_world_of_the_script_is_torchs`
- the world in which a new process builds its model leaves no hook: `test_a_process_that_asks_leaves_no_hook`
"""

import datetime
import functools
import gc
import os
import signal
import sys
import time

import gloo
import pytest
import torch
import torch.distributed as dist
from killed_script import signal_in
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.elastic.epochs import PATIENCE, Epoch, Epochs
from flatparam.elastic.training import Session, begin_session
from flatparam.fsdp.desync import liveness
from flatparam.fsdp.desync.stores import in_memory, store_of_world
from flatparam.fsdp.errors import OrderError


def session(member):
    return Session(in_memory(), member, 1, "parity", 1, datetime.timedelta(seconds=60))


def note(seen, below, kind, *rest):
    seen.append(kind)
    below(kind, *rest)


def test_many_worlds_leave_one_hook(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: print(error[0].__name__, file=sys.stderr))
    mine = session("0.0")
    for number in range(5):
        mine.make_world(Epoch(number, ["0.0"]))
        if number == 2:
            sys.excepthook = functools.partial(note, seen, sys.excepthook)
        mine.end_world()
    sys.excepthook(ValueError, ValueError(), None)
    assert seen == [ValueError]
    assert capsys.readouterr().err == "[rank0]: ValueError\n"


def test_a_process_that_asks_leaves_no_hook(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", hook := lambda *_: None)
    monkeypatch.setattr(Session, "build", lambda *_: None)
    monkeypatch.setattr(Epochs, "wait_to_join", lambda *_: None)
    with pytest.raises(SystemExit):
        session("0.1").ask_to_join(None)
    assert sys.excepthook is hook


@pytest.mark.multiprocess
@pytest.mark.parametrize(("heartbeat", "tries", "seconds"), [("10", 0, 1.0), ("10", 1, 2.0), ("1", 1, 0.6)])
def test_a_rank_that_is_lost_before_it_connects_is_missed_soon(monkeypatch, heartbeat, tries, seconds):
    monkeypatch.setenv("FLATPARAM_HEARTBEAT", heartbeat)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    mine = session("0.0")
    mine.epoch = Epoch(1 - tries, ["0.0", "1.0"])  # that was tried before
    mine.epochs._store.set("here/1/1.0", mine.epochs.settings)  # and was killed then
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        mine.make_world(Epoch(1, ["0.0", "1.0"]))
    assert seconds - 0.1 < time.monotonic() - begin < seconds + 5.0  # the group may take 60
    mine.end_world()


MEMBERS = ["0.0", "1.0", "2.0"]


def session_of_rank(every=1):
    gloo.meet_in_a_server()
    store, rank, size = store_of_world(), dist.get_rank(), dist.get_world_size()
    gloo.leave_world()
    return rank, Session(store, f"{rank}.0", size, "parity", every, datetime.timedelta(seconds=60))


def build():
    torch.manual_seed(0)  # ranks that have run other tests before
    model = FSDP(nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters())


def begun(every=1):
    """Returns: the rank and its session, as ``start`` leaves it. A world that connects too slowly is made again."""
    rank, mine = session_of_rank(every)
    begin_session(mine, build)
    return rank, mine


def connects():
    """Rank 1 says where it listens, and is killed. Notes the seconds until the others' new world fails."""
    rank, mine = session_of_rank()
    for one in MEMBERS:
        mine.epochs._store.set(f"here/1/{one}", mine.epochs.settings)
    if rank == 1:
        signal_in(0.5, signal.SIGKILL)
    else:
        time.sleep(1.0)
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        mine.make_world(Epoch(1, MEMBERS))
    gloo.note(time.monotonic() - begin)


@pytest.mark.multiprocess
def test_a_rank_that_is_lost_as_it_connects_keeps_nobody_for_long():
    ends = gloo.ends_of_ranks(connects, 3, environment={"FLATPARAM_HEARTBEAT": "4"})
    assert ends[1][0] == -signal.SIGKILL
    assert all(float(ends[rank][2]) < 4.0 + PATIENCE for rank in (0, 2)), ends


def makes_a_group_alone(seconds):
    """Rank 0 makes a group that rank 1 does not make. Returns: the seconds that it has waited, and its error."""
    rank, _ = begun()
    store_of_world().raw.set_timeout(datetime.timedelta(seconds=seconds))
    begin, error = time.monotonic(), ""
    if rank == 0:
        with pytest.raises(OrderError) as raised:
            dist.new_group(timeout=datetime.timedelta(seconds=1.5))
        error = str(raised.value)
        gloo.say("over")
    else:
        gloo.wait_until_said("over")
    return time.monotonic() - begin, error


@pytest.mark.multiprocess
@pytest.mark.parametrize(("seconds", "heartbeat"), [(60.0, "10"), (1.5, "10"), (1.0, "0")])  # of the world's store
def test_a_group_knows_its_own_time_out(seconds, heartbeat):
    environment = {"FLATPARAM_HEARTBEAT": heartbeat}
    (waited, error), _ = gloo.run_ranks(makes_a_group_alone, 2, seconds, environment=environment)
    assert 1.4 < waited < 5.0
    assert "not all of its ranks have come to make a process group within 1.5 s" in error


def waits_in_a_wrapped_group():
    rank, _ = begun()
    group = dist.new_group()
    for over in (dist.group.WORLD, group):
        time.sleep(2.5 * rank)
        dist.barrier(group=over)


@pytest.mark.multiprocess
def test_a_wrapped_group_has_its_time_out():
    gloo.run_ranks(waits_in_a_wrapped_group, 2, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


@pytest.mark.multiprocess
def test_a_world_of_the_script_is_torchs():
    mine = session("0.0")
    mine.make_world(Epoch(0, ["0.0"]))
    asked = datetime.timedelta(seconds=50)
    assert dist.new_group([0], timeout=asked)._get_backend(torch.device("cpu")).options._timeout == asked
    dist.destroy_process_group()
    gc.collect()
    assert mine._world() is None
    long = datetime.timedelta(seconds=70)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore(), timeout=long)
    try:
        assert not mine.makes("gloo")
        assert dist.new_group([0], timeout=long)._get_backend(torch.device("cpu")).options._timeout == long
        group, _ = dist.distributed_c10d._new_process_group_helper(
            group_size=1,
            group_rank=0,
            global_ranks_in_group=[0],
            backend="gloo",
            store=dist.HashStore(),
            group_name="own",
            timeout=long,
        )
        assert group._get_backend(torch.device("cpu")).options._timeout == long
    finally:
        dist.destroy_process_group()


def makes_a_group(comes):
    """Rank 1 is killed, with ``comes`` as it connects. Notes the seconds until the others' group with it fails."""
    rank, _ = begun()

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1 and comes:
        liveness.wait_for_keys = die
    elif rank == 1:
        die()
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        dist.new_group()
    gloo.note(time.monotonic() - begin)


@pytest.mark.multiprocess
@pytest.mark.parametrize("comes", [False, True])
def test_a_group_does_not_wait_for_a_lost_rank(comes):
    ends = gloo.ends_of_ranks(makes_a_group, 3, comes, environment={"FLATPARAM_HEARTBEAT": "4"})
    assert ends[1][0] == -signal.SIGKILL
    assert all(float(ends[rank][2]) < 4.0 + PATIENCE for rank in (0, 2)), ends
