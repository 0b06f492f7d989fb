"""What may happen to a simulated rank, and when: a fault is a kind, a rank and a point.

A point of the seams is where a rank's first thread calls the store or a collective, sleeps, or waits for a lock, from
the moment on at which it has its process group. A point of user code is a call of ``user_code()`` by the program.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HEARTBEAT = 10.0  # the default of FLATPARAM_HEARTBEAT

# kind: its number in universe.hpp; None: it is one of user code
KINDS: dict[str, int | None] = {
    "is killed": 0,
    "is stopped": 1,
    "is late": 1,
    "is interrupted in a wait": 2,
    "is interrupted": 3,
    "is out of memory": 4,
    "raises in user code": None,
    "has fewer batches": None,
}


class UserError(ValueError):
    """What user code raises."""


class Finished(BaseException):
    """Ends a rank that has fewer batches than the others."""


@dataclass(frozen=True)
class Fault:
    """``seconds``: for how long the rank is stopped, or late."""

    kind: str
    rank: int
    point: int
    seconds: float = 0.0

    def native(self) -> tuple[int, int, int, int] | None:
        """Return the fault as universe.hpp has it; None: it is one of user code."""
        kind = KINDS[self.kind]
        return None if kind is None else (kind, self.rank, self.point, int(self.seconds * 1e9))

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.3f} s" if self.seconds else ""
        return f"rank {self.rank} {self.kind}{lasts} at its point {self.point}"


def draw(
    seed: int, size: int, number: int, points: tuple[int, int], kinds: Sequence[str] = tuple(KINDS)
) -> list[Fault]:
    """Return ``number`` faults of ``kinds`` on different ranks. ``points``: of the seams and of user code, a rank."""
    chosen = random.Random(f"faults of {seed}")
    found = []
    for rank in chosen.sample(range(size), min(number, size)):
        kind = chosen.choice(kinds)
        seconds = 0.0
        if kind == "is late":
            seconds = chosen.choice([0.01, 0.5, 2.0, HEARTBEAT]) * chosen.uniform(0.5, 0.99)
        elif kind == "is stopped":
            seconds = HEARTBEAT * chosen.choice([1.5, 3.0, 6.0])
        found.append(Fault(kind, rank, chosen.randrange(points[KINDS[kind] is None]), seconds))
    return found


here = threading.local()  # of a simulated rank: its function ``come_to_user_code``


def user_code() -> None:
    """A program calls this where user code runs: in the loop, in a hook. Faults of user code strike here."""
    come: Callable[[], None] | None = getattr(here, "come_to_user_code", None)
    if come is not None:
        come()
