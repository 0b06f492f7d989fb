"""Whether all ranks of a group come to the same collectives in one order: found out before they talk past each other.

The C core (``_C.CollectiveTrace``) predicts the next collective from those before. A rank that comes to the predicted
one asks nobody. Where it comes to another, or nothing is known yet, it asks the others here, through the group's store:

- nothing is known yet, so every rank asks: who comes first says what it does; the others compare, nobody waits;
- another one was expected: ranks that do as expected will not ask, so it goes on when all ranks have asked;
- an exception has kept this rank from a collective that it had come to: it goes on when all ranks say the same.

A rank that did as expected then waits for ranks that never come; a few times a second it looks into the store. Where
the device waits, as with NCCL, a thread in C looks, and aborts the communicator.
"""

import contextlib
import functools
import json
import math
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ... import _C
from ...common.collectives import PATIENCE, can_be_cut, name_in_cpp, tells_when_done, wait_for_device, wait_in_slices
from ..errors import OrderError, StoreGoneError
from . import liveness
from .events import IN_ONE_ORDER, CollectiveEvent, describe, difference
from .stores import Store
from .unit_ids import UnitIds, ids_of

_SELDOM = 1.0  # seconds between two looks into the store at most: the longer the wait, the fewer they are
_WATCHING = 0.5  # seconds between two looks of the thread that looks where waits cannot be cut
_LAST_MOMENT = 3.0  # seconds before the group's own time-out, to say more than it does
_DELETED = 64  # keys at a time
TRANSPORT = re.compile("connection|timed? ?out|socket|broken pipe|gloo/transport|monitored ?barrier|peer", re.I)
_TROUBLED_FOR = 2.0  # seconds after which ranks that wait are told of an exception that another one goes on after
# seconds before a mismatch with an interrupted rank is reported: the asking rank may be about to be interrupted, too
_KEPT_FOR = 1.0

_AGAIN = "0"  # withdraws this rank's earlier report, because it was interrupted again
_LOST = "What the device was waiting for has no values"
AND_SO = ". Collectives of these ranks may be under way that never end, so this process group cannot be used any more"


class GroupTrace:
    """The collectives of this process over one group.

    Args: ``group``: not kept; ``backend``: its backend for units on ``device``, a type; ``store``: of the group.
    """

    def __init__(self, group: dist.ProcessGroup, backend: Any, store: Store, device: str = "cpu"):
        self.ids: UnitIds = ids_of(group)
        self.core = _C.CollectiveTrace(self._agree, self._look, self._failed)
        self._ranks = dist.get_process_group_ranks(group)
        self._me = dist.get_rank(group)
        self._group, self._device = weakref.ref(group), device
        self._name = name_in_cpp(group)
        self._own_store: Store | None = None
        self._whole_store = store
        self.sliced = can_be_cut(backend)
        self._board = liveness.board()
        self._unreachable: float | None = None  # since when the store is gone
        self._asked: list[list[str]] = []  # the keys of those that this rank deletes, oldest first
        self._answered = ""  # the last call of one who is late
        self._calls = 0
        self._told = 0
        self._stuck: tuple[int, float] = (-1, 0.0)  # events so far, since when
        self._next_look = 0.0
        self._looking = threading.RLock()  # for the reason
        self._closing = threading.Lock()  # nobody takes another one meanwhile
        self._reason = ""
        self._readers = 0  # of it
        self._peers: weakref.WeakSet[GroupTrace] = (
            weakref.WeakSet()
        )  # of other groups that the same model is spread over
        self._told_of_loss = False
        self._trouble = ""  # which this rank has told, and not come back from

    def join(self, others: Iterable["GroupTrace"]) -> None:
        """The same model is spread over the groups of ``others``: what this one cannot be used for they cannot."""
        for other in others:
            self._peers.add(other)
            self.core.join(other.core)

    @property
    def _store(self) -> Store:
        """Ours alone: a store may outlive the groups made with it. Made at the first event, which all ranks come to."""
        if self._own_store is None:
            store = self._whole_store.own_connection()
            generation = self.ids.generation
            if generation is None:  # nothing was built over this group, only loaded
                generation = str(store.add(f"flatparam/{self._device} lives of {self._me}", 1))
            prefix = f"flatparam {self._device} {generation}"
            self._own_store = store.below(prefix)
            if not self.sliced and self._board is not None and self._name is not None:
                look = functools.partial(self._watch, self._board.native, self._name, prefix)
                liveness.watch(self._board, look, self.has_lost)
        return self._own_store

    def _said(self, key: str) -> str:
        return self._store.value_at(key)

    def _watch(self, board: _C.HealthBoard, name: str, prefix: str) -> None:
        """Where the host waits for a device that waits for ranks which never come, nobody looks; so a thread in C does.

        If the ranks differ, or one is lost or does not come, it aborts the communicator: the device goes on, the next
        collective raises.
        """
        found = False
        try:
            found = board.watch(self.core, name, self._device, prefix, self._ranks, _WATCHING)
        except RuntimeError:  # the group has gone, or cannot be aborted
            found = bool(self.core.broken)
        if found:  # a process may end before its next collective, which would raise this
            lost = f". {_LOST}" if self.core.broken == _C.TRACE_LOST else ""
            sys.stderr.write(f"flatparam: {self._why()}{lost}\n")
            sys.stderr.flush()

    def _why(self) -> str:
        """The reason why the group cannot be used any more: the thread in C finds that there is one, and has no words.

        It may be of another group of the same model.
        """
        if not self._reason:
            with self._looking:
                for one in (self, *self._peers):
                    if not self._reason and one.core.broken:
                        with contextlib.suppress(OrderError):
                            one._look_for_others()
                if not self._reason:
                    with contextlib.suppress(OrderError):
                        self._break("the store of the process group was out of reach for a while", "")
        return self._reason

    def _look_for_others(self) -> None:
        if self._reason:
            self._break(self._reason, "")
        try:
            self._raise_if_broken()
            self._raise_if_absent()
            self._raise_if_told_of_trouble()
            self._raise_if_lost(0.0, lambda rank: True)
            self._look_at_question()
        except StoreGoneError as error:
            self._end_without_store(error)

    def wait(self, work: dist.Work) -> None:
        """For a collective that has begun. Raises: OrderError, when another rank does not come to it."""
        self.core.begin()
        board, name = self._board, self._name
        if self.sliced or board is None or name is None:
            self._explained(lambda: wait_in_slices(work, self.sliced, self._look))
        else:
            self._explained(lambda: board.native.around_wait(name, self._device, work.wait))

    def wait_for_values(self, work: dist.Work) -> None:
        """The same for one outside of a step. On a device until it is done: what an abort leaves must not be saved."""
        self.core.begin()
        if self.is_by_device:
            begin = time.monotonic()

            def look() -> None:
                self.raise_if_closed()
                self._reach(lambda: self._look_into_store(time.monotonic() - begin, lambda rank: True))

            self._explained(lambda: wait_for_device(work, look))
        else:
            self.wait(work)
        self.raise_if_closed()

    @property
    def is_by_device(self) -> bool:
        """Whether the device waits for its collectives, and the host does not."""
        return tells_when_done(self._group(), torch.device(self._device))

    def _explained(self, waits: Callable[[], None]) -> None:
        try:
            waits()
        except OrderError:
            raise
        except RuntimeError as error:
            self._failed(str(error))
            raise

    def raise_if_closed(self) -> None:
        """Raises: OrderError, if no collective over the group has values any more."""
        if self.core.broken:
            why = self._why()
            self.note_told()
            raise OrderError(why)

    def raise_if_lost(self) -> None:
        """Raises: OrderError, if a device has waited for a collective that was aborted: there are no values."""
        if self.core.broken == _C.TRACE_LOST:
            why = self._why()
            self.note_told()
            raise OrderError(f"{why}. {_LOST}")

    def end_after_fork(self) -> None:
        """This process is a child of the rank, without the threads of its process groups: their waits would not end."""
        self._reason = (
            f"this process was forked from rank {self._ranks[self._me]}, and process groups do not work in it: run the "
            "model in the rank, or start the process another way"
        )
        self.core.broken = _C.TRACE_BROKEN

    def has_lost(self) -> bool:
        """Whether values are lost of which no call has raised."""
        return self.core.broken == _C.TRACE_LOST and not self._told_of_loss

    def note_told(self) -> None:
        """An OrderError is about to be raised, which the user goes on with, or not."""
        if not liveness.is_watching():
            for one in (self, *self._peers):
                one._told_of_loss = True

    def _post(self, event: int, new_pass: int, step: int) -> CollectiveEvent:
        return describe(self.ids, self._ranks[self._me], step, event, new_pass)

    def _agree(self, index: int, event: int, new_pass: int, alone: int) -> None:
        """Before a collective that was not to be expected. Raises: OrderError, on every rank."""
        self.raise_if_closed()
        mine = self._post(event, new_pass, self.core.passes)
        try:
            if self.core.missed is not None:
                self._settle(*self.core.missed, mine)
                if alone == 2 and not self.core.always:
                    return
            first = self._first(index, mine)
            if (first.step, first.event) != (mine.step, mine.event):
                self._differ(first, mine)
            waits = alone or self.core.always
            if index % len(self._ranks) == self._me:  # each rank deletes its share, once nobody looks at it
                self._asked.append([f"{index}", *((f"{index}/asked", f"{index}/go") if waits else ())])
            if waits:
                self._wait_for_all(index, mine)
                self._forget(index)
        except StoreGoneError as error:
            self._end_without_store(error)
        if alone == 1:
            self._tell(mine)

    def _first(self, index: int, mine: CollectiveEvent) -> CollectiveEvent:
        """What the first rank to ask has said."""
        return CollectiveEvent(*json.loads(self._store.compare_set(str(index), "", json.dumps(mine))))

    def _wait_for_all(self, index: int, mine: CollectiveEvent) -> None:
        self._point_at(index)
        if self._store.add(f"{index}/asked", 1) == len(self._ranks):
            self._store.compare_set("pending", str(index), "")
            self._store.set(f"{index}/go", "1")
            return
        self._wait_until(lambda: self._store.check([f"{index}/go"]), index, mine)

    def _settle(self, index: int, digest: int, mine: CollectiveEvent) -> None:
        """An exception has kept this rank from collectives, the first at ``index``: no rank may have begun them."""
        if digest == 0:
            self._break(
                f"rank {mine.rank} was interrupted while it issued a collective; it is unknown whether the collective "
                "was issued"
            )
        keys = [f"{index}/missed by {rank}" for rank in self._ranks]
        before, since = [""], 0.0  # what all said in the last look, since when

        def all_have_missed_the_same() -> bool:
            nonlocal before, since
            said = self._store.values_at(keys) if self._store.check(keys) else [_AGAIN]
            if said != before:
                before, since = said, time.monotonic()
            if _AGAIN in said:
                return False
            agree = len(set(said)) == 1
            if not agree and time.monotonic() - since > _KEPT_FOR:
                self._break("exceptions have kept the ranks from different collectives")
            return agree

        try:
            self._store.set(f"{index}/kept", str(mine.rank))
            self._store.set(keys[self._me], str(digest))
            self._point_at(index)
            self._wait_until(all_have_missed_the_same, index, mine, asks=False)
            self.core.confirm_not_begun()
        except BaseException:
            if self.core.missed is not None:
                with contextlib.suppress(StoreGoneError):
                    self._store.set(keys[self._me], _AGAIN)
            raise
        if self._me == 0:
            self._asked.append([f"{index}", f"{index}/kept", *keys])

    def _wait_until(self, answered: Callable[[], bool], index: int, mine: CollectiveEvent, asks: bool = True) -> None:
        """Until all ranks have answered what is asked at ``index``, or have been kept from it."""
        begin = looked = now = time.monotonic()
        kept_since = math.inf
        while not answered():
            time.sleep(min(_SELDOM, 0.0005 + (now - begin) / 10, max(0.05, begin + self._seconds() - now)))
            self._raise_if_broken()
            now = time.monotonic()
            if now - looked > 0.5:
                looked = now
                self._raise_if_lost(now - begin, lambda rank: not answered())
                self._point_at(index)
                self._answer()
                self._raise_if_troubled(now - begin, mine)
                if asks and (kept := self._said(f"{index}/kept")):
                    kept_since = min(kept_since, now)
                    if now - kept_since > _KEPT_FOR:
                        self._tell_kept(kept, mine)
            if now - begin > self._seconds():
                self._late(mine)
        self._store.compare_set("pending", str(index), "")  # it may have been pointed at after the answer

    def _point_at(self, index: int) -> None:
        """Let ranks that wait for a collective find what is asked: the first question that has no answer yet."""
        now = self._store.compare_set("pending", "", str(index))
        if int(now) < index:
            self._compare(now)
        elif int(now) > index:
            self._store.compare_set("pending", now, str(index))

    def _compare(self, index: str) -> None:
        """Whether this rank did what is asked about, if it has come to it. Raises: OrderError, on every rank."""
        mine = self._post_at(int(index))
        if mine is None:
            return
        if self.core.has_begun(int(index)) and (kept := self._said(f"{index}/kept")):
            self._tell_kept(kept, mine)
        if said := self._said(index):
            first = CollectiveEvent(*json.loads(said))
            if first.event != mine.event:
                self._differ(first, mine)

    def _post_at(self, index: int) -> CollectiveEvent | None:
        """Of what this rank came to there; None: it has not, was kept from it, or it is long ago."""
        passed = self.core.at(index)
        if passed is None or passed[0] == _C.TRACE_MISSED:
            return None
        since = (self.core.at(later) for later in range(index + 1, self.core.count))
        return self._post(*passed, self.core.passes - sum(new_pass for _, new_pass in filter(None, since)))

    def _tell_kept(self, rank: str, mine: CollectiveEvent) -> NoReturn:
        """``rank`` was kept from what this one has begun, or waits for."""
        self._break(f"rank {rank} raised before it issued a collective that {mine}")

    def _forget(self, index: int) -> None:
        """Every rank has asked about ``index``, so nobody will look at what was asked before it."""
        for _ in range(_DELETED):
            if not self._asked or int(self._asked[0][0]) >= index:
                break
            for key in self._asked.pop(0):
                self._store.delete(key)

    def look(self) -> None:
        """While this rank waits for one that has begun. Raises: OrderError, when others do another thing."""
        self.raise_if_closed()
        self._look()

    def _look(self) -> None:
        """A collective that was expected has been waited for for another while. Raises: OrderError, on every rank."""
        now = time.monotonic()
        if self._stuck[0] != self.core.count:
            self._stuck = (self.core.count, now - PATIENCE.total_seconds())
        elif now < self._next_look:
            return
        waited = now - self._stuck[1]
        self._next_look = now + min(_SELDOM, waited / 2, max(0.0, self._seconds() - waited))
        self._reach(lambda: self._look_into_store(waited))

    def _reach(self, look: Callable[[], None]) -> None:
        """Into the store. Raises: OrderError, when it is out of reach for long: what is waited for may end."""
        try:
            look()
            self._unreachable = None
        except StoreGoneError as error:
            now = time.monotonic()
            self._unreachable = now if self._unreachable is None else self._unreachable
            if now - self._unreachable > _SELDOM:
                self._end_without_store(error)

    def _look_into_store(self, waited: float, is_absent: Callable[[int], bool] | None = None) -> None:
        self._raise_if_broken()
        self._raise_if_lost(waited, is_absent)
        self._look_at_question()
        mine = self._post_at(self.core.count - 1)
        if mine is not None:
            self._raise_if_troubled(waited, mine)
            self._answer()
            if waited > self._seconds():
                self._late(mine)

    def _look_at_question(self) -> None:
        if pending := self._said("pending"):
            self._compare(pending)

    def _failed(self, message: str) -> None:
        """A collective has. Raises: OrderError, if that comes of what another rank has found, or of its end."""
        self.raise_if_closed()  # the thread has aborted it
        if not TRANSPORT.search(message):
            return
        try:
            self._raise_if_broken()
            found = self._board.diagnose(self._ranks, self._raise_if_broken) if self._board is not None else None
        except StoreGoneError as error:
            self._end_without_store(error)
        if found is None:
            self._break(f"rank {self._ranks[self._me]}: {message.splitlines()[0]}; no rank has said why", "", absent=1)
        self._break(found, "")

    def _raise_if_lost(self, waited: float, is_absent: Callable[[int], bool] | None = None) -> None:
        board = self._board
        if board is not None and (found := board.find_dead(self._ranks, waited, is_absent)) is not None:
            self._break(found, "")

    def _end_without_store(self, error: StoreGoneError) -> NoReturn:
        with self._closing:
            self._reason = self._reason or str(error) + AND_SO
            self.core.broken = _C.TRACE_BROKEN
        self.note_told()
        raise OrderError(self._reason) from error

    def _raise_if_broken(self) -> None:
        if broken := self._said("broken"):
            self._break(json.loads(broken)[0])

    def tell_trouble(self, text: str) -> None:
        """An exception has ended a pass on this rank: ``text`` says which. It lives on, and may come back."""
        if self._own_store is not None and not self._reason:
            self._trouble = json.dumps([self._ranks[self._me], self.core.passes, text])
            with contextlib.suppress(StoreGoneError):
                self._store.set("trouble", self._trouble)

    def come_back(self) -> None:
        """It goes on."""
        with contextlib.suppress(StoreGoneError):
            self._store.compare_set("trouble", self._trouble, "")

    def _raise_if_troubled(self, waited: float, mine: CollectiveEvent) -> None:
        """If an exception has ended another rank's pass, which this one is in, and not yet if all have left it."""
        if waited > _TROUBLED_FOR and (said := self._said("trouble")):
            rank, step, text = json.loads(said)
            if rank != mine.rank and mine.step <= step:
                self._break(text, "", absent=1)

    def _raise_if_told_of_trouble(self) -> None:
        """If a thread in C has been, as the device waits: that rank may have come back since."""
        if said := self._said("told"):
            self._break(json.loads(said)[2], "", absent=1)

    def _differ(self, first: CollectiveEvent, mine: CollectiveEvent) -> NoReturn:
        self._break(*difference(self.ids, first, mine))

    def _late(self, mine: CollectiveEvent) -> NoReturn:
        """Name the ranks that wait for nothing here: they answer no call."""
        before, begin, limit = self._answers(), time.monotonic(), self._seconds()
        self._calls += 1
        self._store.set("call", f"{self._me} {self._calls}")
        while time.monotonic() - begin < min(2 * _SELDOM, 0.7 * (_limit(self._name, self._device) - limit)):
            self._answer()  # others may be late too
            time.sleep(0.1)
        pairs = zip(self._ranks, before, self._answers(), strict=True)
        absent = [rank for rank, then, now in pairs if then == now and rank != mine.rank]
        self._break_without(absent, f"{mine} and has waited {limit:.0f} s for the others")

    def _break_without(self, absent: list[int], what: str) -> NoReturn:
        who = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {absent}" if absent else "all of them wait"
        self._break(f"{what}: {who} came to no collective of this model", absent=len(absent))

    def _raise_if_absent(self) -> None:
        """If a thread in C has found some that are. The host may have come further than the device that waits."""
        if absent := self._said("absent"):
            last = self.core.count - 1  # what has not begun the device does not wait for
            mine = self._post_at(last if self.core.has_begun(last) else last - 1)
            who = mine or f"rank {self._ranks[self._me]}"
            what = f"{who}; the device has waited for the others almost until the time-out"
            self._break_without(json.loads(absent), what)

    def _answer(self) -> None:
        """Say that this rank waits, if one who is late has asked since."""
        if (call := self._said("call")) != self._answered:
            self._answered = call
            self._store.set(f"answer of {self._me}", call)

    def _answers(self) -> list[str]:
        return [self._said(f"answer of {i}") for i in range(len(self._ranks))]

    def _seconds(self) -> float:
        """After which to give up: a moment before the group does, whose time-out may have been changed."""
        limit = _limit(self._name, self._device)
        return max(limit - _LAST_MOMENT, limit / 2)

    def _break(self, reason: str, what_to_do: str = IN_ONE_ORDER, absent: int = 0) -> NoReturn:
        """Who is first to find a reason gives it to all, and goes when they have read it: the store may go with it.

        ``absent``: how many will not read it, besides those that have ended.
        """
        self._close(reason if reason.endswith(AND_SO) else reason + what_to_do + AND_SO, absent)
        for peer in self._peers:
            peer._close(self._reason, 0)
        liveness.wait_until(lambda: all(one._is_read() for one in (self, *self._peers)))
        self.note_told()
        raise OrderError(self._reason)

    def _close(self, reason: str, absent: int) -> None:
        with self._closing:
            if self._reason:
                return
            absent = max(absent, self._board.count_dead(self._ranks) if self._board is not None else 0)
            readers = len(self._ranks) - absent
            with contextlib.suppress(StoreGoneError):
                said = self._store.compare_set("broken", "", json.dumps([reason, readers]))
                reason, readers = json.loads(said)
                self._store.add("readers", 1)
            self._readers, self._reason = readers, reason
            self.core.broken = _C.TRACE_BROKEN

    def _is_read(self) -> bool:
        return int(self._said("readers") or 0) >= self._readers

    def _tell(self, mine: CollectiveEvent) -> None:
        """All ranks do another thing than was to be expected: that is legal, and may be what a user looks for."""
        if dist.get_debug_level() == dist.DebugLevel.DETAIL and self._told != mine.step:
            self._told = mine.step
            warnings.warn(f"the order of collectives has changed: {mine}, like all others", stacklevel=2)


def _limit(name: str | None, device: str) -> float:
    """Seconds after which a collective fails over the group that C++ knows by ``name``."""
    seconds = math.inf if name is None else _C.time_out(name, device)
    return seconds if math.isfinite(seconds) else dist.constants.default_pg_timeout.total_seconds()
