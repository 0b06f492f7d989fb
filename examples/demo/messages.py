"""The messages between the parent and its processes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Role:
    """The place of a process in the demo. ``run``: a name from ``RUNS``; ``scratch``: a folder of this demo alone."""

    run: str
    rank: int
    scratch: Path

    @property
    def store(self) -> Path:
        """The file of the store of the run's process group."""
        return self.scratch / f"{self.run}.store"


@dataclass(frozen=True)
class Facts:
    """The first answer of a process. ``engine``: the code that shards its model; ``device``: the name of its device."""

    torch: str
    threads: int
    weights: int
    run: str
    engine: str
    device: str


@dataclass(frozen=True)
class Block:
    """Some steps in a row: for each, the loss of each share of the batch that this process computed, and the time."""

    losses: list[list[float]]
    seconds: list[float]


@dataclass(frozen=True)
class Memory:
    """Bytes in one process after a step; ``peak``: the most that torch allocated on its GPU, None on a CPU."""

    parameters: int
    gradients: int
    optimizer: int
    peak: int | None


@dataclass(frozen=True)
class Difference:
    """The largest absolute differences between two checkpoints."""

    weights: float
    optimizer: float


UNSHARDED, TORCH, FLATPARAM = RUNS = ("unsharded", "torch FSDP1", "flatparam")
