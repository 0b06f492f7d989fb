"""Saving and loading with units that neither gather nor share what they have: their modules show stand-ins."""

from __future__ import annotations

import threading

from ... import _C

_of_thread = threading.local()


def ungathered() -> _C.Block:
    """Within, wrappers save and load as ``nn.Module`` does, under the names of the unwrapped model.

    No collective call. Of this thread alone.
    """
    before = is_ungathered()
    return _C.Block(lambda: setattr(_of_thread, "on", True), lambda: setattr(_of_thread, "on", before))


def is_ungathered() -> bool:
    return getattr(_of_thread, "on", False)
