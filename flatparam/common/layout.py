"""The offsets of parameters and shards in one flat parameter. It has sizes and ranges, and knows no tensor.

Sizes are in elements unless a name ends in ``bytes``. Ranges are half-open, except in torch's metadata. C computes the
layout (``_C.Layout``). ``FlatLayout`` is public; the runtime, the drop-in and LayerZero use it.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from typing_extensions import Self

from .. import _C

_Part = TypeVar("_Part")
_MOST_RANKS = 2**20  # in one answer of ranks_of; more would be a mistake in the arguments


class Shard(NamedTuple):
    """A rank's shard: elements ``[start, start + numel)`` of the flat parameter, then ``padding`` more."""

    start: int
    numel: int
    padding: int


class ParamShard(NamedTuple):
    """The piece of one parameter in a rank's shard. It equals torch's tuple ``_ShardParamInfo``.

    ``offset_in_shard`` counts in the shard; ``intra_param_start_idx`` and ``intra_param_end_idx`` (inclusive) count in
    the parameter. All but ``in_shard`` are None when the shard holds nothing of the parameter.
    """

    in_shard: bool
    offset_in_shard: int | None
    numel_in_shard: int | None
    intra_param_start_idx: int | None
    intra_param_end_idx: int | None


class RankPiece(NamedTuple):
    """The piece of a range that one rank holds: elements ``[start, start + numel)`` of the flat parameter."""

    rank: int
    start: int
    numel: int
    offset_in_shard: int


class Box(NamedTuple):
    """A box of an N-D parameter: ``offsets[d] <= index[d] < offsets[d] + sizes[d]`` in each dimension ``d``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class FlatLayout(_C.Layout):
    """The offset of each parameter in a flat parameter, and each rank's shard of it. Immutable.

    Args: ``numels``: elements of each parameter in order, each >= 0 and one at least >= 1 (a 0-dim parameter has 1);
    ``world_size`` >= 1; ``itemsize``: bytes of an element; sizes in bytes must fit 64 bits; ``alignment``: parameters
    start at multiples of so many elements, and the total is a multiple of the world size; 0: neither. torch aligns to
    ``16 // itemsize`` with ``use_orig_params=True``, and to 0 without; ``blocks``: elements of each parameter that stay
    on one rank, each >= 1, or more than the parameter has for all of it. A parameter is cut between ranks only at
    multiples of its block, counted from its start, and every shard starts at a multiple of the alignment. None: torch's
    layout.
    Shapes: the unsharded flat parameter is ``[numel]``, every rank's shard ``[shard_numel]``, the output of an
    all-gather ``[padded_numel]``.
    With blocks the shards are as short as the order of the parameters allows; ``padding`` tells the cost. Two limits
    hold for a shard, with blocks counted in multiples of the alignment: max(an even split, the longest parameter) + the
    longest block; and (an even split + the longest block) rounded up to a common multiple of the blocks.
    Raises: ShardError if a size, the world size, a rank or a range is out of range; TypeError for anything but an int.
    Attributes with torch's names equal torch's. Queries about one rank or range cost O(log parameters + their result).
    Source: ``FlatParamHandle._init_flat_param_and_metadata``, ``_get_shard_metadata`` and ``_get_unpadded_shard``
    (torch 2.13).
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
        """Lay out parameters of these shapes. The shape ``()`` has one element, like ``(1,)``."""
        numels = [math.prod(shape) for shape in shapes]
        return cls(numels, world_size, itemsize=itemsize, alignment=alignment, blocks=blocks)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.numels, self.world_size, self.itemsize, self.alignment, self._blocks)

    def __repr__(self) -> str:
        return (
            f"FlatLayout({len(self.numels)} parameters, numel={self.numel}, world_size={self.world_size}, "
            f"shard_numel={self.shard_numel}, itemsize={self.itemsize}, alignment={self.alignment})"
        )

    def over(self, world_size: int) -> "FlatLayout":
        """Return the layout of the same parameters over ``world_size`` ranks."""
        return _again(self.numels, world_size, self.itemsize, self.alignment, self._blocks)

    @property
    def padding(self) -> int:
        """The number of elements of ``numel`` that are padding."""
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
        """Return the piece of each parameter in the shard of ``rank``: torch's ``_shard_param_infos``."""
        return parts_of(self, *self.shard_range(rank), ParamShard)

    def ranks_of(self, begin: int, end: int) -> list[RankPiece]:
        """Return the pieces of elements ``[begin, end)`` of the flat parameter, one a rank, in order."""
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
        """Return the pieces of parameter ``index``, one a rank, in order."""
        begin = self.offsets[index]
        return self.ranks_of(begin, begin + self.numels[index])


def parts_of(layout: _C.Layout, begin: int, end: int, kind: Callable[..., _Part]) -> tuple[_Part, ...]:
    """Return the piece of each parameter in ``[begin, end)`` of the flat parameter, as ``kind``.

    ``kind``: a class with the fields of ParamShard.
    """
    absent = kind(False, None, None, None, None)
    held = layout.params_in(begin, end)
    parts = tuple(kind(True, *part) for part in layout.parts(begin, end))
    return (absent,) * held.start + parts + (absent,) * (len(layout.numels) - held.stop)


def _again(numels: Any, world_size: int, itemsize: int, alignment: int, blocks: Any) -> FlatLayout:
    return FlatLayout(numels, world_size, itemsize=itemsize, alignment=alignment, blocks=blocks)


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return elements ``[begin, end)`` of a parameter, in row-major order, as boxes of consecutive elements.

    Each box follows the one before. There are at most ``2 * len(shape) - 1``, or 1 for a scalar.
    Raises: ShardError unless ``0 <= begin <= end <= prod(shape)``.
    """
    return [Box(*box) for box in _C.boxes_of_range(shape, begin, end)]
