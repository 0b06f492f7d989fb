"""_C.Board, whose other ranks are here what this test writes to the store."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from gloo import fake_world

from flatparam import _C

ORDER = (lambda *args: None,) * 3


@pytest.fixture
def told():
    """A board, and the store that its ranks share."""
    with fake_world(3, store=dist.HashStore()) as world:
        store = dist.distributed_c10d._get_default_store()
        yield _C.Board(world.group_name, "here", 0.5, True), dist.PrefixStore("here", store)


def write_post(store, rank, text):
    number = store.add("posts", 1)
    store.set(f"post {number}", f"{rank} {text}")
    return number


def test_posts_of_others_are_read_once_and_those_who_read_are_counted(told):
    board, store = told
    assert board.look(0.0, False)
    assert board.said() == {}
    assert board.post("mine") == 1
    number = write_post(store, 2, "batch 17 is bad: ä, and\nmore")
    write_post(store, 2, "again")
    store.add("posts", 1)  # of one whose text is not there yet
    assert not board.look(0.0, False)
    assert board.said() == {2: "batch 17 is bad: ä, and\nmore"}
    assert board.number(f"readers of {number}") == 1
    assert board.number("readers of 1") == 0


def test_a_process_of_this_machine_that_has_ended_is_missed_when_all_have_entered(told):
    board, store = told
    board.enter()
    assert board.number("members") == 1
    process, _, machine = board.entered()[0].split()
    assert int(process) == os.getpid()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    store.set("place of 1", f"{ended.pid} 17 {machine}")
    board.look(0.0, True)
    assert board.said() == {}  # rank 2 may be on another machine, whose processes have other numbers
    store.set("place of 2", f"{ended.pid} 17 another-machine")
    board.look(0.0, False)
    assert board.said() == {}
    board.look(0.0, True)
    assert board.said() == {1: f"the process of rank 1 ({ended.pid}) has ended without a word: killed, or done"}


def test_a_process_with_the_number_of_one_that_has_ended_is_another(told):
    board, store = told
    board.enter()
    process, began, machine = board.entered()[0].split()
    store.set("place of 1", f"{process} {began} {machine}")
    store.set("place of 2", f"{process} {int(began) + 1} {machine}")
    board.look(0.0, True)
    assert list(board.said()) == [2]


def test_those_who_do_not_answer_a_call_are_missed(told):
    board, store = told
    assert not board.call()
    store.set("answer of 1", "none yet")
    store.set("answer of 2", "none yet")
    assert board.call()
    store.set("answer of 1", store.get("call"))
    board.miss_silent()
    assert list(board.said()) == [2]
    assert "does not answer" in board.said()[2]


def test_one_who_waits_for_long_calls_and_posts_for_all_who_gives_no_sign_of_life(told):
    board, store = told
    store.set("answer of 1", "none yet")
    store.set("answer of 2", "none yet")
    board.look(0.1, False)
    assert not store.check(["call"])
    board.look(1.0, False)
    store.set("answer of 2", store.get("call"))
    board.look(1.0, False)
    assert board.said() == {}
    time.sleep(0.3)
    board.look(1.0, False)
    said = "rank 1 has given no sign of life for 0.5 s: it is stopped, or out of reach"
    assert board.said() == {1: said}
    assert store.get("post 1").decode() == f"1 {said}"


def test_a_thread_answers_calls_until_it_is_stopped(told):
    board, store = told
    board.enter()
    store.set("call", "1 0 now")
    begin = time.monotonic()
    while store.get("answer of 0") != b"1 0 now" and time.monotonic() - begin < 10.0:
        time.sleep(0.01)
    assert store.get("answer of 0") == b"1 0 now"
    board.stop()
    store.set("call", "1 1 now")
    time.sleep(0.3)
    assert store.get("answer of 0") == b"1 0 now"


def test_a_watch_ends_with_the_board(told):
    board, _ = told
    name, found = dist.group.WORLD.group_name, []
    watched = (_C.CollectiveTrace(*ORDER), name, "cpu", "there", [0, 1, 2], 0.01)
    thread = threading.Thread(target=lambda: found.append(board.watch(*watched)))
    thread.start()
    time.sleep(0.1)
    board.stop()
    thread.join(10.0)
    assert found == [False]


def test_a_watch_ends_with_its_group(told):
    board, _ = told
    name, found = dist.group.WORLD.group_name, []
    watched = (_C.CollectiveTrace(*ORDER), name, "cpu", "there", [0, 1, 2], 0.01)
    thread = threading.Thread(target=lambda: found.append(board.watch(*watched)))
    thread.start()
    time.sleep(0.1)
    dist.distributed_c10d._unregister_process_group(name)
    thread.join(10.0)
    assert found == [False]


def test_bad_calls(told):
    board, _ = told
    name = dist.group.WORLD.group_name
    with pytest.raises(RuntimeError, match="no such group"):
        _C.Board("no such group", "here", 0.5, True)
    with pytest.raises(RuntimeError, match="no such group"):
        board.watch(_C.CollectiveTrace(*ORDER), "no such group", "cpu", "there", [0], 0.01)
    with pytest.raises(TypeError, match="expected a CollectiveTrace, got int"):
        board.watch(1, name, "cpu", "there", [0], 0.01)
    with pytest.raises(TypeError):
        board.watch(_C.CollectiveTrace(*ORDER), name, "cpu", "there", ["0"], 0.01)
    with pytest.raises(RuntimeError, match="no such device"):
        board.watch(_C.CollectiveTrace(*ORDER), name, "no such device", "there", [0], 0.01)
    for call in (board.post, board.number):
        with pytest.raises(TypeError):
            call(1)
    with pytest.raises(TypeError):
        board.look(0.0)
