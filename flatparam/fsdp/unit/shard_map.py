"""The map of shards: which rank holds which elements of each parameter, as a list and as tables.

The map follows from the layouts, which all ranks have alike: no communication. ``Wrapper.shard_map`` calls this file.
"""

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
    """The elements of one parameter that one rank holds.

    - ``fqn``: the parameter's name in the unwrapped model.
    - ``shape``, ``dtype``: of the whole parameter.
    - ``rank``: in the group that shares the unit.
    - ``start``, ``numel``: the elements ``[start, start + numel)`` of the parameter in its memory order.
    - ``boxes``: the box cover of these elements; None if memory order is not row-major.
    - ``flat_start``: the first of these elements in the rank's shard.
    - ``trained``: whether the parameter requires grad.
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
    """A list of pieces: unit by unit, in the order of the layout, rank by rank. ``print`` shows tables."""

    def table(self, every: bool = False) -> str:
        """The map as two tables, of parameters and of ranks. ``every``: one table with a line for each piece.

        Parameters that are sharded alike, and whose names differ in numbers alone, share a line. Ranks that hold as
        many elements share a line too.
        """
        rows: list[tuple[str, ...]]
        if every:
            rows = [("parameter", "dtype", "shape", "rank", "first element", "elements", "in the shard at")]
            for one in self:
                numbers = (one.rank, f"{one.start:,}", f"{one.numel:,}", f"{one.flat_start:,}")
                rows.append((one.fqn, of_dtype(one.dtype), str(list(one.shape)), *map(str, numbers)))
            return aligned(rows, 1, 1)
        held: dict[tuple[str, Any, tuple[int, ...], bool], list[tuple[int, int]]] = {}
        on_rank: dict[int, tuple[int, int]] = {}
        for one in self:
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

    def __str__(self) -> str:
        return self.table()


def shard_map(units: Iterable[tuple[str, Unit]]) -> ShardMap:
    """List the pieces of ``units``, pairs of a unit's path in the unwrapped model and the unit."""
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
