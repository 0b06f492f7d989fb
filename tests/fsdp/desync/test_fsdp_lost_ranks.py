"""Waiting for ranks that do not come: the errors of the other ranks, and groups that end meanwhile.

Promises:
- if a rank raises, dies or is stopped, or finds that ranks differ and ends at once, the others raise the reason, soon
  and alike: `test_the_others_are_told_why_a_rank_does_not_come`, `test_all_ranks_of_a_grid_are_told_of_an_error_of_one`
- the same before its first unit, in ranks that have imported us and made a group, and with
  `TORCH_DISTRIBUTED_DEBUG=DETAIL`; one that has finished is said to have:
  `test_the_others_are_told_why_a_rank_does_not_come` (`before its first unit`, `has finished`), `test_board.py`
- an exception in a forward that one rank catches is reported, with its text, to the ranks that wait for it; one that
  all ranks catch is not reported: `test_what_one_rank_catches_is_told_to_those_who_wait_for_it`,
  `test_what_all_ranks_catch_is_told_to_nobody`; where the device waits `test_fsdp_order_device.py`
- a rank whose shard's storage was freed or resized raises with the unit's name, and the others report it:
  `test_the_others_are_told_why_a_rank_does_not_come` (`frees its shard`, `shortens its shard`)
- a rank that is busy, also with the GIL, is waited for: `test_a_rank_that_is_busy_is_waited_for`
- a process group is destroyed while a collective is under way: `test_a_group_goes_while_a_collective_is_under_way`
"""

import ctypes
import datetime
import gc
import json
import os
import re
import signal
import sys
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from gloo import ends_of_ranks, meet_in_a_server, note, run_ranks, say, wait_until_said
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.fsdp import OrderError
from flatparam.fsdp.desync.liveness import heartbeat

pytestmark = pytest.mark.multiprocess

LIMIT = 20.0  # seconds that a collective of these groups may take


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
    assert run_ranks(let_go, 2, timeout=60.0) == [True, True]


def lose(how, who):
    """Rank ``who`` is lost to the others; what they are told, and after how many seconds, is their last note.

    They end at once when they have been told by one that waits until they were.
    """
    me, processes = dist.get_rank(), [None] * dist.get_world_size()
    meet_in_a_server()
    dist.all_gather_object(processes, os.getpid())
    model = None
    if not how.endswith("before its first unit"):
        model = model_of(dist.group.WORLD)
        for _ in range(2):
            step(model)
    dist.barrier()
    begin = time.monotonic()
    if me == who and how.startswith("raises"):
        raise ValueError("batch 17 is bad")
    if me == who and how in SHARDS_LEFT:
        model.module[1]._unit.flat_params[0].flat.untyped_storage().resize_(SHARDS_LEFT[how])
        step(model)
    if me == who and how.startswith(("dies", "stops")):
        os.kill(os.getpid(), signal.SIGKILL if how.startswith("dies") else signal.SIGSTOP)
    if me == who and how == "has finished":
        dist.destroy_process_group()
        sys.exit(0)
    try:
        if model is None:
            model_of(dist.group.WORLD)
        elif me == who:
            model.state_dict()
        else:
            step(model)
    except OrderError as error:
        shown = "".join(traceback.format_exception(error)).replace(str(error), "")
        note(json.dumps([str(error), time.monotonic() - begin, shown]))
        if how.startswith("stops") and me == min({0, 1, 2} - {who}):
            os.kill(processes[who], signal.SIGKILL)
        if model is None:  # each rank finds out by itself, and the store is rank 0's
            time.sleep(1.5)
        os._exit(3)


SHARDS_LEFT = {"frees its shard": 0, "shortens its shard": 4}  # bytes
NO_SHARD_LEFT = (
    r"rank {} has raised .*ValueError: the unit of Linear at `1`: the storage of its parameters has {} bytes"
)
RAISED = r"rank 0 has raised an error of its own in .*ranks\.py, line \d+ and has ended: ValueError: batch 17 is bad"
KILLED = r"the process of rank 1 \(\d+\) has ended without a word"
STOPPED = "rank 1 has given no sign of life for 2 s: it is stopped, or out of reach"
DIFFERENT = (
    r"rank 0 gathers, to show or to save it, the unit .*, in step 2, for .*; rank \d gathers .*, in step 3, for "
)
LOST = {
    ("does another thing", 0, "OFF"): DIFFERENT,
    ("does another thing", 0, "DETAIL"): DIFFERENT,
    ("raises", 0, "OFF"): RAISED,
    ("raises before its first unit", 0, "OFF"): RAISED,
    ("frees its shard", 0, "OFF"): NO_SHARD_LEFT.format(0, 0),
    ("shortens its shard", 1, "OFF"): NO_SHARD_LEFT.format(1, 4),
    ("dies", 1, "OFF"): KILLED,
    ("dies", 1, "DETAIL"): KILLED,
    ("dies before its first unit", 1, "OFF"): KILLED,
    ("dies before its first unit", 1, "DETAIL"): KILLED,
    (
        "has finished",
        1,
        "OFF",
    ): r"rank 1 has finished, .*: it may have had fewer batches than the others, or left out a call",
    ("dies", 0, "OFF"): "the store of the process group cannot be reached any more",
    ("stops", 1, "OFF"): STOPPED,
    ("stops before its first unit", 1, "OFF"): STOPPED,
    ("stops before its first unit", 1, "DETAIL"): STOPPED,
}


@pytest.mark.parametrize(("how", "who", "debug"), LOST)
def test_the_others_are_told_why_a_rank_does_not_come(how, who, debug):
    environment = {"FLATPARAM_HEARTBEAT": "2"} if how.startswith("stops") else {}
    ends = ends_of_ranks(lose, 3, how, who, environment={**environment, "TORCH_DISTRIBUTED_DEBUG": debug})
    told = {}
    for rank, (code, _, said) in enumerate(ends):
        if rank != who or how == "does another thing":
            assert code == 3, ends
            told[rank], seconds, shown = json.loads(said)
            assert "RuntimeError" not in shown, shown  # gloo's, with lines of its sources
            assert seconds < 10.0, (seconds, ends)  # 3 if it stops, else 1, but for a busy machine
    assert re.search(LOST[how, who, debug], told[1 if who == 0 else 0]), told
    if (how, who) != ("dies", 0):  # whose process has the store
        assert len(set(told.values())) == 1, told


def lose_on_a_grid():
    """Rank 3 is lost to the ranks of its row and column, and so to rank 0, which shares nothing with it."""
    mesh = init_device_mesh("cpu", (2, 2))
    model = model_of(None, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    step(model)
    try:
        if dist.get_rank() == 3:
            raise ValueError("batch 17 is bad")
        step(model)
    except ValueError:
        sys.exit(1)  # as torch.multiprocessing.spawn ends a process
    except OrderError as error:
        note(error)
        os._exit(3)


def test_all_ranks_of_a_grid_are_told_of_an_error_of_one():
    ends = ends_of_ranks(lose_on_a_grid, 4, timeout=60.0)
    assert [code for code, _, _ in ends] == [3, 3, 3, 1]
    for _, _, said in ends[:3]:
        assert re.match(RAISED.replace("rank 0", "rank 3"), said), ends


def hold_the_gil():
    """For longer than the heartbeat: a rank that is busy is no rank that is stopped."""
    model = made(limit=30.0)
    step(model)
    if dist.get_rank():
        ctypes.PyDLL(None).usleep(6_000_000)
    step(model)


def test_a_rank_that_is_busy_is_waited_for():
    run_ranks(hold_the_gil, 2, environment={"FLATPARAM_HEARTBEAT": "3"})


def test_a_heartbeat_that_is_no_number_of_seconds_is_refused(monkeypatch):
    for text in ("-1", "soon", "inf"):
        monkeypatch.setenv("FLATPARAM_HEARTBEAT", text)
        with pytest.raises(
            ValueError, match=f"expected FLATPARAM_HEARTBEAT to be seconds, or 0 for none, got '{text}'"
        ):
            heartbeat()


def raise_once(model):
    """In the forward of its second unit."""

    def fail(*args):
        hook.remove()
        raise ValueError("batch 17 is bad")

    hook = model.module[1].module.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="batch 17"):
        step(model)


def catch(how):
    """Rank 1 catches what a forward raises, and goes on with something else; or all ranks do."""
    model = made(limit=60.0)
    for _ in range(2):
        step(model)
    me = dist.get_rank()
    if how == "alone":
        begin = time.monotonic()
        if me == 1:
            raise_once(model)
        else:
            try:
                step(model)
            except OrderError as error:
                return str(error), time.monotonic() - begin
        wait_until_said("the others were told")
    else:
        raise_once(model)
        time.sleep(4.0 * me)  # it loads data, say
        step(model)
    return "nothing", 0.0


def test_what_one_rank_catches_is_told_to_those_who_wait_for_it():
    """Within a second or two after 2 s, on a machine that is not busy; the time-out is a minute."""
    others = simulate_ranks(catch_and_say, 3, environment={"FLATPARAM_HEARTBEAT": "0"})
    for text, seconds in (others[0], others[2]):
        assert re.match(RAISED.replace("rank 0", "rank 1").replace("has ended", "has not gone on since"), text), others
        assert 1.9 < seconds < 15.0


def catch_and_say():
    found = catch("alone")
    if dist.get_rank() == 0:
        say("the others were told")
    return found


def test_what_all_ranks_catch_is_told_to_nobody():
    assert simulate_ranks(catch, 2, "all") == [("nothing", 0.0)] * 2
