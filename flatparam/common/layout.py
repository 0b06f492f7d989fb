"""Where parameters and shards lie in one flat parameter: sizes and ranges, no tensors.

All sizes are in elements unless a name ends in ``bytes``; ranges are half-open unless torch's metadata is meant.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from typing_extensions import Self

from .. import _C

_Part = TypeVar("_Part")
_MOST_RANKS = 2**20  # that hold a range; more would be a mistake in the arguments


class Shard(NamedTuple):
    """A rank's shard: elements ``[start, start + numel)`` of the flat parameter, then ``padding`` more."""

    start: int
    numel: int
    padding: int


class ParamShard(NamedTuple):
    """What a rank's shard holds of one parameter; equal to the tuple that torch calls ``_ShardParamInfo``.

    ``offset_in_shard`` counts in the shard; ``intra_param_start_idx`` and ``intra_param_end_idx`` (inclusive) count in
    the parameter. All but ``in_shard`` are None when the shard holds nothing of the parameter.
    """

    in_shard: bool
    offset_in_shard: int | None
    numel_in_shard: int | None
    intra_param_start_idx: int | None
    intra_param_end_idx: int | None


class RankPiece(NamedTuple):
    """The part of a range that one rank holds: ``numel`` elements from ``start`` (in the flat parameter) on."""

    rank: int
    start: int
    numel: int
    offset_in_shard: int


class Box(NamedTuple):
    """A box of an N-D parameter: ``offsets[d] <= index[d] < offsets[d] + sizes[d]`` in each dimension ``d``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class FlatLayout(_C.Layout):
    """Where each parameter lies in a flat parameter, and each rank's shard of it.

    Args: ``numels``: elements of each parameter in order, each >= 0 and one at least >= 1 (a 0-dim parameter has 1);
    ``world_size`` >= 1; ``itemsize``: bytes of an element, with which no size may pass 64 bits; ``alignment``:
    parameters start at multiples of so many elements, and the total is a multiple of the world size; 0: neither. torch
    aligns to ``16 // itemsize`` with ``use_orig_params=True``, and to 0 without; ``blocks``: elements of each parameter
    that stay on one rank, each >= 1 (all of it, if it has no more): a parameter is cut between ranks only at multiples
    of its block, counted from its start, and every shard starts at a multiple of the alignment; None: as torch does.
    Shapes: the unsharded flat parameter is ``[numel]``, every rank's shard ``[shard_numel]``, what an all-gather fills
    ``[padded_numel]``.
    With blocks the shards are as short as the order of the parameters allows; ``padding`` tells what it costs. A shard
    is no longer than an even split, or the longest parameter, and one longest block; nor than an even split and one
    longest block, rounded up to a common multiple of the blocks (blocks counted in multiples of the alignment).
    Raises: ShardError when a size, the world size, a rank or a range is out of range; TypeError for what is no int.
    Source: ``FlatParamHandle._init_flat_param_and_metadata``, ``_get_shard_metadata`` and ``_get_unpadded_shard``
    (torch 2.13), of which the attributes with torch's names are equal. Queries about one rank or range cost
    O(log parameters + what they return).
    """

    __slots__ = ("_blocks",)
    _blocks: tuple[int, ...] | None

    def __new__(
        cls,
        numels: Iterable[int],
        world_size: int,
        *,
        itemsize: int = 1,
        alignment: int = 0,
        blocks: Iterable[int] | None = None,
    ) -> Self:
        given = None if blocks is None else tuple(blocks)
        self = super().__new__(cls, numels, world_size, itemsize, alignment if given is None else alignment or 1, given)
        self._blocks = given
        return self

    @classmethod
    def of_shapes(
        cls,
        shapes: Iterable[Sequence[int]],
        world_size: int,
        *,
        itemsize: int = 1,
        alignment: int = 0,
        blocks: Iterable[int] | None = None,
    ) -> Self:
        """Lay out parameters of these shapes; the shape ``()`` has one element, as ``(1,)`` has."""
        numels = [math.prod(shape) for shape in shapes]
        return cls(numels, world_size, itemsize=itemsize, alignment=alignment, blocks=blocks)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.numels, self.world_size, self.itemsize, self.alignment, self._blocks)

    def __repr__(self) -> str:
        return (
            f"FlatLayout({len(self.numels)} parameters, numel={self.numel}, world_size={self.world_size}, "
            f"shard_numel={self.shard_numel}, itemsize={self.itemsize}, alignment={self.alignment})"
        )

    @property
    def padding(self) -> int:
        """How many elements of ``numel`` are padding."""
        return self.numel - self.numel_params

    @property
    def shard_bytes(self) -> int:
        """Bytes of every rank's shard."""
        return self.shard_numel * self.itemsize

    def shard(self, rank: int) -> Shard:
        """Return the shard of ``rank``."""
        begin, end = self.shard_range(rank)
        start, stop = min(begin, self.numel), min(end, self.numel)
        return Shard(start, stop - start, end - begin - (stop - start))

    def param_shards(self, rank: int) -> tuple[ParamShard, ...]:
        """Return what ``rank`` holds of each parameter: torch's ``_shard_param_infos``."""
        return parts_of(self, *self.shard_range(rank), ParamShard)

    def ranks_of(self, begin: int, end: int) -> list[RankPiece]:
        """Return which ranks hold elements ``[begin, end)`` of the flat parameter in order."""
        begin, end, size = operator.index(begin), operator.index(end), self.shard_numel
        ranks = range(begin // size, -(-end // size)) if begin < end else range(0)
        if not 0 <= begin <= end <= self.numel or len(ranks) > _MOST_RANKS:
            raise _C.ShardError(
                f"expected 0 <= begin <= end <= {self.numel}, and a range over at most {_MOST_RANKS} ranks, got begin "
                f"{begin}, end {end}"
            )
        starts = [max(begin, rank * size) for rank in ranks]
        ends = [min(end, (rank + 1) * size) for rank in ranks]
        pieces = zip(ranks, starts, ends, strict=True)
        return [RankPiece(rank, start, stop - start, start - rank * size) for rank, start, stop in pieces]

    def ranks_of_param(self, index: int) -> list[RankPiece]:
        """Return which ranks hold elements of a parameter, in order."""
        begin = self.offsets[index]
        return self.ranks_of(begin, begin + self.numels[index])


def parts_of(layout: _C.Layout, begin: int, end: int, kind: Callable[..., _Part]) -> tuple[_Part, ...]:
    """What ``[begin, end)`` of the flat parameter holds of each parameter; ``kind`` has the fields of ParamShard."""
    absent = kind(False, None, None, None, None)
    held = layout.params_in(begin, end)
    parts = tuple(kind(True, *part) for part in layout.parts(begin, end))
    return (absent,) * held.start + parts + (absent,) * (len(layout.numels) - held.stop)


def _again(numels: Any, world_size: int, itemsize: int, alignment: int, blocks: Any) -> FlatLayout:
    return FlatLayout(numels, world_size, itemsize=itemsize, alignment=alignment, blocks=blocks)


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return elements ``[begin, end)`` of a parameter, in row-major order, as disjoint boxes that tile them exactly.

    They are the fewest for ranges that cross up to three dimensions, and almost always beyond; in order of their first
    element, at most ``2 * len(shape) - 1``. Raises ShardError unless ``0 <= begin <= end <= prod(shape)``.
    """
    return [Box(*box) for box in _C.boxes_of_range(shape, begin, end)]
