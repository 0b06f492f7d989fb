"""_C.HealthBoard: this test writes the values of the other ranks to the store."""

import fcntl
import os
import subprocess
import sys
import threading
import time

import forked_scripts
import pytest
import torch.distributed as dist
from gloo import fake_world

from flatparam import _C
from flatparam.fsdp.desync import liveness
from flatparam.fsdp.desync.events import CollectiveEvent
from flatparam.fsdp.desync.stores import Store

ORDER = (lambda *args: None,) * 3


@pytest.fixture
def told():
    """A board, and the store that its ranks share."""
    with fake_world(3, store=dist.HashStore()) as world:
        yield told_in(world)


def told_in(world):
    store = dist.distributed_c10d._get_default_store()
    return _C.HealthBoard(world.group_name, "here", 2.0, True), dist.PrefixStore("here", store)


def clock():
    """Seconds since this machine's start."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def place(store, rank, text, when=None):
    """Say where the process of ``rank`` is, as that one would have, when its machine's clock shows ``when``."""
    store.set(f"place of {rank}", f"{store.add('calls', 1)} {clock() if when is None else when} {text}")
    store.add("places", 1)


def of_all_others(store):
    """Have them appear on another machine, and answer calls."""
    for rank in (1, 2):
        place(store, rank, "4711 17 another-machine")
        store.set(f"answer of {rank}", "none yet")


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
    assert board.look(0.0, False)
    assert board.said() == {2: "batch 17 is bad: ä, and\nmore"}
    assert board.number(f"readers of {number}") == 1
    assert board.number("readers of 1") == 0


def test_a_rank_that_ends_before_it_has_written_the_text_of_its_post_hides_no_later_post(told):
    board, store = told
    started = store.add("posts", 1)
    number = write_post(store, 2, "batch 17 is bad")
    assert not board.look(0.0, False)
    assert board.said() == {2: "batch 17 is bad"}
    assert board.number(f"readers of {number}") == 1
    store.set(f"post {started}", "1 batch 16 is bad")  # it was only slow
    assert board.look(0.0, False)
    assert board.said() == {1: "batch 16 is bad", 2: "batch 17 is bad"}
    assert board.number(f"readers of {number}") == board.number(f"readers of {started}") == 1


@pytest.fixture
def ended():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_process_of_this_machine_that_has_ended_is_missed_whoever_has_not_come_yet(told, ended):
    board, store = told
    board.appear(0.0)
    board.enter()
    assert board.number("members") == 1
    process, _, machine = board.entered()[0].split()
    assert int(process) == os.getpid()
    place(store, 2, f"{ended} 17 another-machine")  # whose processes have other numbers
    board.look(0.0, True)
    assert board.said() == {}
    place(store, 1, f"{ended} 17 {machine}")
    board.look(0.0, False)
    assert board.said() == {}
    board.look(0.0, True)
    assert board.said() == {1: f"the process of rank 1 ({ended}) has ended without a word: killed, or done"}


def test_a_process_with_the_number_of_one_that_has_ended_is_another(told):
    board, store = told
    board.appear(0.0)
    process, began, machine = board.entered()[0].split()
    place(store, 1, f"{process} {began} {machine}")
    place(store, 2, f"{process} {int(began) + 1} {machine}")
    board.look(0.0, True)
    assert list(board.said()) == [2]


def test_what_a_world_before_has_left_in_the_store_says_nothing(told, ended):
    board, store = told
    now = clock()
    place(store, 1, f"{ended} 17 {of_this_process().split()[2]}", now - 1.0)
    place(store, 2, "4711 17 another-machine finished", now - 1.0)
    store.set("answer of 1", "none yet")
    store.set("answer of 2", "none yet")
    board.appear(now)
    assert list(board.entered()) == [0]
    board.look(0.0, True)
    board.miss_silent(board.call())
    assert board.said() == {}


def test_who_imports_us_after_the_others_finds_those_that_have_appeared_before(tmp_path):
    before = clock()
    program = (
        "import time; now = time.clock_gettime(time.CLOCK_BOOTTIME); time.sleep(0.2)\n"
        "from flatparam.fsdp.desync import liveness; print(now, liveness._here.life.since)"
    )
    [found] = forked_scripts.run([(program, [])], tmp_path)
    assert found.status == 0, found.err
    began, since = map(float, found.out.split())
    assert before - 0.1 < since <= began


@pytest.mark.parametrize("when", [1.0, 1e9])
def test_the_clock_of_another_machine_decides_nothing(told, when):
    """Its clock is far behind, or far ahead."""
    board, store = told
    place(store, 1, "4711 17 another-machine", when)
    store.set("answer of 1", "2 0")  # to a call of the world before
    board.appear(clock())
    place(store, 2, "4711 17 another-machine", when)
    assert list(board.entered()) == [0, 2]  # rank 1 may belong to the world before
    store.set("answer of 1", store.get("call"))
    assert list(board.entered()) == [0, 1, 2]


def test_a_call_does_not_hide_a_later_one(told):
    board, store = told
    store.set("call", "1 9")
    board.appear(clock())
    assert store.get("call") == b"1 9"


def of_this_process():
    """Its number, when it began, and the name of this machine."""
    board = _C.HealthBoard(dist.group.WORLD.group_name, "elsewhere", 2.0, True)
    board.appear(0.0)
    return board.entered()[0]


def test_a_rank_that_has_finished_is_told_so(told, ended):
    board, store = told
    finished = (
        "rank {} has finished, and comes to no collective any more: it may have had fewer batches than the others, or "
        "left out a call that all ranks must make; or it has called sys.exit(), see its output"
    )
    place(store, 1, f"{of_this_process()} finished")
    place(store, 2, "4711 17 another-machine finished")
    board.look(0.0, True)
    assert board.said() == {}  # it may save in the background before it ends
    place(store, 1, f"{ended} 17 {of_this_process().split()[2]} finished")
    board.look(0.0, True)
    assert board.said() == {1: finished.format(1)}
    store.set("answer of 2", "none yet")
    board.miss_silent(board.call())
    assert board.said() == {1: finished.format(1), 2: finished.format(2)}


def test_a_rank_says_that_it_has_finished(told):
    board, store = told
    board.appear(0.0)
    board.finish()
    assert store.get("place of 0").decode().endswith(f" {of_this_process()} finished")


def test_those_who_do_not_answer_a_call_are_missed(told):
    board, store = told
    assert board.call() == 0
    of_all_others(store)
    call = board.call()
    store.set("answer of 1", store.get("call"))
    assert board.call() > call  # of another thread
    board.miss_silent(call)
    assert list(board.said()) == [2]
    assert "does not answer" in board.said()[2]


def test_one_who_waits_for_long_calls_and_posts_for_all_who_gives_no_sign_of_life(told):
    board, store = told
    of_all_others(store)
    board.look(0.1, False)
    assert not store.check(["call"])
    begin = time.monotonic()
    board.look(1.0, False)
    store.set("answer of 2", store.get("call"))
    while not board.said() and time.monotonic() - begin < 30.0:
        board.look(1.0, False)
        time.sleep(0.02)
    assert time.monotonic() - begin > 0.8  # in which they may answer
    said = "rank 1 has given no sign of life for 2 s: it is stopped, or out of reach"
    assert board.said() == {1: said}
    assert store.get("post 1").decode() == f"1 {said}"


def test_those_whose_answers_may_be_held_up_like_the_call_are_not_missed(told):
    board, store = told
    of_all_others(store)
    board.look(1.0, False)
    time.sleep(2.1)  # as if the store had not replied
    board.look(1.0, False)
    assert board.said() == {}
    for rank in (1, 2):
        store.set(f"answer of {rank}", store.get("call"))
    time.sleep(0.9)
    board.look(1.0, False)
    assert board.said() == {}


def test_a_thread_answers_calls_until_it_is_stopped(told):
    board, store = told
    board.appear(0.0)
    store.set("call", "1 0 now")
    begin = time.monotonic()
    while store.get("answer of 0") != b"1 0 now" and time.monotonic() - begin < 10.0:
        time.sleep(0.01)
    assert store.get("answer of 0") == b"1 0 now"
    board.stop()
    store.set("call", "1 1 now")
    time.sleep(1.0)
    assert store.get("answer of 0") == b"1 0 now"


def test_an_error_is_posted_whatever_its_message_has(told):
    board = liveness.HealthBoard(dist.group.WORLD, 0.0, own=True)
    board.join(liveness.generation_of_world())
    board.report("batch \udcff\0 is bad: ä")
    there = dist.PrefixStore(
        f"flatparam board/{liveness.generation_of_world()}", dist.distributed_c10d._get_default_store()
    )
    assert there.get("post 1").decode() == "0 batch \\udcff\\0 is bad: ä"


def test_ctrl_c_in_the_first_call_counts_a_world_once(told, monkeypatch):
    interrupted = []

    def interrupt_after(name):
        call = getattr(Store, name)

        def called(*args):
            found = call(*args)
            if not interrupted:
                interrupted.append(name)
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(Store, name, called)

    interrupt_after("add")
    interrupt_after("set")
    with pytest.raises(KeyboardInterrupt):
        liveness.generation_of_world()
    assert liveness.generation_of_world() == "1"


def test_a_group_without_a_store_is_refused(told):
    group = dist.ProcessGroup(0, 1)
    dist.distributed_c10d._register_process_group("without a store", group)
    try:
        with pytest.raises(RuntimeError, match="has no store in C"):
            _C.HealthBoard("without a store", "here", 2.0, True)
    finally:
        dist.distributed_c10d._unregister_process_group("without a store")


class Watched(dist.Store):
    """Counts a watch's looks, of which the next ``failing`` fail; all that is asked of a store without numbers."""

    def __init__(self, store):
        super().__init__()
        self.store, self.looks, self.failing = store, 0, 0

    def check(self, keys):
        try:
            if keys[0].endswith("there/broken") and self.failing > 0:
                self.failing -= 1
                raise RuntimeError("out of reach")
            return self.store.check(keys)
        finally:
            self.looks += keys[0].endswith("there/broken")  # the first question of a look, which has its answer now

    def set(self, key, value):
        self.store.set(key, value)

    def compare_set(self, key, expected, desired):
        return self.store.compare_set(key, expected.decode(), desired.decode())

    def add(self, key, number):
        return self.store.add(key, number)

    def get(self, key):
        return self.store.get(key)

    def wait_for_looks(self, n):
        """Until so many more have asked whether the watch is broken; when the second one has, the first has ended."""
        begin, wanted = time.monotonic(), self.looks + n
        while self.looks < wanted:
            assert time.monotonic() - begin < 30.0
            time.sleep(0.001)


@pytest.fixture
def watched():
    """A board, the store that its ranks share, and what that store is made of."""
    store = Watched(dist.HashStore())
    with fake_world(3, store=store) as world:
        yield (*told_in(world), store)


class Watch:
    """A thread that watches the world, whose ranks are here in one process, and has begun to look."""

    def __init__(self, board, store, interval=0.01):
        self.order, self.found = _C.CollectiveTrace(*ORDER), []
        name = dist.group.WORLD.group_name
        watched = (self.order, name, "cpu", "there", [0, 1, 2], interval)
        self._thread = threading.Thread(target=lambda: self.found.append(board.watch(*watched)))
        self._thread.start()
        store.wait_for_looks(1)

    def end(self):
        self._thread.join(30.0)
        return self.found


def test_a_watch_ends_with_the_board(watched):
    board, _, store = watched
    watch = Watch(board, store)
    board.stop()
    assert watch.end() == [False]
    assert not watch.order.broken


def test_a_watch_ends_with_its_group_also_if_another_has_its_name_and_address(watched):
    board, _, of_both = watched
    store = dist.PrefixStore("there", dist.distributed_c10d._get_default_store())
    watch = Watch(board, of_both, interval=1.0)  # long enough to set the key before the next look
    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=3)
    store.set("broken", "in the world before")
    assert watch.end() == [False]
    assert not watch.order.broken


def test_what_a_watch_finds_breaks_all_orders_of_a_model(watched):
    board, _, store = watched
    watch, other = Watch(board, store), _C.CollectiveTrace(*ORDER)
    watch.order.join(other)
    dist.PrefixStore("there", dist.distributed_c10d._get_default_store()).set("broken", "why")
    assert watch.end() == [True]
    assert watch.order.broken
    assert other.broken


def test_a_watch_finds_a_rank_that_has_come_to_another_collective(watched):
    board, _, of_both = watched
    watch = Watch(board, of_both)
    for event in (7, 8):
        watch.order.note(event, event == 7)
    store = dist.PrefixStore("there", dist.distributed_c10d._get_default_store())
    store.set("1", _C.write_report(1, 0, 16, "rank 1 does the same"))
    store.set("pending", "1")
    of_both.wait_for_looks(2)
    assert not watch.order.broken
    store.set("1", _C.write_report(1, 0, 18, "rank 1 does another thing"))
    assert watch.end() == [True]
    assert watch.order.broken


def test_a_report_comes_through_the_store_as_it_was_written():
    event = CollectiveEvent(3, 7, 2**63 - 3, "gathers `ü` \n 2 3 of it, in step 7", "0110")
    assert CollectiveEvent.from_text(event.to_text()) == event
    assert _C.read_report(_C.write_report(0, 0, 0, "a\0b")) == (0, 0, 0, "a\0b")
    assert _C.read_report(_C.write_report(0, 0, 0, "name\udc80"))[3] == "name\\udc80"
    for bad in ("", "1", "1 2 3", "[1, 2, 3]", "1 2 -3 x", "1 2 18446744073709551616 x", "9223372036854775808 0 0 x"):
        with pytest.raises(ValueError, match="write_report"):
            _C.read_report(bad)
    for numbers in ((-1, 0, 0), (0, -1, 0), (0, 0, -1)):
        with pytest.raises(ValueError, match="at least 0"):
            _C.write_report(*numbers, "text")


def test_a_rank_that_is_lost_is_no_reason_while_nothing_waits_for_it(watched):
    board, posts, store = watched
    watch = Watch(board, store)
    write_post(posts, 1, "batch 17 is bad")
    store.wait_for_looks(2)
    assert board.said() == {1: "batch 17 is bad"}
    assert not watch.order.broken
    board.stop()
    assert watch.end() == [False]


def test_a_store_that_was_out_of_reach_for_a_moment_is_asked_again(watched):
    board, _, store = watched
    watch = Watch(board, store)
    for _ in range(2):
        store.failing = 3
        store.wait_for_looks(4)
        time.sleep(1.2)
    dist.PrefixStore("there", dist.distributed_c10d._get_default_store()).set("broken", "why")
    assert watch.end() == [True]


def test_a_store_is_asked_again_however_late_the_next_look_comes(watched):
    board, _, store = watched
    store.failing = 1
    watch = Watch(board, store, interval=1.5)
    dist.PrefixStore("there", dist.distributed_c10d._get_default_store()).set("broken", "why")
    assert watch.end() == [True]


def test_bad_calls(told):
    board, _ = told
    name = dist.group.WORLD.group_name
    with pytest.raises(RuntimeError, match="no such group"):
        _C.HealthBoard("no such group", "here", 0.5, True)
    with pytest.raises(RuntimeError, match="no such group"):
        board.watch(_C.CollectiveTrace(*ORDER), "no such group", "cpu", "there", [0], 0.01)
    with pytest.raises(TypeError, match="expected a CollectiveTrace, got int"):
        board.watch(1, name, "cpu", "there", [0], 0.01)
    with pytest.raises(TypeError):
        board.watch(_C.CollectiveTrace(*ORDER), name, "cpu", "there", ["0"], 0.01)
    with pytest.raises(RuntimeError, match="no such device"):
        board.watch(_C.CollectiveTrace(*ORDER), name, "no such device", "there", [0], 0.01)
    for call in (board.post, board.number, board.join, lambda one: board.appear(str(one))):
        with pytest.raises(TypeError):
            call(1)
    with pytest.raises(TypeError):
        board.look(0.0)
    with pytest.raises(TypeError, match="expected a CollectiveTrace, got int"):
        _C.CollectiveTrace(*ORDER).join(1)
    with pytest.raises(RuntimeError, match="no such group"):
        board.around_wait("no such group", "cpu", lambda: None)
    with pytest.raises(ValueError, match="that one's own"):
        board.around_wait(name, "cpu", lambda: int("that one's own"))
    with pytest.raises(TypeError, match="not callable"):
        board.around_wait(name, "cpu", None)


def test_stopping_waits_until_the_thread_has_let_go_of_its_store(tmp_path):
    """A FileStore writes then: half a record, if the process ends meanwhile, which torch waits to read the rest of."""
    path = tmp_path / "store"
    with fake_world(3, store=dist.FileStore(str(path), -1)) as world:
        board = _C.HealthBoard(world.group_name, "here", 2.0, True)
        board.appear(0.0)
        with open(path) as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            begin = time.monotonic()
            board.stop()  # waits for as long as it waits for a store that does not answer
            assert time.monotonic() - begin > 0.4
