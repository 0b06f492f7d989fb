"""What a rank that waits for others can learn of their processes: which has ended, with which error; which is stopped.

A rank that ends with an exception posts it in the world's store and stays until the others have read it: its process
may have the store. A rank that ends without a word is missed by those on its machine, and by others as it answers no
calls; a thread in C answers them, so a rank that computes, or holds the GIL, is not taken for one that is stopped.
"""

import atexit
import contextlib
import datetime
import functools
import itertools
import json
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
from typing import Any

import torch.distributed as dist

from .. import _C
from ..common.torch_private import torch_flat_param
from .errors import OrderError, without_store

STORE_ERRORS = (dist.DistStoreError, dist.DistNetworkError)
WITHOUT_STORE = ("fake", "threaded")  # backends of groups whose ranks are not processes
READING = 2.0  # seconds in which the others read what a rank has to say before it goes
_ANSWERING = 1.6  # seconds in which a process that lives answers
_PATIENCE = datetime.timedelta(seconds=10)  # with the store
_SHARE = 0.4  # of the heartbeat that a rank waits before it calls, and for answers; it looks once a second
_LENGTH = 1000  # of an error's message


class Board:
    """What the ranks of a world post, in ``store``, and whether they are alive.

    ``life``: a name that no world before it had in this store; ``beat``: seconds without a sign of life after which a
    process counts as stopped; 0: never.
    """

    def __init__(self, world: dist.ProcessGroup, store: dist.Store, life: str, beat: float):
        self.rank, self._size, self._name = dist.get_rank(), dist.get_world_size(), world.group_name
        self._prefix = f"flatparam board {life}"
        self._store = dist.PrefixStore(self._prefix, store)
        self.beat = beat
        self._is_member = False  # which reads what others post
        self._pulse: Any = None
        self._said: dict[int, str] = {}  # why ranks have ended
        self._read = 0  # posts so far
        self._calls = itertools.count()
        self._asked: tuple[float, dict[int, bytes]] | None = None  # since when this rank waits for answers to its call
        self._other: tuple[bytes, float] = (b"", -math.inf)  # the call of another rank, and since when
        self._places: dict[int, tuple[int, str]] | None = None  # the processes on this machine, and when they began
        self._lock = threading.RLock()  # of what this rank knows: a thread may look too

    def enter(self) -> None:
        """From now on this rank reads what others post, and answers."""
        if self._is_member:
            return
        self._is_member = True
        self._store.set(f"place of {self.rank}", json.dumps([_machine(), os.getpid(), _began(os.getpid())]))
        self._store.add("members", 1)
        if self.beat > 0:
            answer, interval = f"answer of {self.rank}", min(_ANSWERING / 2 - 0.1, self.beat / 4)
            with contextlib.suppress(RuntimeError):  # a group that C++ does not know
                self._pulse = _C.pulse(self._name, self._prefix, answer, interval)
                self._store.set(answer, "none yet")

    def stop(self) -> None:
        """Answer no more."""
        self._pulse = None

    def post(self, text: str) -> None:
        """Let the others know why this rank ends, and wait until they do, but not for long."""
        number = self._post(self.rank, text)
        if self._number("members") == 0 and torch_flat_param.FlatParamHandle.__module__.startswith("flatparam."):
            return  # these ranks use torch's runtime with the drop-in, where nobody reads
        wait_until(lambda: self._read_posts() and self._number(f"readers of {number}") >= self._size - 1)
        self._read_posts()

    def lost(self, ranks: Iterable[int], waited: float, is_absent: Callable[[int], bool] | None = None) -> str | None:
        """Why one of ``ranks`` will not come any more, for a rank that has waited for ``waited`` seconds.

        ``is_absent``: whether a rank has yet to come, where no collective fails when its process ends.
        """
        with self._lock:
            self._read_posts()
            if is_absent is not None:
                self._miss_processes()
            self._miss_answers(waited)
            return self._of(ranks, is_absent)

    def why_failed(self, ranks: Sequence[int], look: Callable[[], object] = lambda: None) -> str | None:
        """The same for one whose collective has failed. ``look``: for what may explain it too, and raises then."""
        before = self._answers()
        if before:
            self._store.set("call", self._new_call())
        begin, found = time.monotonic(), None
        while found is None and time.monotonic() - begin < READING:
            look()
            with self._lock:
                self._read_posts()
                self._miss_processes()
            if before and time.monotonic() - begin > _ANSWERING:
                self._said.update(
                    (rank, f"rank {rank} does not answer: its process has ended, or its machine is out of reach")
                    for rank, answer in self._answers().items()
                    if before.get(rank) == answer and rank not in self._said
                )
            found = self._of(ranks)
            time.sleep(0.02)
        absent = [rank for rank in ranks if rank not in self._values("place of {}")]
        if found is None and absent:
            return f"ranks {absent} have not come to their first unit, and may have ended before"
        return found

    def ended(self, ranks: Iterable[int]) -> int:
        """How many of ``ranks`` are known not to come any more."""
        return sum(rank in self._said for rank in ranks)

    def _of(self, ranks: Iterable[int], is_absent: Callable[[int], bool] | None = None) -> str | None:
        with self._lock:
            lost = (rank for rank in ranks if rank in self._said and rank != self.rank)
            return next((self._said[rank] for rank in lost if is_absent is None or is_absent(rank)), None)

    def _number(self, key: str) -> int:
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _post(self, rank: int, text: str) -> int:
        number = self._store.add("posts", 1)
        self._store.set(f"post {number}", json.dumps([rank, text]))
        return number

    def _read_posts(self) -> bool:
        """Whether all of them could be read."""
        with self._lock:
            posts = self._number("posts")
            while self._read < posts and self._store.check([f"post {self._read + 1}"]):
                self._read += 1
                rank, text = json.loads(self._store.get(f"post {self._read}"))
                if rank != self.rank:
                    self._said.setdefault(rank, text)
                    self._store.add(f"readers of {self._read}", 1)
            return self._read >= posts

    def _miss_processes(self) -> None:
        """Note those on this machine that are not there any more."""
        if self._places is None:
            machine = _machine()
            places = {rank: json.loads(place) for rank, place in self._values("place of {}").items()}
            here = {rank: place[1:] for rank, place in places.items() if machine and place[0] == machine}
            if len(places) < self._size:
                return
            self._places = here
        for rank, (process, began) in self._places.items():
            if rank not in self._said and _began(process) != began:
                self._said[rank] = f"the process of rank {rank} ({process}) has ended without a word: killed, or done"

    def _values(self, name: str) -> dict[int, bytes]:
        """What each rank has set, of those that have."""
        keys = [name.format(rank) for rank in range(self._size)]
        if self._store.check(keys):
            return dict(enumerate(self._store.multi_get(keys)))
        return {rank: self._store.get(key) for rank, key in enumerate(keys) if self._store.check([key])}

    def _answers(self) -> dict[int, bytes]:
        return self._values("answer of {}")

    def _new_call(self) -> str:
        return f"{self.rank} {next(self._calls)} {time.time()}"

    def _miss_answers(self, waited: float) -> None:
        """Of the ranks that wait for long one calls, and posts who does not answer."""
        now = time.monotonic()
        if self.beat == 0 or waited < _SHARE * self.beat:
            self._asked = None
        elif self._asked is None:
            last = self._store.get("call") if self._store.check(["call"]) else b""
            if last == self._other[0] and now - self._other[1] < self.beat:
                return
            before, call = self._answers(), self._new_call()
            found = self._store.compare_set("call", last.decode(), call)
            if found == call.encode():
                self._asked = (now, before)
            else:
                self._other = (found, now)
        elif now - self._asked[0] >= _SHARE * self.beat:
            before, self._asked = self._asked[1], None
            self._miss_processes()
            for rank, answer in self._answers().items():
                if before.get(rank) == answer and rank not in (self.rank, *self._said):
                    said = f"rank {rank} has given no sign of life for {self.beat:g} s: it is stopped, or out of reach"
                    self._post(rank, said)
            self._read_posts()


_boards: "weakref.WeakKeyDictionary[dist.ProcessGroup, Board | None]" = weakref.WeakKeyDictionary()
_lives: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()


def board() -> Board | None:
    """That of the world; None where there are no other processes."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1:
        return None
    if world not in _boards:
        store = store_of(world)
        if store is None:
            _boards[world] = None
        else:
            life = life_of_world()  # asks the store, which a new connection would try to reach for minutes
            own = own_connection(store)
            if own is not store:
                own.set_timeout(_PATIENCE)
            _boards[world] = Board(world, own, life, _heartbeat())
    return _boards[world]


def enter() -> None:
    """This rank is about to build, or has loaded, what it shares with others. Raises: OrderError without a store."""
    try:
        if (ours := board()) is not None:
            ours.enter()
            _watch_excepthook()
    except STORE_ERRORS as error:
        raise OrderError(without_store(error)) from error


def life_of_world() -> str:
    """A name that no world before it had in its store: each rank counts alike."""
    world: Any = dist.group.WORLD
    if world not in _lives:
        store = dist.distributed_c10d._get_default_store()
        _lives[world] = str(store.add(f"flatparam/worlds of {dist.get_rank()}", 1))
    return _lives[world]


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """That of a group whose ranks are processes."""
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    return None if dist.get_backend(group) in WITHOUT_STORE else store


def own_connection(store: dist.Store) -> dist.Store:
    """One that does not wait until another thread's ``store.wait()`` or ``get()`` has ended."""
    try:
        return store.clone()  # type: ignore[attr-defined, no-any-return]
    except RuntimeError:  # a kind that has none
        return store


def wait_for_keys(store: dist.Store, keys: list[str], ranks: Sequence[int], *, takes_long: bool = False) -> None:
    """One that each of ``ranks`` sets, or until the store's own time-out; Ctrl-C ends it.

    ``takes_long``: they may need more than that, and are waited for as long as they answer.
    Raises: OrderError, when one of them cannot any more.
    """
    ours, begin, waited = board(), time.monotonic(), 0.0
    key_of = dict(zip(ranks, keys, strict=True))
    patience: float = getattr(store, "timeout", dist.constants.default_pg_timeout).total_seconds()
    if takes_long and ours is not None and ours.beat > 0:
        patience = math.inf
    while not store.check(keys) and waited < patience:
        if ours is not None and waited > 0.2:
            found = ours.lost(ranks, waited, lambda rank: not store.check([key_of[rank]]))
            if found is not None:
                raise OrderError(found)
        time.sleep(min(0.3, 0.001 + waited / 10))
        waited = time.monotonic() - begin


class Meetings:
    """Where ranks wait for each other in ``store``, so that Ctrl-C ends the wait; who came in vain comes again."""

    def __init__(self, store: dist.Store, name: str):
        self._store, self._name, self._number = store, name, 0

    def meet(self, ranks: Sequence[int], mine: str = "is here") -> list[bytes]:
        """What each of ``ranks`` says in its call of the same number. Raises: OrderError, when one cannot come."""
        self._store.set(self._key(dist.get_rank()), mine)
        keys = [self._key(rank) for rank in ranks]
        wait_for_keys(self._store, keys, ranks)
        said = self._store.multi_get(keys)
        self._number += 1
        return said

    def forget(self) -> None:
        """Delete what this rank has said in the meeting before the last, to which all ranks have come."""
        if self._number > 1:
            self._store.delete_key(self._key(dist.get_rank(), 2))

    def _key(self, rank: int, before: int = 0) -> str:
        return f"{self._name}/{self._number - before}/{rank}"


def wait_until(is_so: Callable[[], Any], seconds: float = READING) -> None:
    """Or until it has taken this long, or the store is gone."""
    begin = time.monotonic()
    with contextlib.suppress(*STORE_ERRORS):
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


@functools.cache
def _machine() -> str:
    """Where process numbers mean the same; empty where that is not known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _began(process: int) -> str:
    """When a process of this machine began, in ticks; empty: it is not there, or has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


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
        ours = [one for one in list(_boards.values()) if one is not None] or [_board_at_end()]
        ours[-1].post(_describe(error, ours[-1].rank))


def _board_at_end() -> Board:
    """Of a rank that has built nothing, over the connection that there is: nothing is begun any more."""
    world: Any = dist.group.WORLD
    return Board(world, dist.distributed_c10d._world.pg_map[world][1], life_of_world(), 0.0)


def _describe(error: BaseException, rank: int) -> str:
    if isinstance(error, OrderError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    message = "".join(traceback.format_exception_only(error)).strip()
    message = message if len(message) <= _LENGTH else message[:_LENGTH] + "..."
    return f"rank {rank} has raised an error of its own{where} and has ended: {message}"


_process_ends = threading.Event()
_watching: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def watch(look: Callable[[], bool], seconds: float) -> None:
    """Call ``look`` in a thread of its own, this often, until it says that there is no need to or the process ends."""

    def run() -> None:
        while not _process_ends.wait(seconds) and look():
            pass

    thread = threading.Thread(target=run, name="flatparam watches", daemon=True)
    _watching.add(thread)
    thread.start()


def stop_answering() -> None:
    """This process ends: no thread shall look into a store any more."""
    _process_ends.set()
    for thread in list(_watching):
        thread.join(READING)  # one that comes to the interpreter after its end would abort the process
    for one in list(_boards.values()):
        if one is not None:
            one.stop()


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


def _at_exit() -> None:
    if not hasattr(sys, "ps1"):
        _ends_with(getattr(sys, "last_value", None))  # of a rank that had no model yet
    stop_answering()


class _Children:
    """Processes of multiprocessing run neither exit functions nor sys.excepthook."""

    def begin(self) -> None:
        global _rank_process
        if not dist.is_initialized():  # else a rank has forked it
            _rank_process = os.getpid()
            multiprocessing.util.Finalize(None, self._end, exitpriority=100)

    def _end(self) -> None:
        _ends_with(sys.exc_info()[1])
        stop_answering()


_children = _Children()
atexit.register(_at_exit)
multiprocessing.util.register_after_fork(_children, _Children.begin)
