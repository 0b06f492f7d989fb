"""Saving and loading with units that neither gather nor share what they have: their modules show stand-ins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_of_thread = threading.local()


@contextmanager
def ungathered() -> Iterator[None]:
    """Within, wrappers save and load as ``nn.Module`` does, under the names of the unwrapped model.

    No collective call. Of this thread alone.
    """
    before = is_ungathered()
    _of_thread.on = True
    try:
        yield
    finally:
        _of_thread.on = before


def is_ungathered() -> bool:
    return getattr(_of_thread, "on", False)
