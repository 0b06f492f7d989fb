"""What the parent and its processes say to each other. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Role:
    """Which process this is: ``run`` is a name from ``RUNS``; ``scratch`` a folder of this demo only."""

    run: str
    rank: int
    scratch: Path

    @property
    def store(self) -> Path:
        """The file over which the processes of the run find each other."""
        return self.scratch / f"{self.run}.store"


@dataclass(frozen=True)
class Facts:
    """What a process says of itself when it is ready; ``engine``: whose code shards its model; ``device``: its name."""

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
    """Bytes in one process after a step; ``peak``: above what was resident, or on its GPU, after the imports."""

    parameters: int
    gradients: int
    optimizer: int
    peak: int


@dataclass(frozen=True)
class Difference:
    """The largest absolute differences between two checkpoints."""

    weights: float
    optimizer: float


UNSHARDED, TORCH, FLATPARAM = RUNS = ("unsharded", "torch FSDP1", "flatparam")
