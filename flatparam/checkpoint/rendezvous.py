"""Let the ranks of a save, load or resize agree, through the world's store, without a collective.

All ranks make their calls in one order, so one thread of each makes them: two threads may come in another order on each
rank, which looks like ranks that call different things. The rest of a call may run in any thread. Each rank writes one
value, the first rank decides for all and writes the verdict. Waits end if a rank is gone.
"""

import contextlib
import json
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from ..common.collectives import ranks_of
from ..fsdp.desync import liveness
from ..fsdp.desync.checked_collectives import come_back, note_meeting
from ..fsdp.desync.events import SetupCollective
from ..fsdp.desync.stores import WITHOUT_STORE, Store, connection_of_world
from ..fsdp.desync.trace import AND_SO, GroupTrace
from ..fsdp.errors import FileError, OrderError, StateError, StoreGoneError
from ..fsdp.unit.unit import units_of
from .errors import CheckpointError

# world -> ranks -> rendezvous so far. Groups of the same ranks share names in the store, so they share a count.
_met: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], int]]" = weakref.WeakKeyDictionary()


class Rendezvous:
    """A save, load or resize of the ranks of ``group`` (None: the world). All ranks must make theirs in the same order.

    The collective traces of ``model``'s groups record it, so a rank that runs a unit in its place is found: until all
    ranks have come to the first ``agree``, its waits look into these traces. Without process groups, or with a backend
    without real ranks, this process is alone.
    Raises: OrderError if another rank has come to a collective of ``model``; ValueError if ``group`` lacks this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, call: SetupCollective, model: nn.Module):
        self.what, self.rank, self.ranks = call.call.removesuffix("()"), 0, [0]
        self._traces: list[GroupTrace] = []
        self._store: Store | None = None
        self._round = 0
        self._me = 0
        if not dist.is_initialized():
            return
        members: Any = dist.group.WORLD if group is None else group
        self.rank, self.ranks = dist.get_rank(members), ranks_of(members)
        if self.rank < 0:
            raise ValueError(f"{self.what}: this rank is not in the group of ranks {self.ranks}")
        self._me = dist.get_rank()
        if len(self.ranks) == 1 or dist.get_backend(members) in WITHOUT_STORE:
            return
        liveness.enter()
        come_back()
        modules = model.modules() if isinstance(model, nn.Module) else ()  # the plan raises for all ranks
        parts = [flat_param for unit in units_of(modules) for flat_param in unit.flat_params]
        self._traces = note_meeting(call, parts, self.ranks)
        world: Any = dist.group.WORLD
        met = _met.setdefault(world, {})
        number = met[tuple(self.ranks)] = met.get(tuple(self.ranks), 0) + 1
        name = f"flatparam rendezvous {liveness.generation_of_world()} of {','.join(map(str, self.ranks))} {number}"
        self._store = connection_of_world().below(name)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def agree(self, work: Callable[[], Any], decide: Callable[[list[Any]], Any], *, is_last: bool = False) -> Any:
        """Call ``work``, then on the first rank ``decide`` with all ranks' results; return its result on every rank.

        All ranks call it. All results are values for JSON. If ``work`` raises on a rank, ``decide`` is not called.
        ``is_last``: the first rank waits ``liveness.READING`` seconds at most until all that live have read, as its
        process may end and the store with it.
        Raises: on every rank: the rank's own error, as it is or as a CheckpointError; else a CheckpointError with the
        error of the first rank that has one. OrderError if the first rank is gone, or a rank runs a unit in place of
        this call.
        """
        mine = None
        error: BaseException | None = None
        failed: BaseException | None = None
        try:
            try:
                mine = work()
            except Exception as caught:
                error = caught
            told = None if error is None else f"rank {self._me}: {_said(error)}"
            try:
                answer, failed = self._exchange([told, mine, self.what], decide, is_last)
            except StoreGoneError as gone:
                raise StoreGoneError(f"{self.what}: {gone}") from gone
            while self._traces:  # all ranks have come
                self._traces.pop().end_meeting()
            error = error or failed
            if error is not None:
                raise self._own(error)
        finally:
            error = failed = None  # a traceback holds this frame
        if answer[0] is not None:
            raise CheckpointError(f"{self.what}: {answer[0]}")
        return answer[1]

    def _exchange(
        self, mine: list[Any], decide: Callable[[list[Any]], Any], is_last: bool
    ) -> tuple[list[Any], BaseException | None]:
        """Return ``([reason of a failure or None, result], the first rank's own exception or None)``."""
        self._round += 1
        store, own = self._store, f"{self._round}/{self._me}"
        verdict, readers = f"{self._round}/all", f"{self._round}/readers"
        if store is not None:
            store.set(own, json.dumps(mine))
        reads = {rank: f"{self._round}/read/{rank}" for rank in self.ranks[1:]}
        if store is not None and not self.is_first:
            self._wait_for(store, [verdict], self.ranks[:1])
            answer = json.loads(store.values_at([verdict])[0])
            told = reads if is_last or answer[0] is not None else {}  # the first rank waits for this
            with contextlib.suppress(StoreGoneError):  # it may have ended since
                if told:
                    store.set(reads[self._me], "")
                if store.add(readers, 1) == self.size - 1:
                    for key in (readers, verdict, *told.values()):
                        store.delete(key)
            return answer, None
        keys = [f"{self._round}/{rank}" for rank in self.ranks]
        answer = [None, None]
        failed: BaseException | None = None
        try:
            said = [mine]
            if store is not None:
                self._wait_for(store, keys, self.ranks)
                said = [json.loads(one) for one in store.values_at(keys)]
            answer[0] = self._problem_of(said)
            if answer[0] is None:
                answer[1] = decide([one[1] for one in said])
        except Exception as failure:
            if any(trace.core.broken for trace in self._traces):
                raise  # the others find it in the trace
            answer[0], failed = f"rank {self._me}: {_said(failure)}", failure
        if store is not None:
            store.set(verdict, json.dumps(answer))
            for key in keys:
                store.delete(key)
            if is_last or answer[0] is not None:  # this process may end after this, and the store with it
                liveness.wait_until(lambda: self._is_read(store, verdict, reads))
        try:
            return answer, failed
        finally:
            failed = None  # its traceback holds this frame

    def _problem_of(self, said: list[list[Any]]) -> str | None:
        """Return why the ranks cannot go on: one calls another function, or has an error."""
        for rank, (_, _, what) in zip(self.ranks, said, strict=True):
            if what != self.what:  # a rank without shards has no trace in which the calls would differ
                return f"the ranks do different things: rank {self._me} calls {self.what}, rank {rank} {what}"
        return next((problem for problem, *_ in said if problem is not None), None)

    def _is_read(self, store: Store, verdict: str, reads: dict[int, str]) -> bool:
        """Whether all others that live have read ``verdict``, which the last of all deletes. ``reads``: their keys."""
        board = liveness.board()
        unread = [rank for rank, key in reads.items() if not store.check([key])]
        return not store.check([verdict]) or (board is not None and board.count_dead(unread) == len(unread))

    def _wait_for(self, store: Store, keys: list[str], ranks: list[int]) -> None:
        """Wait for ``keys``. Raises: OrderError, with the text that ranks raise meanwhile in a collective."""
        try:
            liveness.wait_for_keys(store, keys, ranks, takes_long=True, look=self._look)
        except OrderError as lost:
            if isinstance(lost, StoreGoneError) or not self._traces or str(lost).endswith(AND_SO):
                raise
            raise OrderError(f"{lost}{AND_SO}") from None

    def _look(self, waited: float) -> None:
        """Raises: OrderError, on every rank, if one of them runs a unit in place of this call."""
        for trace in self._traces:
            trace.look_at_meeting()

    def _own(self, error: BaseException) -> BaseException:
        """Convert the local error to CheckpointError, so that every rank raises the same type."""
        if isinstance(error, CheckpointError | StateError) or not isinstance(error, Exception):
            return error
        where = "" if self._store is None else f"rank {self._me}: "
        found = CheckpointError(f"{self.what}: {where}{_said(error)}")
        found.__cause__ = error
        return found


def _said(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, CheckpointError | FileError | OSError) else f"{type(error).__name__}: {text}"
