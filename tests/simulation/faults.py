"""What may happen to a simulated rank, and when: a fault is a kind, a rank and a point.

A point of the seams is where a rank's first thread calls the store or a collective, sleeps, or waits for a lock, from
the moment on at which it has its process group. A point of user code is a call of ``user_code()`` by the program. A
point of the disk is where a thread of the rank makes, writes, syncs, renames or removes a file or a folder.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HEARTBEAT = 10.0  # the default of FLATPARAM_HEARTBEAT

SEAMS, USER, DISK = range(3)  # places of points

# kind: the place of its points, and its number in universe.hpp; -1: it is one of user code
KINDS: dict[str, tuple[int, int]] = {
    "is killed": (SEAMS, 0),
    "is stopped": (SEAMS, 1),
    "is late": (SEAMS, 1),
    "is interrupted in a wait": (SEAMS, 2),
    "is interrupted": (SEAMS, 3),
    "is out of memory": (SEAMS, 4),
    "raises in user code": (USER, -1),
    "has fewer batches": (USER, -1),
    "finds the disk full": (DISK, 5),
    "is killed in a write": (DISK, 6),
}


def kinds_of(*places: int) -> list[str]:
    """Return the kinds of faults that strike at points of ``places``."""
    return [kind for kind, (place, _) in KINDS.items() if place in places]


# Faults that the other ranks are told of. In a Python that is no shared library, as Debian's, the executable's
# PyErr_CheckSignals() comes before that of seams.c, so no wait is interrupted.
LOSSES = [kind for kind in kinds_of(SEAMS, USER) if kind != "is late"]
if "libpython" not in Path("/proc/self/maps").read_text():
    LOSSES.remove("is interrupted in a wait")


class UserError(ValueError):
    """What user code raises."""


class Finished(BaseException):
    """Ends a rank that has fewer batches than the others."""


@dataclass(frozen=True)
class Fault:
    """``seconds``: for how long the rank is stopped, or late; or until it goes on, if it catches what it raises."""

    kind: str
    rank: int
    point: int
    seconds: float = 0.0

    def native(self) -> tuple[int, int, int, int] | None:
        """Return the fault as universe.hpp has it; None: it is one of user code."""
        place, number = KINDS[self.kind]
        return None if place == USER else (number, self.rank, self.point, int(self.seconds * 1e9))

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.3f} s" if self.seconds else ""
        return f"rank {self.rank} {self.kind}{lasts} at its point {self.point}"


def draw(seed: int, size: int, number: int, points: Sequence[int], kinds: Sequence[str] | None = None) -> list[Fault]:
    """Return ``number`` faults on different ranks.

    ``points``: of a rank, by place: the seams, user code and the disk, or the first two; ``kinds``: None: all that
    strike at these.
    """
    kinds = kinds_of(*range(len(points))) if kinds is None else kinds
    chosen = random.Random(f"faults of {seed}")
    found = []
    for rank in chosen.sample(range(size), min(number, size)):
        kind = chosen.choice(kinds)
        seconds = 0.0
        if kind == "is late":
            seconds = chosen.choice([0.01, 0.5, 2.0, HEARTBEAT]) * chosen.uniform(0.5, 0.99)
        elif kind == "is stopped":
            seconds = HEARTBEAT * chosen.choice([1.5, 3.0, 6.0])
        found.append(Fault(kind, rank, chosen.randrange(points[KINDS[kind][0]]), seconds))
    return found


coming: list[Callable[[], None]] = []  # what simulated ranks do where user code runs


def user_code() -> None:
    """A program calls this where user code runs: in the loop, in a hook. Faults of user code strike here."""
    for come in coming:
        come()
