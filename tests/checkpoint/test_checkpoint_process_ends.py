"""Processes that end right after their last save.

Promises:
- the process with the store dies: the others say so at once, also in a save, a load and a constructor; no file but
  one calls a store: `test_the_store_may_be_gone`, `test_structure.py::test_one_file_calls_stores`,
  `test_structure.py::test_calls_of_the_board_are_guarded`
- all ranks that live raise at once when another one is killed: `test_no_rank_waits_for_a_lost_one_to_read_the_error`;
  those that live can all read the error: `test_rank_0_waits_for_a_live_rank_to_read_the_error`
- a write that fails names rank and file, on all ranks alike:
  `test_a_write_that_fails_names_rank_and_file_on_all_ranks`
"""

import multiprocessing
import os
import re
import resource
import signal
import time

import pytest
import torch
import torch.distributed as dist
from gloo import ends_of_ranks, meet_in_a_server, note, run_ranks, say, wait_until_said
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint
from flatparam.checkpoint import saving
from flatparam.fsdp.desync import liveness
from flatparam.fsdp.desync.stores import Store
from flatparam.fsdp.errors import OrderError

pytestmark = pytest.mark.multiprocess


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def exit_codes(start, world_size, main, *arguments):
    """Of children that call ``main(rank, *arguments)``, as torch.multiprocessing starts them."""
    context = multiprocessing.get_context(start)
    children = [context.Process(target=main, args=(rank, *arguments)) for rank in range(world_size)]
    for child in children:
        child.start()
    try:
        for child in children:
            child.join(120.0)
        return [child.exitcode for child in children]
    finally:
        for child in children:
            child.kill()


def save_last(rank, folder):
    """Rank 1 writes for longer than ranks are waited for that give no sign of life."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", FLATPARAM_HEARTBEAT="2")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    module, write = FSDP(linear()), saving.write_file
    if rank == 1:
        saving.write_file = lambda *arguments: (time.sleep(4.0), write(*arguments))[1]
    checkpoint.async_save(folder / "last", module)


def test_a_childs_last_save_in_the_background_is_made(tmp_path):
    assert exit_codes("forkserver", 2, save_last, tmp_path) == [0, 0]
    module = nn.Linear(4, 4)
    checkpoint.load(tmp_path / "last", module)
    assert torch.equal(module.weight, linear().weight)


def fail_last(rank, folder):
    def fail(*arguments):
        time.sleep(0.5)  # the rest of this process has ended
        raise OSError("no room")

    os.dup2(os.open(folder / "said", os.O_CREAT | os.O_WRONLY), 2)
    saving.write_file = fail
    checkpoint.async_save(folder / "last", nn.Linear(4, 4))


@pytest.mark.parametrize("start", ["forkserver", "spawn"])  # without exit functions, and with them
def test_a_child_warns_of_its_last_save_once(start, tmp_path):
    assert exit_codes(start, 1, fail_last, tmp_path) == [0]
    said = (tmp_path / "said").read_text()
    assert said.count(f"the save to {tmp_path / 'last'} in the background has failed: ") == 1, said
    assert said.count("no room") == 1, said


def raise_while_saving(folder):
    """Rank 1 raises; its save goes on until rank 0 was told why it does not come."""
    module, write = FSDP(linear()), saving.write_file
    if dist.get_rank() == 1:
        saving.write_file = lambda *arguments: (wait_until_said("rank 0 was told"), write(*arguments))[1]
    pending = checkpoint.async_save(folder / "last", module)
    if dist.get_rank() == 1:
        raise ValueError("batch 17 is bad")
    with pytest.raises(OrderError, match=r"rank 1 has raised an error of its own .*ValueError: batch 17 is bad"):
        module(torch.ones(2, 4))
    with pytest.raises(checkpoint.CheckpointError, match="ValueError: batch 17 is bad"):
        pending.wait()
    note("rank 1 was not waited for")
    say("rank 0 was told")
    os._exit(3)


def test_a_child_that_raises_says_so_before_it_waits_for_its_save(tmp_path):
    (code, _, said), (other, _, _) = ends_of_ranks(raise_while_saving, 2, tmp_path, timeout=60.0)
    assert (code, said, other) == (3, "rank 1 was not waited for", 1)
    assert not list(tmp_path.iterdir())


def end_with_the_store(how, folder):
    """Rank 0 has the store, and ends at once after its last call; rank 1 looks late for the verdict, rank 2 not."""
    meet_in_a_server()
    module, wait = FSDP(linear()), liveness.wait_for_keys
    if how == "load":
        checkpoint.save(folder / "last", module)
    if dist.get_rank() == 1:
        liveness.wait_for_keys = lambda *arguments, **ways: (wait(*arguments, **ways), time.sleep(0.5))
    path = folder / "last" if how != "refused" else folder
    try:
        (checkpoint.load if how == "load" else checkpoint.save)(path, module)
    except checkpoint.CheckpointError as error:
        note(error)
    else:
        note("done")
    os._exit(3)


@pytest.mark.parametrize("how", ["save", "load", "refused"])
def test_rank_0_may_end_with_the_store_after_its_last_call(how, tmp_path):
    expected = f"{tmp_path}: is there already; pass overwrite=True, or another path" if how == "refused" else "done"
    for code, _, said in ends_of_ranks(end_with_the_store, 3, how, tmp_path, timeout=60.0):
        assert code == 3
        assert said.endswith(expected), said


def lose_the_store(how, folder):
    """Rank 0 has the store, and is killed in a call of all ranks; what the others are told, and when."""
    meet_in_a_server()
    module, me = FSDP(linear()), dist.get_rank()
    checkpoint.save(folder / "one", module)
    if me == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    begin = time.monotonic()
    calls = {
        "save": lambda: checkpoint.save(folder / "two", module),
        "load": lambda: checkpoint.load(folder / "one", module),
        "build": lambda: FSDP(linear()),
    }
    with pytest.raises(OrderError, match="the store of the process group cannot be reached any more") as raised:
        calls[how]()
    note(f"{time.monotonic() - begin} {type(raised.value).__name__}")
    os._exit(3)


@pytest.mark.parametrize("how", ["save", "load", "build"])
def test_the_store_may_be_gone(how, tmp_path):
    """Within the limit of a busy machine: a new connection would try for half a minute, or longer."""
    for code, _, said in ends_of_ranks(lose_the_store, 3, how, tmp_path, timeout=60.0)[1:]:
        assert code == 3, said
        assert float(said.split()[0]) < 10.0


def lose_a_rank(folder):
    """Rank 1 is killed before a call of all ranks. Notes when the call has raised on this rank."""
    module = FSDP(linear())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(checkpoint.CheckpointError, match=r"the process of rank 1 .* has ended without a word"):
        checkpoint.save(folder / "one", module)
    note(time.monotonic())


def test_no_rank_waits_for_a_lost_one_to_read_the_error(tmp_path):
    ends = ends_of_ranks(lose_a_rank, 3, tmp_path, timeout=60.0)
    assert ends[1][0] == -signal.SIGKILL
    assert abs(float(ends[0][2]) - float(ends[2][2])) < 1.5  # it was 2 s: rank 0 waited for the reader that was lost


def read_late(folder):
    """Rank 0 has the store. The save fails there; rank 2 reads that after rank 1 has read it, and ended."""
    meet_in_a_server()
    module, me = FSDP(linear()), dist.get_rank()
    if me == 0:
        saving.plan_save = fail
    look = liveness.wait_for_keys

    def wait_longer(store, keys, ranks, **settings):
        look(store, keys, ranks, **settings)
        time.sleep(0.7 if me == 2 else 0.0)

    def add_late(store, key, number, add=Store.add):
        time.sleep(0.2)  # rank 0 has ended
        return add(store, key, number)

    Store.add = add_late
    liveness.wait_for_keys = wait_longer
    try:
        checkpoint.save(folder / "one", module)
    except checkpoint.CheckpointError as error:
        note(str(error))
        if me == 1:
            raise
    os._exit(3)


def fail(*_, **__):
    raise OSError("the disk is full")


def test_rank_0_waits_for_a_live_rank_to_read_the_error(tmp_path):
    for code, _, said in ends_of_ranks(read_late, 3, tmp_path, timeout=60.0):
        assert code in (1, 3)
        assert said == "checkpoint.save: rank 0: the disk is full"


def fill_the_disk(folder):
    """Rank 1 cannot write more than some bytes to a file; what the rank is told is its note."""
    meet_in_a_server()
    torch.manual_seed(0)
    module = FSDP(nn.Linear(64, 64))
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    with pytest.raises(checkpoint.CheckpointError) as raised:
        checkpoint.save(folder / "one", module)
    return str(raised.value)


def test_a_write_that_fails_names_rank_and_file_on_all_ranks(tmp_path):
    told = set(run_ranks(fill_the_disk, 2, tmp_path))
    assert len(told) == 1, told
    pattern = rf"checkpoint\.save: rank 1: .*File too large: '{tmp_path}/\.one\.partial-.*/model/.*\.safetensors'"
    assert re.fullmatch(pattern, told.pop())
    assert not list(tmp_path.iterdir())
