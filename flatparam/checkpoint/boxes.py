"""Plan the reads of a rank: parts of boxes in files. Check that the boxes of a tensor cover each element once.

The plans of a load call this, and ``elastic/transport.py`` for boxes in memory. Arithmetic only: no file is opened
here. A box has the tensor's dimensions; elements in a box are row-major.
"""

import functools
import math
from collections.abc import Sequence
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


def reads_of(key: str, chunks: Sequence[Chunk], dense: Dense, start: int, flat: Tensor) -> list[Read]:
    """Return the reads that fill ``flat`` with elements ``[start, start + flat.numel())`` of ``key``.

    ``dense``: the memory order of ``key`` in the model, in which the elements are numbered. Raises: CheckpointError
    unless ``chunks`` have each element. (``check_whole`` has refused overlaps.)
    """
    count, cuts = _cuts(_places(chunks), dense, start, flat.numel())
    if count != flat.numel():
        raise CheckpointError(
            f"`{key}`: the files have {count} of the {flat.numel()} elements from {start} on that are wanted"
        )
    return [Read(chunks[i], begin, dense.view(flat, start, both)) for i, begin, both in cuts]


_Places = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # offsets and sizes of boxes


def _places(chunks: Sequence[Chunk]) -> _Places:
    return tuple((chunk.offsets, chunk.sizes) for chunk in chunks)


# Cached: layers of a model are cut alike, and so are a parameter and its states, so many calls have the same arguments
@functools.lru_cache(maxsize=128)
def _cuts(places: _Places, dense: Dense, start: int, numel: int) -> tuple[int, list[tuple[int, int, Box]]]:
    """Return how many of the elements ``[start, start + numel)`` boxes have, and the parts of boxes that have them.

    A part: number of the box, its first element there, and where it lies in the tensor.
    """
    found = []
    for box in dense.boxes(start, start + numel):
        for i, (offsets, sizes) in enumerate(places):
            both = intersection(box, offsets, sizes)
            if both is not None:
                steps = zip(both.offsets, offsets, row_major(sizes), strict=True)
                found.append((i, sum((at - first) * stride for at, first, stride in steps), both))
    return sum(math.prod(both.sizes) for *_, both in found), found


def lies_in(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether the box at ``offsets`` of ``sizes`` lies in a tensor of ``shape``."""
    fits = len(shape) == len(offsets) == len(sizes)
    return fits and all(at + size <= end for at, size, end in zip(offsets, sizes, shape, strict=True))


def check_whole(key: str, chunks: Sequence[Chunk]) -> None:
    """Raises: CheckpointError unless ``chunks`` have one shape and dtype and cover that shape without an overlap.

    Each box lies in its shape: the code that reads offsets and sizes from a file has checked it.
    """
    first = chunks[0]
    for chunk in chunks:
        if chunk.shape != first.shape or chunk.dtype != first.dtype:
            raise CheckpointError(
                f"{chunk.file}: `{key}` has shape {chunk.shape} and dtype {chunk.dtype}, in {first.file} "
                f"{first.shape} and {first.dtype}"
            )
    twice, found = _covered(_places(chunks), first.shape)
    if twice is not None:
        one, other = (chunks[i] for i in twice)
        raise CheckpointError(
            f"`{key}` of shape {first.shape} has elements twice in the files: at {one.offsets} in {one.file} and at "
            f"{other.offsets} in {other.file}"
        )
    if found != math.prod(first.shape):
        raise CheckpointError(f"`{key}` of shape {first.shape} has {found} elements in the files")


@functools.lru_cache(maxsize=128)
def _covered(places: _Places, shape: tuple[int, ...]) -> tuple[tuple[int, int] | None, int]:
    """Return the numbers of two boxes that share elements, None if no two do, and the number of elements in all.

    A sweep over the elements, which are numbered with the dimension outermost that has most offsets.
    """
    strides, numel = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: len({offsets[d] for offsets, _ in places})):
        strides[d], numel = numel, numel * shape[d]
    here: list[tuple[int, int]] = []  # (number of its last element, box) for boxes that reach the current element
    filled = ((sum(map(mul, offsets, strides)), i) for i, (offsets, sizes) in enumerate(places) if 0 not in sizes)
    found = sum(math.prod(sizes) for _, sizes in places)
    for begin, i in sorted(filled):
        offsets, sizes = places[i]
        here = [(last, one) for last, one in here if last >= begin]
        for _, one in here:
            if intersection(Box(*places[one]), offsets, sizes) is not None:
                return (one, i), found
        here.append((begin + sum(map(mul, sizes, strides)) - sum(strides), i))
    return None, found


def forget_cuts() -> None:
    """Empty the caches of ``_cuts`` and ``_covered``: with a thousand ranks they may take 130 MiB."""
    _cuts.cache_clear()
    _covered.cache_clear()
