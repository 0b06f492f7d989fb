"""How far a save or a load is, and what it came to."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

try:
    from tqdm import tqdm
except ModuleNotFoundError:  # of the extra `demo`
    tqdm = None


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

    def __init__(self, what: str, shows: bool, total: int = 0):
        self.begin = time.monotonic()
        self.bytes = 0
        self._bar: Any = None
        if shows and tqdm is not None:
            with self._while_shown():
                self._bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, leave=False)

    @contextmanager
    def _while_shown(self) -> Iterator[None]:
        """Go on without a bar where standard error is gone: the other ranks wait for this one."""
        try:
            yield
        except (OSError, ValueError):
            self._bar = None

    def expect(self, total: int) -> None:
        """Know how many bytes there will be."""
        if self._bar is not None:
            with self._while_shown():
                self._bar.total = total
                self._bar.refresh()

    def add(self, count: int) -> None:
        """So many more."""
        self.bytes += count
        if self._bar is not None:
            with self._while_shown():
                self._bar.update(count)

    def close(self) -> float:
        """The seconds that it took."""
        if self._bar is not None:
            with self._while_shown():
                self._bar.close()
        return time.monotonic() - self.begin

    @property
    def counts(self) -> Callable[[int], None]:
        """``add``, as a callback."""
        return self.add
