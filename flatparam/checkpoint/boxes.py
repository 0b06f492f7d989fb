"""Plan the reads of a rank: parts of boxes in files. Check that the boxes of a tensor cover each element once.

Arithmetic only: no file is opened here. A box has the tensor's dimensions; elements in a box are row-major.
"""

import math
from collections.abc import Iterable, Sequence
from operator import mul
from typing import NamedTuple

from torch import Tensor

from ..common.dense import Dense
from ..common.layout import Box
from ..common.tensors import row_major, span_of
from .errors import CheckpointError
from .files import Chunk


class Read(NamedTuple):
    """One read: the box of ``out``'s shape whose first element is element ``begin`` of ``chunk``, into ``out``."""

    chunk: Chunk
    begin: int
    out: Tensor

    def byte_range(self, itemsize: int) -> tuple[int, int]:
        """Return the bytes ``[begin, end)`` of the chunk, from the first element of this read to its last."""
        end = self.begin + span_of(self.out.shape, row_major(self.chunk.sizes))
        return self.begin * itemsize, end * itemsize


def intersection(box: Box, offsets: Sequence[int], sizes: Sequence[int]) -> Box | None:
    """Return the box that ``box`` and the other one share; None: they share nothing."""
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
    """Return the reads that fill ``flat`` with elements ``[start, start + flat.numel())`` of ``key``.

    ``dense``: the memory order of ``key`` in the model, in which the elements are numbered. Raises: CheckpointError
    unless ``chunks`` have each element. (``check_whole`` has refused overlaps.)
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


def lies_in(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether the box at ``offsets`` of ``sizes`` lies in a tensor of ``shape``."""
    fits = len(shape) == len(offsets) == len(sizes)
    return fits and all(at + size <= end for at, size, end in zip(offsets, sizes, shape, strict=True))


def check_whole(key: str, chunks: Sequence[Chunk]) -> None:
    """Raises: CheckpointError unless ``chunks`` have one shape and dtype and cover that shape without an overlap.

    Each box lies in its shape: those who read its offsets and sizes from a file have checked it.
    """
    first = chunks[0]
    for chunk in chunks:
        if chunk.shape != first.shape or chunk.dtype != first.dtype:
            raise CheckpointError(
                f"{chunk.file}: `{key}` has shape {chunk.shape} and dtype {chunk.dtype}, in {first.file} "
                f"{first.shape} and {first.dtype}"
            )
    twice = _overlap([chunk for chunk in chunks if 0 not in chunk.sizes])
    if twice is not None:
        raise CheckpointError(
            f"`{key}` of shape {first.shape} has elements twice in the files: at {twice[0].offsets} in {twice[0].file} "
            f"and at {twice[1].offsets} in {twice[1].file}"
        )
    found = sum(math.prod(chunk.sizes) for chunk in chunks)
    if found != math.prod(first.shape):
        raise CheckpointError(f"`{key}` of shape {first.shape} has {found} elements in the files")


def _overlap(chunks: list[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Return two of ``chunks`` that share elements; None: no two do.

    A sweep over the elements, which are numbered with the dimension outermost that has most offsets.
    """
    if len(chunks) < 2:
        return None
    strides, numel = [0] * len(chunks[0].shape), 1
    for d in sorted(range(len(strides)), key=lambda d: len({chunk.offsets[d] for chunk in chunks})):
        strides[d], numel = numel, numel * chunks[0].shape[d]
    here: list[tuple[int, Chunk]] = []  # (number of its last element, box) for boxes that reach the current element
    for begin, i in sorted((sum(map(mul, chunk.offsets, strides)), i) for i, chunk in enumerate(chunks)):
        chunk = chunks[i]
        here = [(last, one) for last, one in here if last >= begin]
        for _, one in here:
            if intersection(Box(one.offsets, one.sizes), chunk.offsets, chunk.sizes) is not None:
                return one, chunk
        here.append((begin + sum(map(mul, chunk.sizes, strides)) - sum(strides), chunk))
    return None
