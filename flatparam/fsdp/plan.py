"""What lies where, and what it takes: the map of shards, and a plan of memory before training."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ..common.layout import Box, boxes_of_range
from .memory import Flat, MemoryPlan, UnitPlan, plan_tree, plan_unit
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


def shard_map(units: Iterable[tuple[str, Unit]]) -> list[Piece]:
    """Every piece of every parameter on every rank of its group, unit by unit, in the order of the layout.

    ``units``: with the path of each in the unwrapped model. No communication.
    """
    return list(_pieces(units))


def _pieces(units: Iterable[tuple[str, Unit]]) -> Iterator[Piece]:
    for path, unit in units:
        for segment in unit.segments:
            for index, original in enumerate(segment.originals):
                shape = tuple(original.shape) or (1,)
                for held in segment.layout.ranks_of_param(index):
                    start = held.start - segment.layout.offsets[index]
                    boxes = tuple(boxes_of_range(shape, start, start + held.numel)) if original.contiguous else None
                    yield Piece(
                        fqn=f"{path}.{original.fqn}" if path else original.fqn,
                        shape=tuple(original.shape),
                        dtype=segment.flat.dtype,
                        rank=segment.placement.holder(held.rank),
                        start=start,
                        numel=held.numel,
                        boxes=boxes,
                        flat_start=held.offset_in_shard,
                        trained=segment.trains(original),
                    )


def memory_plan(units: Iterable[Unit], optimizer_bytes: int, prefetch: bool) -> MemoryPlan:
    """Plan for the units of a tree, the outermost first.

    Args: ``optimizer_bytes``: of state for each element of the shard (Adam in fp32: 8); ``prefetch``: whether a further
    unit is gathered ahead.
    """
    return plan_tree([_plan(unit, optimizer_bytes) for unit in units], prefetch)


def _plan(unit: Unit, optimizer_bytes: int) -> UnitPlan:
    flats = [Flat(s.layout, s.flat.dtype, s.compute_dtype, s.reduce_dtype, s.is_trained) for s in unit.segments]
    placement = unit.options.placement
    return plan_unit(
        unit.name,
        flats,
        placement,
        lambda dtype: optimizer_bytes,
        copy_shards=placement.param_shards if placement.copied else 0,
        nested=placement.outer is not None,
        offloads=unit.options.offload_grads,
        on_host=unit.options.device is not None,
    )
