"""A switch of this thread: wrappers save and load without gathers. Checkpoints use it while modules show stand-ins."""

from __future__ import annotations

import threading

from ... import _C

_of_thread = threading.local()


def ungathered() -> _C.Block:
    """Return a block in which wrappers save and load as ``nn.Module`` does, under the names of the unwrapped model.

    No collective call in it. It holds for this thread alone; blocks may be nested.
    """
    before = is_ungathered()
    return _C.Block(lambda: setattr(_of_thread, "on", True), lambda: setattr(_of_thread, "on", before))


def is_ungathered() -> bool:
    return getattr(_of_thread, "on", False)
