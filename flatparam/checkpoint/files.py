"""Write one safetensors file of boxes of tensors, as torch's distributed checkpoint does, with checksums of them.

A file has at most one box of each name: torch's reader expects that. The header has the offsets of the boxes, under
torch's names. `saving.py` and `exporting.py` call this, in any thread; no rank knows of the others here.
"""

import contextlib
import ctypes
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from ..common.tensors import bytes_of
from ..fsdp.states.safetensors_files import DTYPES, PACKED
from .errors import CheckpointError

SUM_BYTES = 2**20  # each checksum covers so many bytes of a box
RUN_BYTES = 2**24  # copy at most so many bytes to the host at once, and let the disk begin after so many
_SYNC_FILE_RANGE_WRITE = 2
_start_writing = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Part(NamedTuple):
    """A box to be written. ``shape``: of the whole tensor; ``offsets``: of the box in it; ``tensor``: any strides."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @classmethod
    def whole(cls, key: str, tensor: Tensor) -> Self:
        """Return all of ``tensor`` as one box."""
        return cls(key, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


@dataclass(slots=True)
class Chunk:
    """A box of a tensor in a file. ``begin``: its first byte in the file; ``sums``: a crc32 for each MiB, or None."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    sums: list[int] | None = None

    def torch_dtype(self, key: str) -> torch.dtype:
        """Return ``dtype`` as torch's. Raises: CheckpointError naming tensor ``key``, if torch does not know it."""
        found = DTYPES.get(self.dtype)
        if found is None:
            raise CheckpointError(f"{self.file}: `{key}` has dtype {self.dtype}, which torch has not")
        return found

    def as_json(self) -> list[Any]:
        """Return all fields but the file's name."""
        return [self.dtype, self.shape, self.offsets, self.sizes, self.begin, self.sums]


def write_file(
    folder: Path,
    name: str,
    parts: Sequence[Part],
    progress: Callable[[int], object],
    values: Callable[[Part], Tensor] = lambda part: part.tensor,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Write ``parts`` to ``folder / name`` and sync the file. ``progress`` is called with numbers of bytes.

    ``values``: returns the tensor of a part when its turn comes; the part itself may have a meta tensor.
    ``metadata``: entries of the header beside those of torch's distributed checkpoints.
    Returns: the index's entry for the file: its size in bytes, the crc32 of its header, and the boxes in it.
    Raises: CheckpointError for a name that the format reserves, or that two parts have, before the file is made;
    OSError. A file that could not be written to its end is left there: the caller removes its folder. The caller has
    checked the dtypes.
    """
    parts = sorted(parts, key=lambda part: -part.tensor.itemsize)
    chunks: dict[str, Chunk] = {}
    at = 0
    for part in parts:
        if part.key == "__metadata__":
            raise CheckpointError("`__metadata__` is no name for a tensor in a safetensors file: rename it")
        if part.key in chunks:
            raise CheckpointError(f"two tensors named `{part.key}` for {name}, which can have one: rename one of them")
        chunks[part.key] = Chunk(name, NAMES[part.tensor.dtype], part.shape, part.offsets, tuple(part.tensor.shape), at)
        at += part.tensor.nbytes
    header = _header(parts, chunks, metadata)
    for chunk in chunks.values():
        chunk.begin += len(header)
    with naming(folder / name), open(folder / name, "wb", buffering=0) as file:
        _write(file.fileno(), memoryview(header))
        waiting = 0
        for part in parts:
            chunks[part.key].sums = _write_box(file.fileno(), values(part), progress)
            waiting += part.tensor.nbytes
            if waiting >= RUN_BYTES and _start_writing is not None:  # the disk writes while the CPU sums the next parts
                _start_writing(file.fileno(), ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)
                waiting = 0
        os.fsync(file.fileno())
    tensors = {key: chunk.as_json() for key, chunk in chunks.items()}
    return {"bytes": at + len(header), "header": zlib.crc32(header), "tensors": tensors}


def _header(parts: Sequence[Part], chunks: dict[str, Chunk], metadata: Mapping[str, str]) -> bytes:
    places = {part.key: {"saved_offsets": list(part.offsets)} for part in parts}
    told: dict[str, Any] = {
        "__metadata__": {**metadata, **{"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}}
    }
    for part in parts:
        chunk = chunks[part.key]
        end = chunk.begin + part.tensor.nbytes
        sizes = chunk.sizes
        if chunk.dtype == PACKED:
            sizes = (*sizes[:-1], 2 * sizes[-1]) if sizes else (2,)
        told[part.key] = {"dtype": chunk.dtype, "shape": sizes, "data_offsets": [chunk.begin, end]}
    text = json.dumps(told).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _write_box(descriptor: int, tensor: Tensor, progress: Callable[[int], object]) -> list[int]:
    sums, summed, left = [], 0, SUM_BYTES
    for run in _runs(tensor):
        memory = bytes_of(run)
        while memory:
            piece, memory = memory[:left], memory[left:]
            _write(descriptor, piece)
            summed, left = zlib.crc32(piece, summed), left - len(piece)
            progress(len(piece))
            if left == 0:
                sums.append(summed)
                summed, left = 0, SUM_BYTES
    return sums if left == SUM_BYTES else [*sums, summed]


def _runs(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in row-major order as contiguous host tensors: the tensor itself, or copies of a few MiB."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_cpu and tensor.is_contiguous():
        yield tensor
    elif tensor.nbytes <= RUN_BYTES:
        yield tensor.cpu().contiguous()
    else:
        d = next(d for d, size in enumerate(tensor.shape) if size > 1)
        step = max(1, tensor.shape[d] * RUN_BYTES // tensor.nbytes)
        for i in range(0, tensor.shape[d], step):
            yield from _runs(tensor.narrow(d, i, min(step, tensor.shape[d] - i)))


def _write(descriptor: int, memory: memoryview) -> None:
    while memory:
        memory = memory[os.write(descriptor, memory) :]


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put ``path`` into an OSError of the block that names no file (a full disk)."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Sync the directory ``folder``, so that the names in it survive a crash. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
