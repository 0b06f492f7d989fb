"""Training whose ranks change: ``resize`` by a call, ``start``, ``steps`` and ``survive`` when ranks are lost or join.

The names are imported when they are first used: ``python -m flatparam.elastic`` must not import the runtime.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .resizing import Resized, resize
    from .training import rank, samples, size, start, steps, survive

__all__ = ["Resized", "rank", "resize", "samples", "size", "start", "steps", "survive"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(".resizing" if name in ("Resized", "resize") else ".training", __name__), name)
    globals()[name] = found
    return found
