"""Checkpoints of others: safetensors files, and torch's distributed checkpoints, in safetensors or behind a pickle."""

from __future__ import annotations

from pathlib import Path

from ..fsdp.safetensors_files import Entry, Files
from .errors import CheckpointError
from .files import Chunk
from .reading import Source


def open_foreign(path: Path, trusted: bool) -> Source:
    """What is at ``path``. Raises: CheckpointError for what is no checkpoint, FileError, OSError."""
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder")
    return WholeFiles(path)


class WholeFiles(Source):
    """Safetensors files that have each tensor whole, without checksums."""

    def __init__(self, path: Path):
        self._files = Files(path)
        self.optimizer = {}
        self.digest = self._files.digest
        self.model = {
            name: [Chunk(name, e.dtype_name, e.shape, (0,) * len(e.shape), e.shape, e.begin)]
            for name, e in self._files.entries.items()
        }

    def entry(self, chunk: Chunk) -> Entry:
        return self._files.entries[chunk.file]

    def close(self) -> None:
        self._files.close()
