"""Read an existing checkpoint: open files when they are needed, and compare bytes with their checksums.

``Source`` is the interface that loads and exports use; ``Checkpoint`` reads flatparam's, `foreign.py` the others. A
source belongs to one thread. This knows no models and no ranks of the current run.
"""

import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.dense import Dense
from ..common.tensors import bytes_of, row_major
from ..fsdp.states.safetensors_files import DTYPES, Entry, open_file
from .boxes import Read, check_whole, reads_of
from .errors import CheckpointError
from .files import SUM_BYTES, Chunk
from .index import MODEL, OPTIMIZER, RANKS, Index, read_index

MOST_OPEN = 64  # at most so many files are open
Look = Callable[[Chunk, Tensor], None]  # called with elements of a box that were read


class Source:
    """An open checkpoint. ``model``, ``optimizer``: name -> boxes; ``own``: the same for the files of single ranks.

    ``index``: None for foreign files. The opener calls ``close``.
    """

    index: Index | None = None
    model: Mapping[str, list[Chunk]]
    optimizer: Mapping[str, list[Chunk]]
    own: Mapping[str, list[Chunk]] = {}
    about: Mapping[str, Any] = {}  # the index's
    alone: Mapping[str, list[Chunk]] = {}  # boxes that the loading rank saved alone: they replace the model's
    values: Mapping[str, Any] = {}  # entries of the state dict that are no tensors, for the loading rank
    digest: str  # equal on ranks that read the same checkpoint
    look: Look | None = None  # called with the elements that ``check_reads`` compares

    def entry(self, chunk: Chunk) -> Entry:
        """Open the file of ``chunk`` and return the entry. Raises: CheckpointError, FileError, OSError."""
        raise NotImplementedError

    @cached_property
    def _checked(self) -> set[tuple[str, int, int]]:
        """What was compared: (file, first byte of the box in it, number of the MiB in the box)."""
        return set()

    def check(self, chunk: Chunk, begin: int, end: int, look: Look | None) -> int:
        """Compare bytes ``[begin, end)`` of ``chunk`` with their checksums. Returns: the number of bytes read.

        Bytes that were compared before are not read again. ``look``: called with the elements. Foreign files have no
        checksums: their bytes are read only for ``look``. Raises: CheckpointError naming file and tensor, FileError,
        OSError.
        """
        if chunk.sums is None and look is None:
            return 0
        entry, done = self.entry(chunk), 0
        assert entry.dtype is not None
        total, raw = math.prod(chunk.sizes) * entry.dtype.itemsize, entry._replace(dtype=torch.uint8)
        for i in range(begin // SUM_BYTES, -(-end // SUM_BYTES)):
            mark = (chunk.file, chunk.begin, i)
            if mark in self._checked:
                continue
            first = i * SUM_BYTES
            buffer = torch.empty(min(SUM_BYTES, total - first), dtype=torch.uint8, device="cpu")
            raw.read(first, buffer)
            if chunk.sums is not None and zlib.crc32(bytes_of(buffer)) != chunk.sums[i]:
                raise CheckpointError(
                    f"{entry.path}: is damaged: bytes {chunk.begin + first} to {chunk.begin + first + len(buffer)}, of "
                    f"`{self.name_of(chunk)}`, have another checksum than when they were saved"
                )
            if look is not None:
                look(chunk, buffer.view(entry.dtype))
            self._checked.add(mark)
            done += len(buffer)
        return done

    def name_of(self, chunk: Chunk) -> str:
        """Return the name of the tensor that ``chunk`` is a box of, for messages: it goes over all boxes."""
        for tensors in (self.model, self.optimizer, self.own):
            for key, chunks in tensors.items():
                if any(one is chunk for one in chunks):
                    return key
        raise AssertionError("a chunk of no tensor")

    def fit(self, names: set[str]) -> None:
        """Tell the source the model's names: a prefix that they have too was not added by the program that saved."""

    def path_of(self, chunk: Chunk) -> Path:
        return self.entry(chunk).path

    def read(self, read: Read) -> None:
        """Read a box into ``read.out``. Raises: FileError, OSError."""
        self.entry(read.chunk).read_box(read.begin, read.out)

    def fill(self, key: str, chunks: list[Chunk], dense: Dense, start: int, out: Tensor) -> None:
        """Check and read elements of ``key`` into ``out``. Arguments: of ``reads_of``. Raises: as ``check``."""
        reads = reads_of(key, chunks, dense, start, out)
        check_reads(self, reads)
        for read in reads:
            self.read(read)

    def whole(self, key: str, chunks: list[Chunk]) -> Tensor:
        """Read a whole tensor into new host memory and compare its checksums. Raises: as ``check``."""
        check_whole(key, chunks)
        out = torch.empty(chunks[0].shape, dtype=chunks[0].torch_dtype(key), device="cpu")
        self.fill(key, chunks, Dense.of(out.shape, row_major(out.shape)), 0, out.view(-1))
        return out

    def told_of_optimizer(self) -> dict[str, Any] | None:
        """Return the index's ``optimizer`` (`index.py`), or the same form made from names; None: there is none."""
        return None if self.index is None else self.index.optimizer

    def close(self) -> None:
        """Close the files."""


class OfRank(dict[str, Tensor]):
    """A mapping from names to the tensors in the file of one rank. Each lookup reads the tensor again."""

    def __init__(self, source: Source, rank: int):
        super().__init__()
        self._source, self._file = source, f"{RANKS}/rank-{rank:05}.safetensors"

    def chunks(self, key: str) -> list[Chunk]:
        """Return the single box of ``key`` in the rank's file. Raises: CheckpointError."""
        for chunk in self._source.own.get(key, ()):
            if chunk.file == self._file:
                return [chunk]
        raise CheckpointError(f"{self._file}: has no `{key}`, which the index says is in it")

    def __missing__(self, key: str) -> Tensor:
        return self._source.whole(key, self.chunks(key))


class Checkpoint(Source):
    """A checkpoint that ``save`` has written. Raises: CheckpointError, OSError."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.index: Index = read_index(folder)
        self.about = self.index.about
        self.model = self.index.tensors.get(MODEL, {})
        self.optimizer = self.index.tensors.get(OPTIMIZER, {})
        self.own = self.index.tensors.get(RANKS, {})
        self.digest = self.index.id
        self._open: dict[str, int] = {}

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def entry(self, chunk: Chunk) -> Entry:
        """Open the file of ``chunk``, if it is not open. The entry is valid until the next file is opened.

        At ``MOST_OPEN`` open files that closes the one that was opened first, however late it was used.

        Raises: CheckpointError, if size or header differ from those that were written.
        """
        dtype = DTYPES.get(chunk.dtype)
        path = self.folder / chunk.file
        descriptor = self._open.get(chunk.file)
        if descriptor is None:
            if len(self._open) >= MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            descriptor = self._open[chunk.file] = self._open_file(path, chunk.file)
        return Entry(path, descriptor, dtype, chunk.dtype, chunk.sizes, chunk.begin)

    def _open_file(self, path: Path, name: str) -> int:
        expected, header = self.index.files[name]
        try:
            descriptor = open_file(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: is missing") from None
        try:
            size = os.fstat(descriptor).st_size
            if size != expected:
                raise CheckpointError(f"{path}: expected {expected} bytes, it has {size}")
            length = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
            if length > size or zlib.crc32(os.pread(descriptor, length, 0)) != header:
                raise CheckpointError(f"{path}: is not the file that was saved: its header has another checksum")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def refuse_not_finite(source: Source, chunk: Chunk, values: Tensor) -> None:
    """Raises: CheckpointError naming the tensor and file of ``chunk``, if a value is NaN or infinite."""
    if values.is_floating_point() and values.itemsize == 1:
        values = values.float()  # isfinite supports no one-byte dtypes
    if (values.is_floating_point() or values.is_complex()) and not bool(torch.isfinite(values).all()):
        raise CheckpointError(f"{source.path_of(chunk)}: `{source.name_of(chunk)}` has values that are not finite")


def check_reads(source: Source, reads: Iterable[Read], progress: Callable[[int], object] = lambda count: None) -> None:
    """Compare the bytes of all ``reads`` with their checksums. Raises: as ``Source.check``."""
    for read in reads:
        begin, end = read.byte_range(DTYPES[read.chunk.dtype].itemsize)
        progress(source.check(read.chunk, begin, end, source.look))
