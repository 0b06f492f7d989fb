"""Progress bars and summaries of saves, loads and exports."""

import contextlib
import sys
import time
import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn

try:
    from tqdm import tqdm
except ModuleNotFoundError:  # it comes with the extra `demo`
    tqdm = None

# model -> the second of the last save or load that has succeeded on this rank, and its path
_newest: weakref.WeakKeyDictionary[nn.Module, tuple[float, str]] = weakref.WeakKeyDictionary()
_GONE = (OSError, ValueError)  # raised if standard error is closed


@dataclass(frozen=True)
class Summary:
    """The result of a save, load or export. ``bytes``: of all ranks; ``own_bytes``: of this one.

    ``id``: the checkpoint's; None for foreign files. ``seconds``: from the call to its end; of a save without the plan.
    """

    path: str
    id: str | None
    bytes: int
    own_bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.bytes / max(self.seconds, 1e-9) / 1e9
        return f"{self.path}: {self.bytes / 1e9:.3f} GB in {self.seconds:.2f} s ({rate:.2f} GB/s)"


class Meter:
    """Counts bytes and time. ``shows``: also show a bar on standard error, if ``tqdm`` is installed."""

    def __init__(self, what: str, shows: bool):
        self.begin = time.monotonic()
        self.bytes = 0
        self._bar: Any = None
        if shows and tqdm is not None:
            with contextlib.suppress(*_GONE):
                self._bar = tqdm(total=0, desc=what, unit="B", unit_scale=True, file=sys.stderr, leave=False)

    def _show(self, change: str, *arguments: int) -> None:
        """Update the bar. If standard error is closed, go on without one: other ranks wait for this one."""
        if self._bar is not None:
            try:
                getattr(self._bar, change)(*arguments)
            except _GONE:
                self._bar = None

    def expect(self, total: int) -> None:
        """Set the number of bytes at the end of the bar."""
        self._show("reset", total)

    def add(self, count: int) -> None:
        """Count ``count`` more bytes."""
        self.bytes += count
        self._show("update", count)

    def close(self) -> float:
        """Remove the bar. Returns: seconds since the meter was made."""
        self._show("close")
        return time.monotonic() - self.begin


def note_newest(model: nn.Module | None, path: str) -> None:
    """Note that ``model`` was saved to ``path`` or loaded from it now. None: it is gone."""
    if model is not None:
        _newest[model] = (time.time(), path)


def newest_of(model: nn.Module) -> tuple[float, str] | None:
    """Return when this rank has last saved or loaded ``model``, in seconds of the clock, and the path; None: never."""
    return _newest.get(model)
