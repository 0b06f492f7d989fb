"""What lies where, and what it takes: the map of shards, and a plan of memory before training."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..layout import Box, boxes_of_range
from .unit import Segment, Unit


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
                        rank=held.rank,
                        start=start,
                        numel=held.numel,
                        boxes=boxes,
                        flat_start=held.offset_in_shard,
                        trained=segment.trains(original),
                    )


@dataclass(frozen=True)
class UnitPlan:
    """Bytes that one unit takes on each rank.

    ``shard``: always; ``gradient``: of the shard, from backward to ``zero_grad``; ``optimizer``: from the first step;
    ``full``: its unsharded parameters, while it is full; ``always_full``: whether they stay; ``resharded``: freed
    between forward and backward; ``unpacked``: what autograd gives for its parameters; ``wire``: the same packed, while
    it is reduced, and ``reduced``: into this, where it is not in place; ``kept``: the unsharded gradient between
    micro-batches in ``no_sync``.
    """

    name: str
    shard: int
    gradient: int
    optimizer: int
    full: int
    always_full: bool
    resharded: bool
    unpacked: int
    wire: int
    reduced: int
    kept: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a rank holds for parameters, gradients and optimizer state; activations and the module's own buffers
    come on top.

    ``between_steps``: after the first optimizer step, without gradients; ``peak``: the most at any moment of a synced
    forward and backward, whose units run in the order of ``modules()``; ``no_sync``: what micro-batches in ``no_sync``
    add to it.
    """

    units: tuple[UnitPlan, ...]
    between_steps: int
    peak: int
    no_sync: int


def memory_plan(units: Iterable[Unit], optimizer_bytes: int, prefetch: bool) -> MemoryPlan:
    """Plan for the units of a tree, the outermost first.

    Args: ``optimizer_bytes``: of state for each element of the shard (Adam in fp32: 8); ``prefetch``: whether a further
    unit is gathered ahead.
    """
    plans = tuple(_plan(unit, optimizer_bytes) for unit in units)
    state = sum(plan.shard + plan.optimizer for plan in plans)
    always = sum(plan.full for plan in plans if plan.always_full)
    return MemoryPlan(
        units=plans,
        between_steps=state + always,
        peak=state + always + _peak_of_a_step(plans, prefetch),
        no_sync=sum(plan.kept for plan in plans),
    )


def _peak_of_a_step(plans: tuple[UnitPlan, ...], prefetch: bool) -> int:
    """The most that a forward and backward hold at once beside what is always there; units run in order, root first."""
    full = [0 if plan.always_full else plan.full for plan in plans]
    stay = [full[0], *(0 if plan.resharded else own for plan, own in zip(plans[1:], full[1:], strict=True))]
    moments = [sum(stay)]
    for i in range(1, len(plans)):  # forward: what stays, this unit, and the next one if it was gathered ahead
        ahead = full[i + 1] if prefetch and i + 1 < len(plans) and plans[i + 1].resharded else 0
        moments.append(sum(stay[:i]) + full[i] + ahead)
    reduced = sum(plan.gradient for plan in plans)  # an earlier backward's, to which this one's are added
    reducing = 0
    for i in range(len(plans) - 1, -1, -1):  # backward
        plan = plans[i]
        ahead = full[i - 1] if prefetch and i > 1 and plans[i - 1].resharded else 0
        others = sum(stay[:i]) + ahead + reduced
        moments.append(others + full[i] + plan.unpacked + reducing)
        moments.append(others + plan.unpacked + plan.wire + plan.reduced + reducing)
        reducing = plan.wire + plan.reduced
    return max(moments)


def _plan(unit: Unit, optimizer_bytes: int) -> UnitPlan:
    def total(of: Any) -> int:
        return sum(of(segment) for segment in unit.segments)

    placement = unit.options.placement

    def bytes_of(numel: int, dtype: torch.dtype | None, segment: Segment) -> int:
        return numel * (dtype or segment.flat.dtype).itemsize

    def full(segment: Segment) -> int:
        borrowed = placement.shards == 1 and segment.compute_dtype in (None, segment.flat.dtype)
        return 0 if borrowed else bytes_of(segment.layout.padded_numel, segment.compute_dtype, segment)

    def wire(segment: Segment) -> int:
        dtype = segment.reduce_dtype or segment.compute_dtype
        return bytes_of(segment.layout.padded_numel, dtype, segment) if segment.is_trained else 0

    return UnitPlan(
        name=unit.name,
        shard=total(lambda s: bytes_of(s.layout.shard_numel, None, s)),
        gradient=total(lambda s: bytes_of(s.layout.shard_numel, None, s) if s.is_trained else 0),
        optimizer=total(lambda s: s.layout.shard_numel * optimizer_bytes if s.is_trained else 0),
        full=total(full),
        always_full=placement.stays_full,
        resharded=placement.reshard_after_forward,
        unpacked=total(lambda s: bytes_of(s.layout.numel, s.compute_dtype, s) if s.is_trained else 0),
        wire=total(wire),
        reduced=total(lambda s: wire(s) // placement.shards if placement.shards > 1 else 0),
        kept=total(lambda s: bytes_of(s.layout.padded_numel, None, s) if s.is_trained else 0),
    )
