"""Training whose ranks change: ``resize`` by a call; ``start``, ``steps``, ``survive`` when ranks are lost or join."""

from .resizing import Resized, resize
from .sampling import samples
from .training import rank, size, start, steps, survive

__all__ = ["Resized", "rank", "resize", "samples", "size", "start", "steps", "survive"]
