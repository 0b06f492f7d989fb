"""Boxes that this rank wants, out of boxes that files have: intersections, and reading them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..common.dense import Dense
from ..common.layout import Box
from ..common.tensors import row_major, span_of
from .errors import CheckpointError
from .files import Chunk


class Read(NamedTuple):
    """A box to be read from a file: ``begin``, in elements of the chunk, and ``out``, where it goes."""

    chunk: Chunk
    begin: int
    out: Tensor

    def byte_range(self, itemsize: int) -> tuple[int, int]:
        """Of the chunk, from its first element to its last."""
        end = self.begin + span_of(self.out.shape, row_major(self.chunk.sizes))
        return self.begin * itemsize, end * itemsize


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
    found = []
    for box in dense.boxes(start, start + flat.numel()):
        for chunk in chunks:
            both = intersection(box, chunk.offsets, chunk.sizes)
            if both is not None:
                places = zip(both.offsets, chunk.offsets, row_major(chunk.sizes), strict=True)
                begin = sum((at - first) * stride for at, first, stride in places)
                found.append(Read(chunk, begin, dense.view(flat, start, both)))
    count = sum(read.out.numel() for read in found)
    if count != flat.numel():
        raise CheckpointError(
            f"`{key}`: the files have {count} of the {flat.numel()} elements from {start} on that are wanted"
        )
    return found


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
