"""Checkpoints of sharded models: each rank writes what it owns, as boxes of the original parameters.

In torch's format of distributed checkpoints in safetensors files, so that torch, and any number of ranks, reads them.
"""

from .errors import CheckpointError
from .exporting import export, verify
from .loading import Loaded, load, read_extra
from .progress import Summary
from .saving import Pending, async_save, save

__all__ = ["CheckpointError", "Loaded", "Pending", "Summary", "async_save", "export", "load", "read_extra"]
__all__ += ["save", "verify"]
