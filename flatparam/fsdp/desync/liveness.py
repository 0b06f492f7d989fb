"""What a rank that waits for others can learn of their processes: which has ended, with which error; which is stopped.

A rank that ends with an exception posts it in the world's store and stays until the others have read it: its process
may have the store. A rank that ends without a word is missed by those on its machine, and by others as it answers no
calls; a thread in C answers them, so a rank that computes, or holds the GIL, is not taken for one that is stopped.
"""

import atexit
import contextlib
import functools
import math
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ... import _C
from ...common.collectives import name_in_cpp
from ...common.torch_private import torch_flat_param
from ..errors import OrderError, StoreGoneError
from ..names import printable
from .stores import Store, reaching, store_of, store_of_world

READING = 2.0  # seconds in which the others read what a rank has to say before it goes
_ANSWERING = 1.6  # seconds in which a process that lives answers
_LENGTH = 1000  # of an error's message


class HealthBoard:
    """What the ranks of a world post in its store, and whether they are alive.

    ``beat``: seconds without a sign of life after which a process counts as stopped; 0: never; ``own``: over a
    connection of its own.
    """

    def __init__(self, world: dist.ProcessGroup, beat: float, own: bool):
        self.rank, self._size = dist.get_rank(), dist.get_world_size()
        self.native = _C.HealthBoard(world.group_name, "flatparam board", beat, own)
        self.beat = beat
        self._is_joined = self._is_member = False

    @reaching()
    def join(self) -> None:
        """All ranks that use the board come to this alike, in each world; none may have imported us before."""
        if not self._is_joined:
            self.native.join(generation_of_world())
            self._is_joined = True

    @reaching()
    def enter(self) -> None:
        """From now on this rank reads what others post."""
        if not self._is_member:
            self._is_member = True
            self.native.enter()

    @reaching()
    def report(self, text: str) -> None:
        """Let the others know why this rank ends, and wait until they do, but not for long."""
        text = printable(text).replace("\0", "\\0")
        number = self.native.post(text)
        if self.native.number("members") == 0 and torch_flat_param.FlatParamHandle.__module__.startswith("flatparam."):
            return  # these ranks use torch's runtime with the drop-in, where nobody reads
        readers = f"readers of {number}"
        wait_until(lambda: self.native.look(0.0, False) and self.native.number(readers) >= self._size - 1)

    @reaching()
    def find_dead(
        self, ranks: Iterable[int], waited: float, is_absent: Callable[[int], bool] | None = None
    ) -> str | None:
        """Why one of ``ranks`` will not come any more, for a rank that has waited for ``waited`` seconds.

        ``is_absent``: true if a rank has not reached this wait. Needed where a dead process does not make the
        collective fail: the store, NCCL.
        """
        self.native.look(waited, is_absent is not None)
        return self._of(ranks, is_absent)

    @reaching()
    def diagnose(self, ranks: Sequence[int], look: Callable[[], object] = lambda: None) -> str | None:
        """The same for one whose collective has failed. ``look``: for what may explain it too, and raises then."""
        call = self.native.call()
        begin, found = time.monotonic(), None
        while found is None and time.monotonic() - begin < READING:
            look()
            self.native.look(0.0, True)
            if call and time.monotonic() - begin > _ANSWERING:
                self.native.miss_silent(call)
            found = self._of(ranks)
            time.sleep(0.02)
        entered = self.native.entered()
        absent = [rank for rank in ranks if rank not in entered]
        if found is None and absent:
            return f"ranks {absent} have not come to their first unit, and may have ended before"
        return found

    def count_dead(self, ranks: Iterable[int]) -> int:
        """How many of ``ranks`` are known not to come any more."""
        said = self.native.said()
        return sum(rank in said for rank in ranks)

    def _of(self, ranks: Iterable[int], is_absent: Callable[[int], bool] | None = None) -> str | None:
        said = self.native.said()
        lost = (rank for rank in ranks if rank in said and rank != self.rank)
        return next((said[rank] for rank in lost if is_absent is None or is_absent(rank)), None)


_boards: "weakref.WeakKeyDictionary[dist.ProcessGroup, HealthBoard | None]" = weakref.WeakKeyDictionary()
_lives: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()


def _process_began() -> float:
    """When, by the clock; where the system does not say: now."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - max(0.0, age)
    return time.time()


_since = _process_began()  # or its world, which ranks that have imported us sooner have appeared in before


def board() -> HealthBoard | None:
    """That of the world; None where there are no other processes."""
    ours = _appeared()
    if ours is not None:
        ours.join()
    return ours


def _appeared() -> HealthBoard | None:
    """The same, on which this rank can be found, and may not have come to what the others do."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1:
        return None
    if world not in _boards:
        _boards[world] = _made(world) if store_of(world) is not None and name_in_cpp(world) is not None else None
    return _boards[world]


def _made(world: dist.ProcessGroup) -> HealthBoard | None:
    beat = _heartbeat()
    try:
        store_of_world().value_at("flatparam")  # a new connection would try for minutes to reach a store that is gone
        with reaching():
            ours = HealthBoard(world, beat, own=True)
            ours.native.appear(_since)
        return ours
    except OrderError:
        raise
    except RuntimeError:  # a kind of group that has no store in C++
        return None


def enter() -> None:
    """This rank is about to build, or has loaded, what it shares with others. Raises: OrderError without a store."""
    if (ours := board()) is not None:
        ours.enter()
        _watch_excepthook()
        _children.join_in()


def generation_of_world() -> str:
    """A name that no world before it had in its store: each rank counts alike."""
    world: Any = dist.group.WORLD
    if world not in _lives:
        _lives[world] = str(store_of_world().add(f"flatparam/worlds of {dist.get_rank()}", 1))
    return _lives[world]


def wait_for_keys(store: Store, keys: list[str], ranks: Sequence[int], *, takes_long: bool = False) -> None:
    """One that each of ``ranks`` sets, or until the store's own time-out; Ctrl-C ends it.

    ``takes_long``: they may need more than that, and are waited for as long as they answer.
    Raises: OrderError, when one of them cannot any more.
    """
    ours, begin, waited = board(), time.monotonic(), 0.0
    key_of = dict(zip(ranks, keys, strict=True))
    patience = store.time_out.total_seconds()
    if takes_long and ours is not None and ours.beat > 0:
        patience = math.inf
    while not store.check(keys) and waited < patience:
        if ours is not None and waited > 0.2:
            found = ours.find_dead(ranks, waited, lambda rank: not store.check([key_of[rank]]))
            if found is not None:
                raise OrderError(found)
        time.sleep(min(0.3, 0.001 + waited / 10))
        waited = time.monotonic() - begin


class Meetings:
    """Where ranks wait for each other in ``store``, so that Ctrl-C ends the wait; who came in vain comes again."""

    def __init__(self, store: Store, name: str):
        self._store, self._name, self._number = store, name, 0

    def meet(self, ranks: Sequence[int], mine: str = "is here") -> list[str]:
        """What each of ``ranks`` says in its call of the same number. Raises: OrderError, when one cannot come."""
        self._store.set(self._key(dist.get_rank()), mine)
        keys = [self._key(rank) for rank in ranks]
        wait_for_keys(self._store, keys, ranks)
        said = self._store.values_at(keys)
        self._number += 1
        return said

    def forget(self) -> None:
        """Delete what this rank has said in the meeting before the last, to which all ranks have come."""
        if self._number > 1:
            self._store.delete(self._key(dist.get_rank(), 2))

    def _key(self, rank: int, before: int = 0) -> str:
        return f"{self._name}/{self._number - before}/{rank}"


def wait_until(is_so: Callable[[], Any], seconds: float = READING) -> None:
    """Or until it has taken this long, or the store is gone."""
    begin = time.monotonic()
    with contextlib.suppress(StoreGoneError):
        while not is_so() and time.monotonic() - begin < seconds:
            time.sleep(0.02)


def _heartbeat() -> float:
    text = os.environ.get("FLATPARAM_HEARTBEAT", "10")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(f"expected FLATPARAM_HEARTBEAT to be seconds, or 0 for none, got {text!r}")
    return seconds


# How a rank ends

_rank_process = os.getpid()  # not those that a rank forks
_hooks: list[Any] = [None]  # ours, the last one outermost


def _ends_with(error: BaseException | None) -> None:
    """This process is about to end with ``error``."""
    while isinstance(error, SystemExit):  # as torch.multiprocessing.spawn does it
        error = (error.__cause__ or error.__context__) if error.code else None
    if error is None or os.getpid() != _rank_process or getattr(error, "_flatparam_posted", False):
        return
    with contextlib.suppress(Exception):  # what is wrong is the user's error
        error._flatparam_posted = True  # type: ignore[attr-defined]
        ours = ([one for one in list(_boards.values()) if one is not None] or [_board_at_end()])[-1]
        ours.join()
        ours.report(describe(error, ours.rank, "has ended"))


def _board_at_end() -> HealthBoard:
    """Of a rank that has built nothing, over the connection that there is: nothing is begun any more."""
    world: Any = dist.group.WORLD
    ours = HealthBoard(world, 0.0, own=False)
    ours.join()
    return ours


def describe(error: BaseException, rank: int, since: str) -> str:
    """What the others are told of ``error``, after which ``rank`` does as ``since`` says."""
    if isinstance(error, OrderError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    message = "".join(traceback.format_exception_only(error)).strip()
    message = message if len(message) <= _LENGTH else message[:_LENGTH] + "..."
    return f"rank {rank} has raised an error of its own{where} and {since}: {message}"


class _Watch(NamedTuple):
    """What a thread that looks after other ranks is for."""

    board: HealthBoard
    has_lost: Callable[[], bool]  # whether values are lost of which no call has raised


_watching: "weakref.WeakKeyDictionary[threading.Thread, _Watch]" = weakref.WeakKeyDictionary()
_ended: list[_Watch] = []  # that have found such a loss


def watch(board: HealthBoard, look: Callable[[], object], has_lost: Callable[[], bool]) -> None:
    """Call ``look`` in a thread of its own, which ends when ``board`` is stopped, or with what it has found."""

    def run() -> None:
        look()
        if has_lost():
            _ended.append(_watching[threading.current_thread()])

    thread = threading.Thread(target=run, name="flatparam watches", daemon=True)
    _watching[thread] = _Watch(board, has_lost)
    thread.start()


def is_watching() -> bool:
    """Whether this is such a thread, of which no user sees what it raises."""
    return threading.current_thread() in _watching


def stop_answering() -> None:
    """This process ends: no thread shall look into a store any more."""
    for board in [*_boards.values(), *(one.board for one in _watching.values())]:
        if board is not None:
            board.native.stop()
    for thread in list(_watching):
        thread.join(READING)  # one that comes to the interpreter after its end would abort the process


def before_silence(call: Callable[[], object]) -> None:
    """Have a child of multiprocessing make this call when it ends, while it answers: it joins threads only later."""
    _children.join_in()
    _children.calls.add(call)


def _has_lost() -> bool:
    """Whether this process may not end as if all were well. A thread may not have come back from an abort yet."""
    return any(one.has_lost() for one in [*_ended, *_watching.values()])


def _watch_excepthook() -> None:
    """Around torch's: that one prints nothing before those that it calls have ended."""
    before = sys.excepthook
    if before is _hooks[-1]:
        return

    def hook(kind: Any, error: BaseException, where: Any) -> None:
        before(kind, error, where)
        if _hooks[-1] is hook:  # else a later one is around this
            _ends_with(error)

    _hooks.append(hook)
    sys.excepthook = hook


def _finish(error: object = None) -> None:
    """This rank comes to no collective of its world any more, unless ``error`` is the reason."""
    if error is not None and not (isinstance(error, SystemExit) and not error.code):
        return
    for ours in list(_boards.values()):
        if ours is not None and os.getpid() == _rank_process:
            with contextlib.suppress(Exception):  # the store may be gone
                ours.native.finish()


def _at_exit() -> None:
    error = getattr(sys, "last_value", None) if not hasattr(sys, "ps1") else None
    _ends_with(error)  # of a rank that had no model yet
    _finish(error)
    stop_answering()
    if _has_lost():
        _C.set_exit_status(1)


class _Children:
    """Processes of multiprocessing run neither exit functions nor sys.excepthook."""

    def __init__(self) -> None:
        self._process = 0
        self.calls: set[Callable[[], object]] = set()  # while it answers

    def begin(self) -> None:
        global _rank_process, _since
        if not dist.is_initialized():  # else a rank has forked it
            _rank_process, _since = os.getpid(), time.time()
            _watching.clear()
            _ended.clear()
            self.join_in()

    def join_in(self) -> None:
        if multiprocessing.parent_process() is not None and self._process != os.getpid():
            self._process = os.getpid()
            self.calls = set()  # not those of the process that has forked it
            multiprocessing.util.Finalize(None, self._end, exitpriority=100)
            multiprocessing.util.Finalize(None, self._end_with_status, exitpriority=-100)  # after those of others

    def _end(self) -> None:
        _ends_with(sys.exc_info()[1])  # first: the others shall not wait for what this one waits for
        for call in self.calls:
            call()
        _finish(sys.exc_info()[1])
        stop_answering()

    def _end_with_status(self) -> None:
        error = sys.exc_info()[1]
        if _has_lost() and (error is None or (isinstance(error, SystemExit) and not error.code)):
            raise SystemExit(1)


_children = _Children()
atexit.register(_at_exit)
multiprocessing.util.register_after_fork(_children, _Children.begin)


# Where a rank can be found from


def _appear() -> None:
    """Let other ranks find this one: it may end, or be stopped, before it comes to anything of ours."""
    with contextlib.suppress(Exception):  # what is wrong is said where the board is needed
        _appeared()


def _watch_worlds() -> None:
    """Appear in each world of this process as soon as it is made. Nothing of torch's tells that."""
    c10d: Any = dist.distributed_c10d
    before = getattr(c10d, "_update_default_pg", None)
    if before is None:  # this torch has none
        return

    @functools.wraps(before)
    def update(pg: Any) -> None:
        global _since
        if pg is None:
            _finish()
            _since = time.time()
        before(pg)
        if pg is not None:
            _appear()

    c10d._update_default_pg = update


def _is_fork() -> bool:
    """Whether a rank has forked this process: the threads of its groups are not here."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1
    return True


_watch_worlds()
if dist.is_initialized() and not _is_fork():
    _appear()
