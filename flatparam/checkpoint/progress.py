"""How far a save or a load is, and what it came to."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from typing import Any

try:
    from tqdm import tqdm
except ModuleNotFoundError:  # of the extra `demo`
    tqdm = None

_GONE = (OSError, ValueError)  # what is raised where standard error is closed


@dataclass(frozen=True)
class Summary:
    """What was moved. ``bytes``: by all ranks; ``own_bytes``: by this one; ``seconds``: from the call to its end."""

    path: str
    id: str | None
    bytes: int
    own_bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.bytes / max(self.seconds, 1e-9) / 1e9
        return f"{self.path}: {self.bytes / 1e9:.3f} GB in {self.seconds:.2f} s ({rate:.2f} GB/s)"


class Meter:
    """Counts bytes; shows a bar on standard error if asked, as long as that is there, if ``tqdm`` is installed."""

    def __init__(self, what: str, shows: bool):
        self.begin = time.monotonic()
        self.bytes = 0
        self._bar: Any = None
        if shows and tqdm is not None:
            with contextlib.suppress(*_GONE):
                self._bar = tqdm(total=0, desc=what, unit="B", unit_scale=True, file=sys.stderr, leave=False)

    def _show(self, change: str, *arguments: int) -> None:
        """Go on without a bar where standard error is gone: the other ranks wait for this one."""
        if self._bar is not None:
            try:
                getattr(self._bar, change)(*arguments)
            except _GONE:
                self._bar = None

    def expect(self, total: int) -> None:
        """Know how many bytes there will be."""
        self._show("reset", total)

    def add(self, count: int) -> None:
        """So many more."""
        self.bytes += count
        self._show("update", count)

    def close(self) -> float:
        """The seconds that it took."""
        self._show("close")
        return time.monotonic() - self.begin
