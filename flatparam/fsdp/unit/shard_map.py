"""The map of shards: every piece of every parameter on every rank, and its tables."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...common.layout import Box, boxes_of_range
from ...common.tables import aligned, merged, ranges
from ..names import join
from .printed import of_dtype
from .unit import Unit


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one parameter.

    ``fqn``: the parameter's name in the unwrapped model; ``shape``, ``dtype``: of the whole; ``rank``: in the group
    that shares the unit; ``start``, ``numel``: elements of the parameter in row-major order, or in memory order where
    it is dense but not contiguous; ``boxes``: the same as the fewest boxes, None where memory order is another;
    ``flat_start``: the first element in the rank's shard; ``trained``: whether it requires grad.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int
    start: int
    numel: int
    boxes: tuple[Box, ...] | None
    flat_start: int
    trained: bool


class ShardMap(list[Piece]):
    """Pieces, unit by unit, in the order of the layout. ``print`` shows tables."""

    def table(self, every: bool = False) -> str:
        """The map as tables, which ``print`` shows: parameters that are cut alike and whose names differ in numbers
        alone are one line, and so are ranks that hold as much. ``every``: a line for each piece instead.
        """
        return _table(self, every)

    def __str__(self) -> str:
        return self.table()


def shard_map(units: Iterable[tuple[str, Unit]]) -> ShardMap:
    """Every piece of every parameter on every rank of its group, unit by unit, in the order of the layout.

    ``units``: with the path of each in the unwrapped model. No communication.
    """
    found = ShardMap()
    for path, unit in units:
        for flat_param in unit.flat_params:
            for index, original in enumerate(flat_param.originals):
                shape = tuple(original.shape) or (1,)
                for held in flat_param.layout.ranks_of_param(index):
                    start = held.start - flat_param.layout.offsets[index]
                    boxes = tuple(boxes_of_range(shape, start, start + held.numel)) if original.contiguous else None
                    piece = Piece(
                        fqn=join(path, original.fqn),
                        shape=tuple(original.shape),
                        dtype=flat_param.flat.dtype,
                        rank=flat_param.placement.holder(held.rank),
                        start=start,
                        numel=held.numel,
                        boxes=boxes,
                        flat_start=held.offset_in_shard,
                        trained=flat_param.trains(original),
                    )
                    found.append(piece)
    return found


def _table(pieces: Iterable[Piece], every: bool) -> str:
    """A line for each parameter, or for all that differ in numbers of their names alone and are cut alike; then what
    each rank has. ``every``: a line for each piece instead.
    """
    pieces = list(pieces)
    rows: list[tuple[str, ...]]
    if every:
        rows = [("parameter", "dtype", "shape", "rank", "first element", "elements", "in the shard at")]
        for one in pieces:
            numbers = (one.rank, f"{one.start:,}", f"{one.numel:,}", f"{one.flat_start:,}")
            rows.append((one.fqn, of_dtype(one.dtype), str(list(one.shape)), *map(str, numbers)))
        return aligned(rows, 1, 1)
    held: dict[tuple[str, Any, tuple[int, ...], bool], list[tuple[int, int]]] = {}
    on_rank: dict[int, tuple[int, int]] = {}
    for one in pieces:
        held.setdefault((one.fqn, one.dtype, one.shape, one.trained), []).append((one.rank, one.numel))
        params, numel = on_rank.get(one.rank, (0, 0))
        on_rank[one.rank] = params + 1, numel + one.numel
    rows = [("parameter", "count", "dtype", "shape", "trained", "ranks", "elements on each")]
    for name, count, dtype, shape, trained, *here in merged(((*key, *here) for key, here in held.items()), False):
        sizes = sorted(numel for _, numel in here)
        each = f"{sizes[0]:,}" if sizes[0] == sizes[-1] else f"{sizes[0]:,} to {sizes[-1]:,}"
        on = ranges(rank for rank, _ in here)
        rows.append((name, count, of_dtype(dtype), str(list(shape)), "yes" if trained else "no", on, each))
    alike: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(on_rank):
        alike.setdefault(on_rank[rank], []).append(rank)
    ranks = [("ranks", "parameters on each", "elements on each")]
    ranks += [(ranges(members), f"{params:,}", f"{numel:,}") for (params, numel), members in alike.items()]
    return f"{aligned(rows, 1, 1)}\n\n{aligned(ranks, 1, 1)}"
