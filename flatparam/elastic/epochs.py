"""The epochs of an elastic job: which processes are its ranks now. Decided in the job's store, which survives ranks.

The session of each rank (``training.py``) and its launcher (``__main__.py``) use this.

An epoch is one world of ranks. When a rank is lost, or a process asks to join, one of the ranks decides the next epoch:
the first to write it wins, and all follow. A process is a member: ``slot.life``, where a slot is torchrun's rank, and
``life`` counts the processes that it has had.

| key | written by | meaning |
|---|---|---|
| ``epoch/N`` | the first to decide | the members of epoch N, and why it began |
| ``here/N/MEMBER`` | that member | it has come to epoch N, with which ``settings`` |
| ``ended/MEMBER`` | its launcher | it was killed or replaced, and why |
| ``told`` | the first rank | the last epoch whose reason was printed |
| ``asks``, ``ask/I`` | a new process | it asks to join |
| ``left/MEMBER`` | that member | it has come to the end of the loop |
| ``done`` | a rank, or the launcher of one that has ended with status 0 | the job has ended well |
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..fsdp.desync.liveness import heartbeat
from ..fsdp.desync.stores import Store, connect
from ..fsdp.errors import StateError

MEMBER = "FLATPARAM_ELASTIC_MEMBER"  # environment variable: the training process's name as a member, "slot.life"
REPLACED = 76  # exit status of a training process that others took for lost
PATIENCE = 3.0  # seconds beyond the heartbeat for a member to come to a new epoch
_SAYING = 2.0  # seconds for a process to write its name, after it has counted itself among those that ask to join


def store_of_job(serves: bool = False) -> Store:
    """Return the job's store. An agent of torchrun keeps it when it starts its workers again; each start has own keys.

    ``serves``: this process runs it. Raises: StoreGoneError.
    """
    store = connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), serves)
    return store.below(f"flatparam start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")


class Epoch(NamedTuple):
    """``members``: in the order of their ranks. ``asks``: how many asks to join were decided, in it and before it."""

    number: int
    members: list[str]
    asks: int = 0
    reason: str = ""


class Replaced(SystemExit):
    """This process was taken for lost, and the job goes on without it. Ends it with the status ``REPLACED``."""

    code = REPLACED


def _read(number: int, said: str) -> Epoch:
    epoch = Epoch(number, *json.loads(said))
    if not epoch.members:
        raise StateError(epoch.reason)
    return epoch


class Epochs:
    """The epochs in ``store``, seen by the member ``me``.

    ``time_out``: seconds for all members to come to epoch 0. If one does not, the next has no members, which ends the
    job. ``settings``: in words, which all members must have alike. Methods raise StoreGoneError, and StateError for
    that end.
    """

    def __init__(self, store: Store, me: str, time_out: float = math.inf, settings: str = ""):
        self._store, self.me, self._time_out = store.below("flatparam elastic"), me, time_out
        self.settings = settings
        self._asked = math.inf  # the number of the ask of this process

    def first(self, slots: int) -> Epoch:
        """Return epoch 0, the first life of each slot."""
        return Epoch(0, [f"{slot}.0" for slot in range(slots)])

    def after(self, epoch: Epoch) -> Epoch | None:
        """Return the newest epoch after ``epoch``, if there is one."""
        found = None
        while later := self._next(epoch):
            found = epoch = later
        return found

    def _next(self, epoch: Epoch) -> Epoch | None:
        said = self._store.value_at(f"epoch/{epoch.number + 1}")
        return _read(epoch.number + 1, said) if said else None

    def drops(self, slots: int) -> Iterator[Epoch | None]:
        """Yield None until an epoch has dropped this process, and then that epoch."""
        epoch = self.first(slots)
        while (later := self._next(epoch)) is None or self.me in later.members or self.me not in epoch.members:
            if later is None:
                yield None
            epoch = later or epoch
        yield later

    def _decide(self, epoch: Epoch, members: Iterable[str], asks: int, reason: str) -> Epoch:
        """Decide that ``members`` are the epoch after ``epoch``. If another rank was first, return its decision."""
        wanted = json.dumps([sorted(members, key=lambda one: [int(part) for part in one.split(".")]), asks, reason])
        return _read(epoch.number + 1, self._store.compare_set(f"epoch/{epoch.number + 1}", "", wanted))

    def meet(self, epoch: Epoch) -> Epoch:
        """Wait until all members of ``epoch`` have come. Return it, or a later one if a member does not come.

        Raises: Replaced if this process is no member; StateError on all ranks if one does not come to epoch 0 in time,
        or has other ``settings``.
        """
        if self.me not in epoch.members:
            text = f"flatparam.elastic: {self.me} was replaced in epoch {epoch.number}: {epoch.reason}"
            print(text, file=sys.stderr, flush=True)  # Python prints nothing for a SystemExit
            raise Replaced(text)
        self._store.set(f"here/{epoch.number}/{self.me}", self.settings)
        begin = time.monotonic()
        while absent := [one for one in epoch.members if not self._store.check([f"here/{epoch.number}/{one}"])]:
            if later := self.after(epoch):
                return self.meet(later)
            patience = (heartbeat() or math.inf) + PATIENCE if epoch.number else self._time_out
            is_late = time.monotonic() - begin > patience
            if is_late and epoch.number == 0:
                ranks = [epoch.members.index(one) for one in absent]
                text = (
                    f"elastic.start: of {len(epoch.members)} ranks the ranks {ranks} have not come within "
                    f"{self._time_out:g} s: find out why they have not called it, or give it a longer `timeout`"
                )
                return self.meet(self._decide(epoch, [], 0, text))
            if lost := absent if is_late else self.ended(absent):
                return self.meet(self.without(epoch, lost))
            time.sleep(0.02)
        said = self._store.values_at([f"here/{epoch.number}/{one}" for one in epoch.members])
        if other := next((rank for rank, one in enumerate(said) if one != said[0]), None):
            got = f"got {said[0]} on rank 0 and {said[other]} on rank {other}"
            raise StateError(f"elastic.start: expected the same arguments on all ranks, {got}")
        return epoch

    def without(self, epoch: Epoch, lost: list[str]) -> Epoch:
        """Decide that the job goes on without the members ``lost``."""
        reason = "; ".join(self.why_ended(one) or f"{one} does not answer" for one in lost) or "its world has failed"
        return self._decide(epoch, (one for one in epoch.members if one not in lost), epoch.asks, reason)

    def reasons(self, epoch: Epoch) -> str:
        """Return why ``epoch`` began, and the epochs after the last call on any rank: no world of theirs has stood."""
        told = int(self._store.value_at("told") or "0")
        self._store.set("told", str(epoch.number))
        keys = [f"epoch/{number}" for number in range(told + 1, epoch.number + 1)]
        return "; ".join(dict.fromkeys(json.loads(said)[2] for said in self._store.values_at(keys)))

    def end(self, member: str, why: str) -> None:
        """Say ``why`` the process of ``member`` has ended: it was killed or replaced."""
        self._store.set(f"ended/{member}", why)

    def why_ended(self, member: str) -> str:
        """Return why the process of ``member`` has ended; empty: its launcher has not said that it has ended."""
        return self._store.value_at(f"ended/{member}")

    def ended(self, members: Iterable[str]) -> list[str]:
        """Return those of ``members`` whose process has ended, as their launchers say."""
        return [one for one in members if self.why_ended(one)]

    def ask(self) -> None:
        """Ask to join."""
        self._asked = self._store.add("asks", 1)
        self._store.set(f"ask/{self._asked}", self.me)

    def asks(self) -> int:
        """Return how many processes have asked to join so far."""
        return self._store.add("asks", 0)

    def grown(self, epoch: Epoch, asks: int) -> Epoch:
        """Decide that the processes of the asks up to number ``asks`` join. All ranks give the same ``asks``.

        A process takes the place of the one before in its slot. One whose name comes late asks again.
        """
        keys = [f"ask/{i}" for i in range(epoch.asks + 1, asks + 1)]
        end = time.monotonic() + _SAYING
        while not self._store.check(keys) and time.monotonic() < end:
            time.sleep(0.01)
        joiners = [name for name in map(self._store.value_at, keys) if name]
        of_slot = {one.split(".")[0]: one for one in [*epoch.members, *joiners]}
        return self._decide(epoch, of_slot.values(), asks, f"{', '.join(joiners)} joined")

    def wait_to_join(self, slots: int) -> Epoch | None:
        """Wait until this process is a member, and return its epoch; None: the job has ended.

        It asks again if its name came late. A process that has not asked waits for the end of the job.
        Raises: StateError if all members were killed.
        """
        epoch = self.first(slots)
        while not self.wait_for_end(0.05):
            epoch = self.after(epoch) or epoch
            if self.me in epoch.members:
                return epoch
            if epoch.asks >= self._asked:
                self.ask()  # it said its name too late
            if len(self.ended(epoch.members)) == len(epoch.members):
                raise StateError("flatparam.elastic: all ranks were killed: start again from the newest checkpoint")
        return None

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until the job has ended well, at most for ``seconds``. Returns: whether it has."""
        end = time.monotonic() + seconds
        while not (is_done := self._store.check(["done"])) and time.monotonic() < end:
            time.sleep(min(0.05, seconds))
        return is_done

    def leave(self) -> None:
        """Say that this process has come to the end of the loop."""
        self._store.set(f"left/{self.me}", "")

    def has_left(self) -> bool:
        """Whether a process of this member has called ``leave``. The launcher asks it."""
        return self._store.check([f"left/{self.me}"])

    def finish(self) -> None:
        """Say that the job has ended well."""
        self._store.set("done", "")
