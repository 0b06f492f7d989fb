"""Whether the processes of other ranks live: which has ended, with which error, and which is stopped.

A rank that ends with an exception posts it in the world's store. It then stays until the others have read the post,
since its process may host the store. If a process ends without a post, ranks on its machine find its process missing,
and ranks elsewhere get no answer to their calls. A thread in C answers calls, so a rank that computes or holds the GIL
counts as alive.

Each wait of ``desync`` and of checkpoints asks ``board()``. The module owns the health boards, one for each world, and
the hooks at the end of a process (``sys.excepthook``, ``atexit``, ``multiprocessing``). It does not know collectives.

A process may have several worlds at once: its ranks are then threads, as in tests. ``end_rank()`` ends the part of one.

| state | belongs to | because |
|---|---|---|
| the board, whether it has finished, its watches, its generation | a world | A rank has each of them in each world. |
| ``_here.life`` | the rank whose worlds this thread makes | A rank may have one world after another. |
| ``_here.is_inside`` | a thread | A thread is inside of its own call of ``sys.excepthook``. |
| the hooks, ``_children``, the exit status | the process | It has one ``sys.excepthook``, and it ends once. |

The hooks end the worlds whose boards were made under the present process number: a forked child ends none of them.
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
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ... import _C
from ...common.collectives import name_in_cpp
from ...common.patches import FOR_GOOD, Lifetime, note
from ...common.torch_private import torch_flat_param
from ..errors import OrderError, StoreGoneError
from ..names import printable
from .stores import Store, reaching, store_of, store_of_world

READING = 2.0  # seconds that a rank stays, so that the others can read its post
_ANSWERING = 1.6  # seconds in which a live process answers a call
_LEAVES = "has left the world"
# In messages about ranks that end or leave by themselves. The first is in ``describe``, the second in fp_board.cpp
_ENDS_OF_ITS_OWN = ("has raised an error of its own", "has finished, and comes to no collective", _LEAVES)
_LENGTH = 1000  # characters of an error's message in a post


class HealthBoard:
    """The posts of a world's ranks in its store, and the search for ranks that have ended.

    Args: ``beat``: seconds without a sign of life after which a process counts as stopped, 0: never; ``own``: open
    another connection to the store, so that no wait of another thread delays the board.
    Methods raise StoreGoneError if the store cannot be reached.
    """

    def __init__(self, world: dist.ProcessGroup, beat: float, own: bool):
        self.rank, self._size = world.rank(), world.size()
        self.native = _C.HealthBoard(world.group_name, "flatparam board", beat, own)
        self.beat = beat
        self.store, self.life, self.process = store_of_world(), _here.life, os.getpid()
        self.has_finished = False
        self._is_joined = self._is_member = False

    @reaching()
    def join(self, generation: str) -> None:
        """Use the keys of this world from now on. All ranks that use the board call this, in each world.

        A board that is not joined answers calls, but must not post: its keys would have no generation.
        """
        if not self._is_joined:
            self.native.join(generation)
            self._is_joined = True

    @reaching()
    def enter(self) -> None:
        """Count this rank among the readers of posts, and its place in the store as one of this world."""
        if not self._is_member:
            self._is_member = True
            self.native.enter()

    @reaching()
    def report(self, text: str) -> None:
        """Post why this rank ends, and wait until the others that live have read it, at most ``READING`` seconds."""
        text = printable(text).replace("\0", "\\0")
        number = self.native.post(text)
        if self.native.number("members") == 0 and torch_flat_param.FlatParamHandle.__module__.startswith("flatparam."):
            return  # these ranks use torch's runtime with the drop-in, where nobody reads
        readers = f"readers of {number}"

        def is_read() -> bool:
            # Readers that have ended count, too. Each has ended after all others have read its own post
            others = self._size - 1 - self.native.ended()
            return self.native.look(0.0, False) and self.native.number(readers) >= others

        wait_until(is_read)

    @reaching()
    def leave(self, why: str) -> None:
        """Post that this rank leaves the world, and ``why``. Other ranks that wait in the world raise that.

        Their waits might not fail by themselves: the connections of a live rank stay open.
        """
        self.native.post(printable(f"rank {self.rank} {_LEAVES}: {why}"))

    @reaching()
    def finish(self) -> None:
        """Say that this rank has finished. Others that wait for it after the end of its process raise that."""
        self.native.finish()
        self.has_finished = True

    @reaching()
    def find_dead(
        self, ranks: Iterable[int], waited: float, is_absent: Callable[[int], bool] | None = None
    ) -> str | None:
        """Return why one of ``ranks`` has ended or is stopped; None: all of them seem to live.

        Args: ``waited``: seconds that this rank has waited; after long waits the others are called; ``is_absent``: true
        if a rank has not reached this wait. Needed where a dead process does not make the wait fail: the store, NCCL.
        """
        self.native.look(waited, is_absent is not None)
        return self._of(ranks, is_absent)

    @reaching()
    def diagnose(self, ranks: Sequence[int], look: Callable[[], object] = lambda: None) -> str | None:
        """Return why one of ``ranks`` has ended or is stopped, for a rank whose collective has failed; None: none has.

        It looks for ``READING`` seconds. After that ``absent`` ranks are a reason, too.
        ``look``: called meanwhile; raises if it finds another explanation.
        """
        call = self.native.call()
        begin, found = time.monotonic(), None
        while found is None and time.monotonic() - begin < READING:
            look()
            self.native.look(0.0, True)
            if call and time.monotonic() - begin > _ANSWERING:
                self.native.miss_silent(call)
            found = self._of(ranks)
            time.sleep(0.02)
        return self.absent(ranks) if found is None else found

    @reaching()
    def absent(self, ranks: Iterable[int]) -> str | None:
        """Return which of ``ranks`` have shown no sign of life in this world; None: all have."""
        entered = self.native.entered()
        found = [rank for rank in ranks if rank not in entered]
        return f"ranks {found} have not come to their first unit, and may have ended before" if found else None

    @reaching()
    def count_dead(self, ranks: Iterable[int]) -> int:
        """Return how many of ``ranks`` are known to have ended, or to be stopped."""
        self.native.look(0.0, False)  # the caller may have heard of an end in a group without that rank
        said = self.native.said()
        return sum(rank in said for rank in ranks)

    @reaching()
    def find_lost(self, ranks: Iterable[int]) -> list[int]:
        """Return those of ``ranks`` that are killed, stopped or out of reach, not those that have ended by themselves.

        A rank that is absent is not among them: it may live, and have failed to connect.
        """
        self.native.look(0.0, True)
        lost = [rank for rank, text in self.native.said().items() if not any(map(text.__contains__, _ENDS_OF_ITS_OWN))]
        return [rank for rank in ranks if rank in lost]

    def _of(self, ranks: Iterable[int], is_absent: Callable[[int], bool] | None = None) -> str | None:
        said = self.native.said()
        lost = (rank for rank in ranks if rank in said and rank != self.rank)
        return next((said[rank] for rank in lost if is_absent is None or is_absent(rank)), None)


_boards: "weakref.WeakKeyDictionary[dist.ProcessGroup, HealthBoard | None]" = weakref.WeakKeyDictionary()
_lives: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()  # generations, in the store
_counting: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()  # perhaps not there yet


def _clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # seconds since the machine's start, for this machine alone


def _process_began() -> float:
    """Return the time in seconds of ``_clock()`` at which this process began; where the system does not say: now."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return min(_clock(), ticks / os.sysconf("SC_CLK_TCK"))
    return _clock()


class _Life:
    """From when on signs of life count, for the worlds that one rank has one after another."""

    def __init__(self) -> None:
        # The time at which its process began, or its last world was destroyed: earlier signs of life belong to another
        # world. It is not the time of the import, as other ranks may have imported flatparam, and appeared, sooner
        self.since = _process_began()


class _Here(threading.local):
    """The state of this thread."""

    def __init__(self) -> None:
        self.life = _Life()  # of the rank whose worlds this thread makes; another thread may destroy them
        self.is_inside = False  # one of our hooks in sys.excepthook: another of ours, below another library's, is quiet


_here = _Here()


def board() -> HealthBoard | None:
    """Return the world's board, joined; None: there are no other processes, or their group has no store in C++."""
    ours = _appeared()
    if ours is not None:
        ours.join(generation_of_world())
    return ours


def _appeared() -> HealthBoard | None:
    """Return the world's board, perhaps not joined. Other ranks can find this one there."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1:
        return None
    if world not in _boards:
        _boards[world] = _made(world) if store_of(world) is not None and name_in_cpp(world) is not None else None
    return _boards[world]


def _made(world: dist.ProcessGroup) -> HealthBoard | None:
    beat = heartbeat()
    try:
        store_of_world().value_at("flatparam")  # fails at once if the store is gone; a new connection tries for minutes
        with reaching():
            ours = HealthBoard(world, beat, own=True)
            watching_worlds.hold(ours)
            ours.native.appear(ours.life.since)
        return ours
    except OrderError:
        raise
    except RuntimeError:  # this kind of group has no store in C++
        return None


def enter() -> None:
    """Enter the world's board: a unit is about to be built, or was unpickled. Raises: StoreGoneError."""
    if (ours := board()) is not None:
        ours.enter()
        _reporting.hold(ours)
        _reporting.renew()  # torch puts its hook around ours when it makes a world
        _children.join_in()


def generation_of_world() -> str:
    """Return the world's generation, the same on all ranks: each counts in the store how often it had a world."""
    world: Any = dist.group.WORLD
    return _generation_of(world, store_of_world())


def _generation_of(world: dist.ProcessGroup, store: Store) -> str:
    if world not in _lives:
        key = f"flatparam/worlds of {world.rank()}"
        # The next call sets the same number if Ctrl-C ends this one
        number = _counting.setdefault(world, str(int(store.value_at(key) or 0) + 1))
        store.set(key, number)
        _lives[world] = number
    return _lives[world]


def wait_for_keys(
    store: Store,
    keys: list[str],
    ranks: Sequence[int],
    *,
    patience: float | None = None,
    takes_long: bool = False,
    look: Callable[[float], object] = lambda waited: None,
) -> None:
    """Wait until each of ``ranks`` has set its key in ``keys``. Ctrl-C ends the wait. At the time-out it returns, too.

    ``patience``: the time-out in seconds; None: the store's. ``takes_long``: wait beyond it, as long as the ranks
    answer calls; ``look``: called meanwhile, with the seconds so far; raises if it finds that a rank does not come.
    Raises: OrderError if one of the ranks has ended before it set its key; with ``takes_long`` also if one has shown no
    sign of life at the time-out.
    """
    ours, begin, waited = board(), time.monotonic(), 0.0
    key_of = dict(zip(ranks, keys, strict=True))
    patience = store.time_out.total_seconds() if patience is None else patience
    while not store.check(keys):
        if waited >= patience:
            if not takes_long or ours is None or ours.beat == 0:
                break
            if absent := ours.absent(rank for rank, key in key_of.items() if not store.check([key])):
                raise OrderError(absent)
            patience *= 2
        if ours is not None and waited > 0.2:
            found = ours.find_dead(ranks, waited, lambda rank: not store.check([key_of[rank]]))
            if found is not None:
                raise OrderError(found)
        look(waited)
        time.sleep(min(0.3, 0.001 + waited / 10))
        waited = time.monotonic() - begin


class Meetings:
    """Numbered meetings of ranks in ``store``. Ctrl-C ends a wait; the next call comes to the same meeting again."""

    def __init__(self, store: Store, name: str):
        self._store, self._name, self._number = store, name, 0

    def meet(self, ranks: Sequence[int], mine: str = "is here", **settings: Any) -> list[str]:
        """Wait for ``ranks``, and return the text ``mine`` of each, in order. Raises: OrderError if one has ended.

        ``settings``: of ``wait_for_keys``.
        """
        self._store.set(self._key(dist.get_rank()), mine)
        keys = [self._key(rank) for rank in ranks]
        wait_for_keys(self._store, keys, ranks, **settings)
        said = self._store.values_at(keys)
        self._number += 1
        return said

    def forget(self) -> None:
        """Delete this rank's text of the meeting before the last: all ranks came to the last, so they have read it."""
        if self._number > 1:
            self._store.delete(self._key(dist.get_rank(), 2))

    def _key(self, rank: int, before: int = 0) -> str:
        return f"{self._name}/{self._number - before}/{rank}"


def wait_until(is_so: Callable[[], Any], seconds: float = READING) -> None:
    """Wait until ``is_so()``, at most for ``seconds``, or until the store is gone."""
    begin = time.monotonic()
    with contextlib.suppress(StoreGoneError):
        while not is_so() and time.monotonic() - begin < seconds:
            time.sleep(0.02)


def heartbeat() -> float:
    """Return seconds without a sign of life after which a process counts as stopped; 0: never. Raises: ValueError."""
    text = os.environ.get("FLATPARAM_HEARTBEAT", "10")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(f"expected FLATPARAM_HEARTBEAT to be seconds, or 0 for none, got {text!r}")
    return seconds


# How a rank ends

_process = os.getpid()  # a child that a rank forks has another id, and reports nothing


def begin_process() -> None:
    """Count a process that was forked as one that may become a rank."""
    global _process
    _process = os.getpid()
    _here.life.since = _clock()


def end_rank(world: dist.ProcessGroup, error: BaseException | None) -> None:
    """Tell the other ranks of ``world`` that this rank ends: with ``error``, or finished. Each error is told once.

    It has finished with None, and with a SystemExit of status 0. With another SystemExit it ends with the error in
    whose handler that was raised; without one the other ranks find that its process has ended.
    Never raises: the user's error comes first. The board still answers: see ``stop_answering``.
    """
    told = error
    while isinstance(told, SystemExit):  # torch.multiprocessing.spawn exits in the handler of the user's error
        told = (told.__cause__ or told.__context__) if told.code else None
    with contextlib.suppress(Exception):  # the store may be gone
        ours = _boards.get(world) or (None if told is None else _board_at_end(world))
        if ours is None or ours.process != os.getpid():
            return
        if told is not None:
            posted: set[str] = vars(told).setdefault("_flatparam_posted", set())
            if world.group_name not in posted:
                posted.add(world.group_name)
                ours.join(_generation_of(world, ours.store))
                ours.report(describe(told, ours.rank, "has ended"))
        elif _is_success(error) and not ours.has_finished:
            ours.finish()


def _board_at_end(world: dist.ProcessGroup) -> HealthBoard | None:
    """Return a board for a world without one, over the existing connection: no thread is started any more."""
    return HealthBoard(world, 0.0, own=False) if os.getpid() == _process and world is dist.group.WORLD else None


def _end_worlds(error: BaseException | None) -> None:
    """Call ``end_rank`` for each world of this process that it has not destroyed; without one for the last of all.

    A world may be destroyed while an error is on its way; the other ranks may wait there for this one.
    """
    boards = [(world, _boards.get(world)) for world in (each() for each in _boards.keyrefs()) if world is not None]
    ours = [(world, one.has_finished) for world, one in boards if one is not None and one.process == os.getpid()]
    present: Any = dist.group.WORLD
    if not ours and present is not None:
        ours = [(present, False)]
    for world in [world for world, has_finished in ours if not has_finished] or [world for world, _ in ours[-1:]]:
        end_rank(world, error)


def _is_success(error: object) -> bool:
    """Whether a process that ends with ``error`` ends with status 0."""
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))


def describe(error: BaseException, rank: int, since: str) -> str:
    """Return the message about ``error`` for the other ranks. ``since``: the fate of ``rank``, a verb phrase."""
    if isinstance(error, OrderError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    message = "".join(traceback.format_exception_only(error)).strip()
    message = message if len(message) <= _LENGTH else message[:_LENGTH] + "..."
    return f"rank {rank} has raised an error of its own{where} and {since}: {message}"


class _Watch(NamedTuple):
    """The board and the trace that a watching thread serves."""

    board: HealthBoard
    has_lost: Callable[[], bool]  # whether values are lost and no call has raised an error for that


_watching: "weakref.WeakKeyDictionary[threading.Thread, _Watch]" = weakref.WeakKeyDictionary()
_ended: list[_Watch] = []  # those whose thread has ended because values were lost


def watch(board: HealthBoard, look: Callable[[], object], has_lost: Callable[[], bool]) -> None:
    """Call ``look`` in a new daemon thread. ``look`` returns when ``board`` is stopped, or when it finds a problem."""

    def run() -> None:
        look()
        if has_lost():
            _ended.append(_watching[threading.current_thread()])

    thread = threading.Thread(target=run, name="flatparam watches", daemon=True)
    _watching[thread] = _Watch(board, has_lost)
    thread.start()


def is_watching() -> bool:
    """Whether this thread was started by ``watch``: the user does not see exceptions that it raises."""
    return threading.current_thread() in _watching


def stop_answering() -> None:
    """Stop the threads of all boards and watches of this process, before it ends."""
    watching = [(thread, one) for thread, one in list(_watching.items()) if one.board.process == os.getpid()]
    for board in [*_boards.values(), *(one.board for _, one in watching)]:
        if board is not None:
            board.native.stop()  # does nothing in another process
    for thread, _ in watching:
        thread.join(READING)  # a thread that takes the GIL after the interpreter's end would abort the process


def before_silence(call: Callable[[], object]) -> None:
    """Call ``call`` when a child of ``multiprocessing`` ends, while its thread still answers other ranks.

    Without it the child would stop answering first, and join its threads afterwards.
    """
    _children.join_in()
    _children.calls.add(call)


def has_lost() -> bool:
    """Whether values are lost in a world of this process and no call has raised an error for that.

    The exit status must not be 0 then. Running threads are asked too: one may not have returned from its abort yet.
    """
    watches = [*_ended, *_watching.values()]
    return any(one.has_lost() for one in watches if one.board.process == os.getpid())


_reporting = Lifetime("from the first unit to the end of its world, if that has other processes")


@_reporting.around("sys:excepthook", test="tests/fsdp/desync/test_fsdp_lost_ranks.py", outermost=True)
def _report_after(before: Callable[..., Any], kind: Any, error: BaseException, where: Any) -> None:
    """Report the error that ends a rank, after it is printed: the rank then waits until the others have read it."""
    is_inside, _here.is_inside = _here.is_inside, True
    try:
        before(kind, error, where)
    finally:
        _here.is_inside = is_inside
    if not is_inside:
        _end_worlds(error)


def _at_exit() -> None:
    if not _children.have_ended:
        _end_worlds(getattr(sys, "last_value", None) if not hasattr(sys, "ps1") else None)  # no hook without a model
    stop_answering()
    if has_lost():
        _C.set_exit_status(1)


class _Children:
    """The end of processes of ``multiprocessing``, which run neither ``atexit`` functions nor ``sys.excepthook``.

    From Python 3.13 on they run exit functions, but after the error is gone and threads are joined. So the child's
    ``run()`` is wrapped, which sees the error in every version. In a child that imports this module later, in its
    ``run()``, exit functions of the older versions see it; for the newer ones only the exit status is known.
    """

    def __init__(self) -> None:
        self._process, self.have_ended = 0, False
        self.calls: set[Callable[[], object]] = set()  # made at the end, while its thread still answers

    def begin(self) -> None:
        """At the start of a child, before its ``run()``."""
        if not dist.is_initialized():  # else a rank has forked this process, and it is no rank
            begin_process()
            self._take_part()
            child: Any = multiprocessing.current_process()
            child.run = functools.partial(self._run, child.run)

    def join_in(self) -> None:
        if multiprocessing.parent_process() is None or self._process == os.getpid():
            return
        self._take_part()
        if sys.version_info < (3, 13):
            multiprocessing.util.Finalize(None, lambda: self._end(sys.exc_info()[1]), exitpriority=100)
            last = -100  # after other libraries'
            multiprocessing.util.Finalize(None, lambda: self._end_with_status(sys.exc_info()[1]), exitpriority=last)
        else:
            threading._register_atexit(self._end_late)  # type: ignore[attr-defined]

    def _take_part(self) -> None:
        self._process, self.have_ended, self.calls = os.getpid(), False, set()  # a forked process inherits its parent's

    def _run(self, run: Callable[[], object]) -> None:
        try:
            run()
        except BaseException as error:
            self._end(error)
            self._end_with_status(error)
            raise
        self._end(None)
        self._end_with_status(None)

    def _end(self, error: BaseException | None) -> None:
        if not _is_success(error):  # first, since the calls may wait, and the others should not wait with them
            _end_worlds(error)
        try:
            for call in self.calls:
                call()
        finally:  # Ctrl-C may end the wait, and a warning be an error
            _end_worlds(error)
            stop_answering()
            self.have_ended = True

    def _end_with_status(self, error: BaseException | None) -> None:
        if has_lost() and _is_success(error):
            raise SystemExit(1)

    def _end_late(self) -> None:
        """Before threads are joined, in the frame that keeps the status and gives it to the system."""
        if self._process != os.getpid():  # a fork of the child
            return
        frame: Any = sys._getframe()
        while frame.f_code is not vars(BaseProcess)["_bootstrap"].__code__:
            frame = frame.f_back
        self._end(SystemExit(frame.f_locals["exitcode"]))
        if has_lost() and frame.f_locals["exitcode"] == 0:
            frame.f_locals["exitcode"] = 1


_children = _Children()
atexit.register(_at_exit)
multiprocessing.util.register_after_fork(_children, _Children.begin)
if getattr(multiprocessing.current_process(), "_inheriting", False):  # a child that is spawned runs no hooks
    spawned: Any = SpawnProcess
    spawned._after_fork = _children.begin
note(
    FOR_GOOD,
    [
        "atexit:register",
        "multiprocessing.util:register_after_fork",
        "multiprocessing.context:SpawnProcess._after_fork",
        "multiprocessing.util:Finalize",
        "threading:_register_atexit",
    ],
    "Tell the other ranks at the end of a process whether it has finished, and with which error it has failed.",
    "tests/fsdp/desync/test_fsdp_lost_ranks.py",
    "None is needed: the functions do nothing in a process without a world.",
)
note(
    FOR_GOOD,
    ["libc:on_exit"],
    "End a process with status 1 that another rank's end has failed, though its own code would end it with 0.",
    "tests/fsdp/desync/test_fsdp_lost_ranks.py",
    "None is needed: the function keeps the status of a process that has lost no rank.",
)


# Where a rank can be found from


def _appear() -> None:
    """Let other ranks find this one already now: it may end or be stopped before it builds a unit."""
    with contextlib.suppress(Exception):  # the same error comes where the board is needed
        _appeared()


watching_worlds = Lifetime(
    "from the import of the runtime, or `install()`, to `uninstall()`; longer while a world of several processes or a "
    "wrapped model lives"
)


@watching_worlds.around(
    "torch.distributed.distributed_c10d:_update_default_pg", test="tests/fsdp/desync/test_fsdp_lost_ranks.py"
)
def _watch_worlds(before: Callable[[Any], None], pg: Any) -> None:
    """Appear in each world of this process as soon as it is made. torch has no hook for that."""
    if pg is None:
        world: Any = dist.group.WORLD
        end_rank(world, None)
        ours = _boards.get(world) if isinstance(world, dist.ProcessGroup) else None
        (ours or _here).life.since = _clock()
    before(pg)
    if pg is not None and watching_worlds.is_in_force:
        _appear()


def _is_fork() -> bool:
    """Whether a rank has forked this process. Then the threads of the rank's groups are not in it."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1
    return True


watching_worlds.begin()
if dist.is_initialized() and not _is_fork():
    _appear()
