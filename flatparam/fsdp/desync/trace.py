"""Whether all ranks of a group come to the same collectives in one order, checked before ranks that differ could hang.

The C core (``_C.CollectiveTrace``) predicts the next collective from the earlier ones. All ranks with one past predict
the same, so a rank that comes to the predicted collective asks nobody. Else C calls ``GroupTrace._agree``, which asks
the other ranks through the group's store:

| this rank | other ranks with the same past | it goes on |
|---|---|---|
| has no prediction | ask too | at once: the first rank posts its collective, the others compare with it |
| comes to another collective | do not ask if they follow the prediction | when all have asked; at once for a meeting |
| was kept from a collective by an exception | may wait in that collective | when all were kept from the same |

A rank that follows the prediction may wait in its collective for ranks that never come. It looks into the store a few
times a second and finds their question there. Where the device waits (NCCL), a thread in C looks, and aborts the
communicator if the ranks differ.

``checked_collectives.py`` makes the traces; ``_C.Unit`` and the wrapper tell them of collectives. On an error every
rank of the group raises the same OrderError, and the group cannot be used any more (``_break``). A trace knows a unit
by its id, no parameter and no layout.

Keys in the store, below the group's generation; ``N`` is the number of a collective, ``R`` a world rank, ``I`` a rank's
number in the group:

| key | value |
|---|---|
| ``N``, ``N/asked``, ``N/go`` | the first report of ``N``; how many ranks have asked; all have asked |
| ``N/kept``, ``N/missed by R`` | a rank that was kept from ``N``; the digest of the collectives that rank R missed |
| ``pending`` | the first ``N`` that has been asked about and not answered |
| ``broken``, ``readers`` | the reason why the group is broken, and how many will read it; how many have |
| ``trouble``, ``told`` | exceptions that live ranks have raised; the one for which C aborted a communicator |
| ``raised by R`` | the report of the last exception that world rank R has raised |
| ``call``, ``answer of I``, ``absent`` | a late rank's call; the last call that rank I answered; ranks without answer |
"""

import contextlib
import functools
import json
import logging
import math
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ... import _C
from ...common.collectives import (
    PATIENCE,
    can_be_cut,
    name_in_cpp,
    ranks_of,
    tells_when_done,
    wait_for_device,
    wait_in_slices,
)
from ...common.warned import warn_user
from ..errors import OrderError, StoreGoneError
from . import liveness
from .events import IN_ONE_ORDER, CollectiveEvent, SetupCollective, describe, difference, encode, is_learning
from .stores import Store
from .unit_ids import UnitIds, ids_of

_Value = TypeVar("_Value")
_LOG = logging.getLogger("flatparam")
_SELDOM = 1.0  # seconds between two looks into the store, at most; looks become rarer in a long wait
_WATCHING = 0.5  # seconds between two looks of the thread in C
_LAST_MOMENT = 3.0  # seconds by which a wait ends before the group's time-out, whose error names no rank
_DELETED = 64  # keys of at most so many indices are deleted at a time
TRANSPORT = re.compile(
    "connection|timed? ?out|socket|broken pipe|gloo/transport|monitored ?barrier|peer|communicator was aborted|"
    "network error",
    re.I,
)
_TROUBLED_FOR = 2.0  # seconds of waiting before another rank's exception is raised: that rank may come back
# seconds before a mismatch with an interrupted rank is reported: the asking rank may be about to be interrupted, too
_KEPT_FOR = 1.0

_NEXT = "\x1e"  # between the reports in the key "trouble"; fp_watch.cpp reads it, too
_AGAIN = "0"  # withdraws this rank's earlier report, because it was interrupted again
_LOST = "What the device was waiting for has no values"
AND_SO = ". Collectives of these ranks may be under way that never end, so this process group cannot be used any more"


class GroupTrace:
    """The collectives of this process over one group, for units on one type of device.

    Args: ``group``: held weakly; ``backend``: the group's for ``device``, a device type; ``store``: the group's.
    C calls ``_agree`` before an unexpected collective, ``_look`` while it waits for one, ``_failed`` after an error.
    """

    def __init__(self, group: dist.ProcessGroup, backend: Any, store: Store, device: str = "cpu"):
        self.ids: UnitIds = ids_of(group)
        self.core = _C.CollectiveTrace(self._agree, self._look, self._failed)
        self._ranks = ranks_of(group)
        self._me = dist.get_rank(group)
        self._group, self._device = weakref.ref(group), device
        self._name = name_in_cpp(group)
        self._own_store: Store | None = None
        self._whole_store = store
        self.sliced = can_be_cut(backend)
        world: Any = dist.group.WORLD
        self.world: weakref.ref[dist.ProcessGroup] = weakref.ref(world)
        self._board = liveness.board()
        self._unreachable: float | None = None  # since when the store is gone
        self._asked: list[list[str]] = []  # keys that this rank will delete, one list an index, oldest first
        self._answered = ""  # the last call that this rank has answered
        self._calls = 0  # calls of this rank
        self._told = 0  # up to this step _tell need not warn
        self._stuck: tuple[int, float] = (-1, 0.0)  # the number of events in the last look, and since when it is that
        self._next_look = 0.0
        self._looking = threading.RLock()  # one thread looks for the reason
        self._closing = threading.Lock()  # held to set the reason: the first one stays
        self._reason = ""  # why the group is broken; empty: it is not, or C has broken it and nobody has asked why
        self._readers = 0  # how many ranks will read the reason
        self._peers: weakref.WeakSet[GroupTrace] = weakref.WeakSet()  # other groups of the same model
        self._told_of_loss = False  # a call has raised the error
        self._trouble = ""  # this rank's report in the key "trouble"
        self._raised = (-1, 0)  # the last step that an exception has ended here, and how many have
        self._meets = False  # the event that is being noted is a meeting
        self._meeting = 0  # the number of the last meeting

    def join(self, others: Iterable["GroupTrace"]) -> None:
        """Break ``others`` whenever this trace breaks: one model uses the groups of all."""
        for other in others:
            self._peers.add(other)
            self.core.join(other.core)

    def watch(self) -> None:
        """Start the watching thread where the device waits, as the first event does."""
        if not self.sliced:
            _ = self._store

    @property
    def _store(self) -> Store:
        """The group's store below the group's generation: a store may outlive the groups made with it.

        Made at the first event, to which all ranks come. Where the device waits, this starts the watching thread.
        """
        if self._own_store is None:
            store = self._whole_store.own_connection()
            generation = self.ids.generation
            if generation is None:  # no unit was built over this group, units were only unpickled
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
        """Look after the other ranks in this thread, in C, while a device waits: the host cannot look then.

        If the ranks differ, or one has ended or does not come, C aborts the communicator. The device goes on without
        values, and the next collective raises.
        """
        found = False
        try:
            found = board.watch(
                trace=self.core, group=name, device=self._device, prefix=prefix, ranks=self._ranks, interval=_WATCHING
            )
        except RuntimeError:  # the group is gone, or its backend cannot abort
            found = bool(self.core.broken)
        if found:  # print it: the process may end before its next collective, which would raise it
            lost = f". {_LOST}" if self.core.broken == _C.TRACE_LOST else ""
            sys.stderr.write(f"flatparam: {self._why()}{lost}\n")
            sys.stderr.flush()

    def _why(self) -> str:
        """Return the reason why the group is broken. If C has broken the trace, the reason is in the store.

        Another group of the same model may have the reason.
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
            if said := self._said("told"):  # another rank's exception, which aborted the communicator; it may be back
                self._break(_C.read_report(said)[3], "", absent=1)
            self._raise_if_lost(0.0, lambda rank: True)
            self._look_at_question()
        except StoreGoneError as error:
            self._end_without_store(error)

    def run(self, issue: Callable[[], dist.Work]) -> None:
        """Begin a recorded collective by ``issue()``, and wait for it; with NCCL let the stream wait.

        Raises: OrderError if ranks differ, or if one that cannot come is the reason why torch does not begin.
        """
        work = self.begin(issue)
        board, name = self._board, self._name
        with explaining(self._failed):
            if self.sliced or board is None or name is None:
                wait_in_slices(work, self.sliced, self._look)
            else:
                board.native.around_wait(name, self._device, work.wait)

    def begin(self, issue: Callable[[], _Value]) -> _Value:
        """Return ``issue()``, which begins the recorded collective. Raises: as ``run``."""
        self.core.launch()
        with explaining(self._failed):
            begun = issue()
        self.core.begin()
        return begun

    def run_for_values(self, issue: Callable[[], dist.Work]) -> None:
        """Do as ``run``, and wait for the device, too: an aborted gather must not be saved."""
        if self.is_by_device:
            work, began = self.begin(issue), time.monotonic()

            def look() -> None:
                self.raise_if_closed()
                self._reach(lambda: self._look_into_store(time.monotonic() - began, lambda rank: True))

            with explaining(self._failed):
                wait_for_device(work, look)
        else:
            self.run(issue)
        self.raise_if_closed()

    def note_meeting(self, what: SetupCollective) -> None:
        """Record that this rank comes to a meeting in a store, which is no collective and has no time-out.

        It waits for no rank: the caller does, and calls ``look_at_meeting`` meanwhile.
        Raises: OrderError if another rank has come to a collective in its place.
        """
        self._meets = True
        try:
            self.core.note(encode(what), False)
        finally:
            self._meets = False
        self.core.begin()
        self._meeting = self.core.count - 1

    def end_meeting(self) -> None:
        """Delete what this rank has asked about the last meeting, and before: all ranks have come to it."""
        self._reach(lambda: self._forget(self._meeting + 1))

    def look_at_meeting(self) -> None:
        """Raises: OrderError, on every rank, if one of them has come to a collective in place of the meeting."""
        self.raise_if_closed()
        self._reach(self._look_at_meeting)

    def _look_at_meeting(self) -> None:
        self._raise_if_broken()
        self._look_at_question()

    @property
    def is_by_device(self) -> bool:
        """Whether the device waits for its collectives, and the host does not."""
        return tells_when_done(self._group(), torch.device(self._device))

    def raise_if_closed(self) -> None:
        """Raises: OrderError if the group is broken."""
        if self.core.broken:
            why = self._why()
            self.note_told()
            raise OrderError(why)

    def raise_if_lost(self) -> None:
        """Raises: OrderError if a device was waiting for a collective that was aborted: its output is not valid."""
        if self.core.broken == _C.TRACE_LOST:
            why = self._why()
            self.note_told()
            raise OrderError(f"{why}. {_LOST}")

    def end_after_fork(self) -> None:
        """Break the trace in a forked child: the threads of process groups are not in it, so waits would not end."""
        self._reason = (
            f"this process was forked from rank {self._ranks[self._me]}, and process groups do not work in it: run the "
            "model in the rank, or start the process another way"
        )
        self.core.broken = _C.TRACE_BROKEN

    def has_lost(self) -> bool:
        """Whether an aborted collective has lost values and no call has raised an error for that."""
        return self.core.broken == _C.TRACE_LOST and not self._told_of_loss

    def note_told(self) -> None:
        """Note that the user is about to see the OrderError, so the exit status need not report it."""
        if not liveness.is_watching():
            for one in (self, *self._peers):
                one._told_of_loss = True

    def _post(self, event: int, new_pass: int, step: int) -> CollectiveEvent:
        return describe(self.ids, self._ranks[self._me], step, event, new_pass)

    def _agree(self, index: int, event: int, new_pass: int, alone: int) -> None:
        """Ask the other ranks before an unexpected collective.

        Args: ``index``: number of the collective; ``event``, ``new_pass``: as C notes them; ``alone``: 0: there is no
        prediction; 1: another collective was predicted; 2: this one was, and C asks for another reason.
        Raises: OrderError, on every rank of the group, if the ranks differ.
        """
        self.raise_if_closed()
        mine = self._post(event, new_pass, self.core.passes)
        _LOG.debug("collective %d of group %s: %s", index, self._name, mine)
        if is_learning(mine):  # it comes once, and is still predicted in the two steps after it
            self._told = mine.step + 2
        try:
            if self.core.missed is not None:
                self._settle(*self.core.missed, mine)
                if alone == 2 and not self.core.always:
                    return
            first = self._first(index, mine)
            if (first.step, first.event) != (mine.step, mine.event):
                self._differ(first, mine)
            waits = alone or self.core.always
            if index % len(self._ranks) == self._me:  # the ranks share the work of deleting keys
                self._asked.append([f"{index}", *((f"{index}/asked", f"{index}/go") if waits else ())])
            if waits and self._ask_all(index) and not self._meets:
                self._wait_until(lambda: self._store.check([f"{index}/go"]), index, mine)
            if waits and not self._meets:
                self._forget(index)
        except StoreGoneError as error:
            self._end_without_store(error)
        if alone == 1:
            self._tell(mine)

    def _first(self, index: int, mine: CollectiveEvent) -> CollectiveEvent:
        """Return the report of the first rank that has asked about ``index``; ``mine`` if this is the first."""
        return CollectiveEvent.from_text(self._store.compare_set(str(index), "", mine.to_text()))

    def _ask_all(self, index: int) -> bool:
        """Ask all ranks about ``index``. Returns: whether some have not asked yet."""
        self._point_at(index)
        if self._store.add(f"{index}/asked", 1) < len(self._ranks):
            return True
        self._store.compare_set("pending", str(index), "")
        self._store.set(f"{index}/go", "1")
        return False

    def _settle(self, index: int, digest: int, mine: CollectiveEvent) -> None:
        """Wait until exceptions have kept all ranks from the same collectives: then no rank has begun them.

        Args: ``index``: the first of them; ``digest``: of all, 0: an exception came while one was issued.
        Raises: OrderError if another rank has begun one, or was kept from others. After an interruption the rank
        withdraws its digest, and the next collective settles again.
        """
        if digest == 0:
            self._break(
                f"rank {mine.rank} was interrupted while it issued a collective; it is unknown whether the collective "
                "was issued"
            )
        keys = [f"{index}/missed by {rank}" for rank in self._ranks]
        before, since = [""], 0.0  # the ranks' digests in the last look, and since when they are so

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
        """Wait until ``answered()``: all ranks have answered the question about ``index``.

        ``asks``: give up if a rank was kept from ``index`` by an exception. False while this rank settles that itself.
        """
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
                self.raise_if_troubled(now - begin)
                if asks and (kept := self._said(f"{index}/kept")):
                    kept_since = min(kept_since, now)
                    if now - kept_since > _KEPT_FOR:
                        self._tell_kept(kept, mine)
            if now - begin > self._seconds():
                self._late(mine)
        self._store.compare_set("pending", str(index), "")  # this rank may have set it after the answer

    def _point_at(self, index: int) -> None:
        """Show the question about ``index`` to ranks that wait in a collective. The earliest open question stays."""
        now = self._store.compare_set("pending", "", str(index))
        if int(now) < index:
            self._compare(now)
        elif int(now) > index:
            self._store.compare_set("pending", now, str(index))

    def _compare(self, index: str) -> None:
        """Compare the question about ``index`` with this rank's own collective there, if it has come to it.

        Raises: OrderError, on every rank, if they differ.
        """
        mine = self._post_at(int(index))
        if mine is None:
            return
        if self.core.has_begun(int(index)) and (kept := self._said(f"{index}/kept")):
            self._tell_kept(kept, mine)
        if said := self._said(index):
            first = CollectiveEvent.from_text(said)
            if first.event != mine.event:
                self._differ(first, mine)

    def _post_at(self, index: int) -> CollectiveEvent | None:
        """Return the report of this rank's collective ``index``; None: not reached, kept from it, or too long ago."""
        passed = self.core.at(index)
        if passed is None or passed[0] == _C.TRACE_MISSED:
            return None
        since = (self.core.at(later) for later in range(index + 1, self.core.count))
        return self._post(*passed, self.core.passes - sum(new_pass for _, new_pass in filter(None, since)))

    def _tell_kept(self, rank: str, mine: CollectiveEvent) -> NoReturn:
        """Raise: an exception kept ``rank`` from the collective that this rank has begun or waits for."""
        self._break(f"rank {rank} raised before it issued a collective that {mine}")

    def _forget(self, index: int) -> None:
        """Delete this rank's share of the keys before ``index``: all ranks have asked about ``index``."""
        for _ in range(_DELETED):
            if not self._asked or int(self._asked[0][0]) >= index:
                break
            for key in self._asked.pop(0):
                self._store.delete(key)

    def look(self) -> None:
        """Look after the other ranks during a wait. Raises: OrderError if they differ, or the group is broken."""
        self.raise_if_closed()
        self._look()

    def _look(self) -> None:
        """Look into the store, unless the last look was just now. C calls it a few times a second in each wait.

        Raises: OrderError, on every rank.
        """
        now = time.monotonic()
        if self._stuck[0] != self.core.count:
            self._stuck = (self.core.count, now - PATIENCE.total_seconds())
        elif now < self._next_look:
            return
        waited = now - self._stuck[1]
        self._next_look = now + min(_SELDOM, waited / 2, max(0.0, self._seconds() - waited))
        self._reach(lambda: self._look_into_store(waited))

    def _reach(self, look: Callable[[], None]) -> None:
        """Call ``look``. Raises: OrderError if the store is gone for over a second; before, the collective may end."""
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
        self.raise_if_troubled(waited)
        mine = self._post_at(self.core.count - 1)
        if mine is not None:
            self._answer()
            if waited > self._seconds():
                self._late(mine)

    def _look_at_question(self) -> None:
        if pending := self._said("pending"):
            self._compare(pending)

    def _failed(self, message: str) -> None:
        """Look for the cause of a collective's error ``message``.

        Raises: OrderError if the error is one of the transport: with the reason of another rank, or its end, if it can
        be found. Returns for any other error, which the caller raises as it is.
        """
        self.raise_if_closed()  # the watching thread may have aborted the collective
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

    def break_for(self, found: str) -> NoReturn:
        """Break the group: ``found`` says why a rank cannot come. Raises: OrderError, with one text on all ranks."""
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
        """Post that the exception in ``text`` has ended a collective call on this rank. It may come back.

        Raises: StoreGoneError.
        """
        if not self._reason:
            rank, step = self._ranks[self._me], self.core.passes
            self._raised = (step, self._raised[1] + 1 if self._raised[0] == step else 1)
            report = _C.write_report(rank, *self._raised, text.replace(_NEXT, " "))
            self._store.set(f"raised by {rank}", report)
            self._put_trouble(report)

    def come_back(self) -> None:
        """Withdraw the post of ``tell_trouble``; the posts of other ranks stay."""
        with contextlib.suppress(StoreGoneError):
            self._put_trouble("")

    def _put_trouble(self, report: str) -> None:
        """Replace this rank's report in the key "trouble"; empty: only take it out."""
        old, self._trouble = self._trouble, report
        found, wanted = self._said("trouble"), None
        while found != wanted:  # until no other rank changes the key in between
            reports = [each for each in found.split(_NEXT) if each and each != old]
            wanted = _NEXT.join([*reports, report] if report else reports)
            found = self._store.compare_set("trouble", found, wanted)

    def _troubles(self) -> Iterator[tuple[int, tuple[int, int], str]]:
        """Return (rank, (step, number of its exceptions in that step), text) of each report in "trouble"."""
        for report in filter(None, self._said("trouble").split(_NEXT)):
            rank, step, number, text = _C.read_report(report)
            yield rank, (step, number), text

    def raise_if_troubled(self, waited: float) -> None:
        """Raise if an exception has ended a call of another rank, which has not come back while this one has waited.

        Not if as many exceptions have ended calls of this rank in that step: all ranks may have caught the same one.
        """
        for rank, raised, text in self._troubles() if waited > _TROUBLED_FOR else ():
            if rank != self._ranks[self._me] and self._raised < raised:
                self._break(text, "", absent=1)

    def _differ(self, first: CollectiveEvent, mine: CollectiveEvent) -> NoReturn:
        """Raise that the ranks differ; or, if one of the two has caught an exception and gone on, that exception."""
        for rank, _, text in self._troubles():
            if rank in (first.rank, mine.rank):
                self._break(text, "")
        self._break(*difference(self.ids, first, mine))

    def _late(self, mine: CollectiveEvent) -> NoReturn:
        """Raise shortly before the time-out. Call all ranks; those that do not answer wait for no collective here."""
        before, begin, limit = self._answers(), time.monotonic(), self._seconds()
        self._calls += 1
        self._store.set("call", f"{self._me} {self._calls}")
        while time.monotonic() - begin < min(2 * _SELDOM, 0.7 * (_limit(self._name, self._device) - limit)):
            self._answer()  # other ranks may be calling, too
            time.sleep(0.1)
        pairs = zip(self._ranks, before, self._answers(), strict=True)
        absent = [rank for rank, then, now in pairs if then == now and rank != mine.rank]
        self._break_without(absent, f"{mine} and has waited {limit:.0f} s for the others")

    def _break_without(self, absent: list[int], what: str) -> NoReturn:
        who = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {absent}" if absent else "all of them wait"
        self._break(f"{what}: {who} came to no collective of this model", absent=len(absent))

    def _raise_if_absent(self) -> None:
        """Raise if C has found ranks that do not come. The host may have come further than the waiting device."""
        if absent := self._said("absent"):
            last = self.core.count - 1  # the device waits for the last collective that has begun
            mine = self._post_at(last if self.core.has_begun(last) else last - 1)
            who = mine or f"rank {self._ranks[self._me]}"
            what = f"{who}; the device has waited for the others almost until the time-out"
            self._break_without(json.loads(absent), what)

    def _answer(self) -> None:
        """Answer the last call of a late rank: this rank waits for a collective of this group."""
        if (call := self._said("call")) != self._answered:
            self._answered = call
            self._store.set(f"answer of {self._me}", call)

    def _answers(self) -> list[str]:
        return [self._said(f"answer of {i}") for i in range(len(self._ranks))]

    def _seconds(self) -> float:
        """Return the seconds of waiting before ``_late``: a little less than the group's time-out, as it is now."""
        limit = _limit(self._name, self._device)
        return max(limit - _LAST_MOMENT, limit / 2)

    def _break(self, reason: str, what_to_do: str = IN_ONE_ORDER, absent: int = 0) -> NoReturn:
        """Break this group and its peers, and raise the reason. The first rank to break a group sets it for all.

        Wait until the others have read it, at most ``liveness.READING`` seconds: the store may be in this process.
        ``absent``: how many live ranks will not read it.
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
            readers = len(self._ranks) - absent
            with contextlib.suppress(StoreGoneError):
                readers = min(readers, self._living())
                said = self._store.compare_set("broken", "", json.dumps([reason, readers]))
                reason, readers = json.loads(said)
                self._store.add("readers", 1)
            self._readers, self._reason = readers, reason
            self.core.broken = _C.TRACE_BROKEN

    def _living(self) -> int:
        return len(self._ranks) - (self._board.count_dead(self._ranks) if self._board is not None else 0)

    def _is_read(self) -> bool:
        """Whether all ranks that will read the reason have read it. One may end without: it was told in a save, say."""
        read = int(self._said("readers") or 0)
        return read >= self._readers or read >= self._living()

    def _tell(self, mine: CollectiveEvent) -> None:
        """Warn that all ranks came to an unexpected collective. That is legal; with DETAIL the user may look for it."""
        if dist.get_debug_level() == dist.DebugLevel.DETAIL and self._told < mine.step:
            self._told = mine.step
            warn_user(f"the order of collectives has changed: {mine}, like all others", (self._group(),))


@contextlib.contextmanager
def explaining(explain: Callable[[str], None]) -> Iterator[None]:
    """A block with a collective. If torch raises, call ``explain(message)``, whose OrderError replaces torch's."""
    try:
        yield
    except OrderError:
        raise
    except RuntimeError as error:
        try:
            explain(str(error))
        except OrderError as reason:
            raise reason from None  # without the transport's error, whose lines of gloo would hide it
        raise


def _limit(name: str | None, device: str) -> float:
    """Seconds after which a collective fails over the group that C++ knows by ``name``."""
    seconds = math.inf if name is None else _C.time_out(name, device)
    return seconds if math.isfinite(seconds) else dist.constants.default_pg_timeout.total_seconds()
