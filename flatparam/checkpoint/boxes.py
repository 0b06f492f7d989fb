"""Boxes that this rank wants, out of boxes that files have: intersections, and reading them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.dense import Dense
from ..common.layout import Box
from ..common.tensors import row_major
from ..fsdp.safetensors_files import Entry
from .errors import CheckpointError
from .files import Chunk

SLAB_BYTES = 2**22  # read at once where a box is no run of the file


class Read(NamedTuple):
    """A box to be read from a file: ``begin``, in elements of the chunk, and ``out``, where it goes."""

    chunk: Chunk
    begin: int
    out: Tensor

    @property
    def span(self) -> int:
        """Elements of the chunk from the first to the last."""
        strides = row_major(self.chunk.sizes)
        return 1 + sum((size - 1) * stride for size, stride in zip(self.out.shape, strides, strict=True))

    def byte_range(self, itemsize: int) -> tuple[int, int]:
        """Of the chunk."""
        return self.begin * itemsize, (self.begin + self.span) * itemsize


def intersection(box: Box, offsets: Sequence[int], sizes: Sequence[int]) -> Box | None:
    """What is in both; None: nothing."""
    lower, extent = [], []
    for low, size, other, other_size in zip(box.offsets, box.sizes, offsets, sizes, strict=True):
        begin = low if low > other else other
        end = min(low + size, other + other_size)
        if end <= begin:
            return None
        lower.append(begin)
        extent.append(end - begin)
    return Box(tuple(lower), tuple(extent))


def reads_of(key: str, chunks: Iterable[Chunk], dense: Dense, start: int, flat: Tensor) -> list[Read]:
    """How elements ``[start, start + flat.numel())`` of ``key`` are read into ``flat``.

    Raises: CheckpointError unless ``chunks`` have each of them once.
    """
    found = list(_reads(chunks, dense, start, flat))
    count = sum(read.out.numel() for read in found)
    if count != flat.numel():
        raise CheckpointError(
            f"`{key}`: the files have {count} of the {flat.numel()} elements from {start} on that are wanted"
        )
    return found


def _reads(chunks: Iterable[Chunk], dense: Dense, start: int, flat: Tensor) -> Iterator[Read]:
    for box in dense.boxes(start, start + flat.numel()):
        for chunk in chunks:
            both = intersection(box, chunk.offsets, chunk.sizes)
            if both is not None:
                strides = row_major(chunk.sizes)
                places = zip(both.offsets, chunk.offsets, strides, strict=True)
                begin = sum((at - first) * stride for at, first, stride in places)
                yield Read(chunk, begin, dense.view(flat, start, both))


def read_box(entry: Entry, read: Read) -> None:
    """Do it. Raises: FileError, OSError."""
    _read(entry, row_major(read.chunk.sizes), read.begin, read.out)


def _read(entry: Entry, strides: tuple[int, ...], begin: int, out: Tensor) -> None:
    span = 1 + sum((size - 1) * stride for size, stride in zip(out.shape, strides, strict=True))
    if span == out.numel() and out.is_contiguous():
        entry.read(begin, out.view(-1))
        return
    if span * out.itemsize <= SLAB_BYTES:
        buffer = torch.empty(span, dtype=out.dtype, device="cpu")
        entry.read(begin, buffer)
        out.copy_(buffer.as_strided(out.shape, strides))
        return
    d = next(d for d, size in enumerate(out.shape) if size > 1)
    step = max(1, SLAB_BYTES // (strides[d] * out.itemsize))
    for i in range(0, out.shape[d], step):
        _read(entry, strides, begin + i * strides[d], out.narrow(d, i, min(step, out.shape[d] - i)))


def check_whole(key: str, chunks: Sequence[Chunk]) -> None:
    """Raises: CheckpointError unless ``chunks`` are of one shape and dtype, and have as many elements as that."""
    first = chunks[0]
    for chunk in chunks:
        if (chunk.shape, chunk.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{chunk.file}: `{key}` has shape {chunk.shape} and dtype {chunk.dtype}, in {first.file} "
                f"{first.shape} and {first.dtype}"
            )
    for chunk in chunks:
        if any(at + size > end for at, size, end in zip(chunk.offsets, chunk.sizes, chunk.shape, strict=True)):
            raise CheckpointError(
                f"{chunk.file}: `{key}` of shape {chunk.shape} has a box at {chunk.offsets} of sizes {chunk.sizes}"
            )
    twice = _overlap([chunk for chunk in chunks if math.prod(chunk.sizes)])
    if twice is not None:
        raise CheckpointError(
            f"`{key}` of shape {first.shape} has elements twice in the files: at {twice[0].offsets} in {twice[0].file} "
            f"and at {twice[1].offsets} in {twice[1].file}"
        )
    found = sum(math.prod(chunk.sizes) for chunk in chunks)
    if found != math.prod(first.shape):
        raise CheckpointError(f"`{key}` of shape {first.shape} has {found} elements in the files")


def _overlap(chunks: list[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two of ``chunks`` that share elements, if there are any."""
    if len(chunks) < 2 or not chunks[0].shape:
        return (chunks[0], chunks[1]) if len(chunks) > 1 else None
    d = max(range(len(chunks[0].shape)), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
    here: list[Chunk] = []  # those that reach to where the sweep along d is
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[d]):
        here = [one for one in here if one.offsets[d] + one.sizes[d] > chunk.offsets[d]]
        for one in here:
            if intersection(Box(one.offsets, one.sizes), chunk.offsets, chunk.sizes) is not None:
                return one, chunk
        here.append(chunk)
    return None
