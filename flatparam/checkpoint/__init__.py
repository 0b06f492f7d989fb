"""Checkpoints of sharded models: each rank writes the boxes of original parameters that lie in its shards.

The format is torch's distributed checkpoint in safetensors files, and an index. torch can read it, and so can any
number of ranks with any wrapping. Ranks agree through the store of the process group and issue no collective, so
``async_save`` writes in a thread beside training. The calls themselves are like collectives: all ranks make them in one
order, so one thread of each rank makes them.
"""

from .errors import CheckpointError
from .exporting import export, verify
from .loading import Loaded, load, read_extra
from .progress import Summary
from .saving import Pending, async_save, save

__all__ = ["CheckpointError", "Loaded", "Pending", "Summary", "async_save", "export", "load", "read_extra"]
__all__ += ["save", "verify"]
