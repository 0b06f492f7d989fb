"""Compute before training how many bytes a rank will hold.

The plan follows from layouts, dtypes and a placement: no tensor is read, and no process group is asked. Activations,
buffers of modules and rounding by the allocator are not in it. ``Wrapper.memory_plan``, ``inspect`` and ``advise`` call
this file. All sizes are bytes on one rank, unless a comment says otherwise.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...common.layout import FlatLayout
from ...common.tables import aligned, human, merged
from ..sharding.placement import Placement, Row
from .unit import Unit


class Flat(NamedTuple):
    """One flat parameter.

    ``dtype``: of its shard; ``compute_dtype``: of the unsharded data, None: ``dtype``; ``reduce_dtype``: of the
    gradient while it is reduced, None: that of the unsharded data; ``is_trained``: whether it has a gradient.
    """

    layout: FlatLayout
    dtype: torch.dtype
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    is_trained: bool


@dataclass(frozen=True)
class UnitPlan:
    """Bytes that one unit takes on each rank, and when.

    - ``shard``: always.
    - ``gradient``: of the shard, from backward to ``zero_grad``.
    - ``optimizer``: its state, from the first step.
    - ``full``: the unsharded parameters, while the unit is unsharded.
    - ``always_full``: whether ``full`` stays between steps.
    - ``resharded``: whether ``full`` is freed between forward and backward.
    - ``unpacked``: the gradients of the parameters, as autograd makes them.
    - ``wire``: the packed gradients, while they are reduced.
    - ``reduced``: the output of the reduction; 0 if it is in place.
    - ``kept``: the accumulated gradient, between micro-batches in ``no_sync``.
    - ``padding``: in the shards of all ranks together.
    - ``copy``: the secondary shard, during a step.
    - ``halfway``: input and output of the second reduction (over replicas, or over the outer group).
    - ``converted``: ``gradient``, if its dtype is another than that of ``reduced``.
    - ``copied``: whether ``unpacked`` is freed before ``reduced`` is allocated.
    - ``reduces_each``: whether each micro-batch in ``no_sync`` has ``wire`` and ``reduced`` too.
    - ``offloads``: whether ``kept`` lies in host memory, except for up to three units at a time.
    - ``on_host``: whether ``shard``, ``gradient`` and ``optimizer`` lie in host memory.
    """

    name: str
    shard: int = 0
    gradient: int = 0
    optimizer: int = 0
    full: int = 0
    always_full: bool = False
    resharded: bool = False
    unpacked: int = 0
    wire: int = 0
    reduced: int = 0
    kept: int = 0
    padding: int = 0
    copy: int = 0
    halfway: int = 0
    converted: int = 0
    copied: bool = False
    reduces_each: bool = False
    offloads: bool = False
    on_host: bool = False


_NO_UNIT = UnitPlan("")


class Moment(NamedTuple):
    """``bytes`` on a rank while ``phase`` (forward, backward or reduce) of the unit with index ``unit`` runs."""

    unit: int
    phase: str
    bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a rank holds on its device for parameters, gradients and optimizer state.

    - ``units``: in the order of their forwards, the root first.
    - ``between_steps``: after the first optimizer step, without gradients.
    - ``moments``: of a synced forward and backward that adds to the gradients of an earlier backward.
    - ``peak``: the most at any of the ``moments``.
    - ``peak_alone``: the peak if the gradients were cleared before.
    - ``peak_no_sync``: the peak if, after clearing, micro-batches in ``no_sync`` came first.
    - ``no_sync``: the accumulated gradients of these micro-batches.
    - ``host``: bytes in host memory, if something is offloaded to it.

    ``print`` shows a table.
    """

    units: tuple[UnitPlan, ...]
    between_steps: int
    peak: int
    no_sync: int
    moments: tuple[Moment, ...]
    peak_alone: int = 0
    peak_no_sync: int = 0
    host: int = 0

    def table(self, every: bool = False) -> str:
        """The plan as a table. Units with equal sizes, whose names differ in numbers alone, share a line.

        ``every``: each unit has a line.
        """
        return _table(self, every)

    def __str__(self) -> str:
        return self.table()


def _wire_dtype(flat: Flat) -> torch.dtype:
    return flat.reduce_dtype or flat.compute_dtype or flat.dtype


def _wire(flat: Flat) -> int:
    return flat.layout.padded_numel * _wire_dtype(flat).itemsize if flat.is_trained else 0


def plan_unit(
    name: str,
    flats: Sequence[Flat],
    spread: Placement | Row,
    optimizer_bytes: Callable[[torch.dtype], int],
    *,
    copy_shards: int = 0,
    nested: bool = False,
    offloads: bool = False,
    on_host: bool = False,
) -> UnitPlan:
    """The plan of a unit with the flat parameters ``flats``.

    - ``spread``: its placement, or a row of the table of strategies.
    - ``optimizer_bytes``: maps the dtype of a shard to bytes of state for each element (Adam in fp32: 8).
    - ``copy_shards``: the number of ranks that share the secondary shard, 0: there is none.
    - ``nested``: whether the accumulated gradient is sharded over these ranks too.
    - ``offloads``: whether the accumulated gradient lies in host memory between micro-batches.
    - ``on_host``: whether the shards lie in host memory.
    """

    def total(of: Callable[[Flat], int]) -> int:
        return sum(map(of, flats))

    def full(flat: Flat) -> int:
        if spread.optim is None and flat.compute_dtype in (None, flat.dtype) and not on_host:
            return 0  # the shard is the whole parameter, and is used as it is
        return flat.layout.padded_numel * (flat.compute_dtype or flat.dtype).itemsize

    def of_gradients(numel: Callable[[Flat], int], dtype: Callable[[Flat], torch.dtype]) -> int:
        return total(lambda flat: numel(flat) * dtype(flat).itemsize if flat.is_trained else 0)

    def reduced(flat: Flat) -> int:
        into = copy_shards if nested and copy_shards else flat.layout.world_size
        return _wire(flat) // into if into > 1 else 0

    def halfway(flat: Flat) -> int:
        last = _wire(flat) // flat.layout.world_size if nested and copy_shards else 0
        return reduced(flat) + last if last or spread.replicate is not None else 0

    return UnitPlan(
        name=name,
        shard=total(lambda flat: flat.layout.shard_numel * flat.dtype.itemsize),
        gradient=of_gradients(lambda flat: flat.layout.shard_numel, lambda flat: flat.dtype),
        optimizer=total(lambda f: f.layout.shard_numel * optimizer_bytes(f.dtype) if f.is_trained else 0),
        full=total(full),
        always_full=spread.param is None and spread.optim is not None,
        resharded=spread.reshard_after_forward,
        unpacked=of_gradients(lambda flat: sum(flat.layout.numels), lambda flat: flat.compute_dtype or flat.dtype),
        wire=total(_wire),
        reduced=total(reduced),
        kept=of_gradients(
            lambda flat: flat.layout.padded_numel // (copy_shards if nested and copy_shards else 1),
            lambda flat: torch.float32 if flat.dtype.itemsize < 4 else flat.dtype,
        ),
        padding=total(lambda f: (f.layout.padded_numel - sum(f.layout.numels)) * f.dtype.itemsize),
        copy=total(full) // copy_shards if copy_shards else 0,
        halfway=total(halfway),
        converted=of_gradients(
            lambda flat: flat.layout.shard_numel if _wire_dtype(flat) != flat.dtype else 0, lambda flat: flat.dtype
        ),
        copied=bool(copy_shards) or (spread.param is None and spread.optim is not None),
        reduces_each=nested,
        offloads=offloads,
        on_host=on_host,
    )


def plan_tree(units: Iterable[UnitPlan], prefetch: bool, gathers_ahead: bool = False) -> MemoryPlan:
    """The plan of a tree. ``units``: in the order of their forwards, the root first.

    ``prefetch``: whether one unit is gathered ahead in forward and backward; ``gathers_ahead``: whether forward gathers
    ahead in any case, as on an accelerator.
    """
    plans = tuple(units)
    here = [plan for plan in plans if not plan.on_host]
    there = [plan for plan in plans if plan.on_host]
    base = sum(plan.shard + plan.optimizer for plan in here) + sum(plan.full for plan in plans if plan.always_full)
    copies = sum(plan.copy for plan in plans)
    moments = tuple(
        Moment(unit, phase, base + copies + more)
        for unit, phase, more in _moments(plans, prefetch, prefetch or gathers_ahead)
    )
    kept = [0 if plan.offloads else plan.kept for plan in plans]
    added_to_coming_going = sum(sorted(plan.kept for plan in plans if plan.offloads)[-3:])

    def most(kept: list[int] | None) -> int:
        return base + copies + max(_cleared(plans, kept, prefetch, prefetch or gathers_ahead), default=0)

    return MemoryPlan(
        units=plans,
        between_steps=base,
        peak=max((moment.bytes for moment in moments), default=base),
        no_sync=sum(kept) + added_to_coming_going,
        moments=moments,
        peak_alone=most(None),
        peak_no_sync=most(kept),
        host=sum(plan.shard + plan.optimizer + 2 * plan.gradient for plan in there)  # 2: a new one is added to it
        + sum(plan.kept for plan in plans if plan.offloads),
    )


def _forward(
    plans: tuple[UnitPlan, ...], full: list[int], stay: list[int], gathers_ahead: bool
) -> Iterator[tuple[int, int]]:
    """Yield the index and the unsharded bytes in the forward of each unit except the root.

    Unsharded are the units before that stay so, the unit itself, and the next unit if it is gathered ahead.
    """
    staying = _sums(stay)
    for i in range(1, len(plans)):
        gathers = gathers_ahead and i + 1 < len(plans) and plans[i + 1].resharded
        ahead = full[i + 1] + _arriving(plans[i + 1]) if gathers else 0
        yield i, staying[i] + full[i] + (ahead or _arriving(plans[i]))


def _arriving(plan: UnitPlan) -> int:
    """The copy of a shard from host memory: it is on the device until the all-gather has ended."""
    return plan.shard if plan.on_host else 0


def _sizes(plans: tuple[UnitPlan, ...]) -> tuple[list[int], list[int]]:
    """Two lists, one item a unit: bytes while it is unsharded, and bytes between its forward and its backward.

    Both are 0 for a unit that is always unsharded: ``plan_tree`` counts it as always there.
    """
    full = [0 if plan.always_full else plan.full for plan in plans]
    return full, [full[0], *(0 if plan.resharded else own for plan, own in zip(plans[1:], full[1:], strict=True))]


class _Backward(NamedTuple):
    """Bytes during the backward of the unit with index ``unit``, without gradients of an earlier backward.

    - ``runs``: while it computes.
    - ``packs``: while its gradients are packed, without its ``wire``.
    - ``ends``: while its gradients are reduced, without its ``wire``.
    - ``reducing``: ``wire`` and ``reduced`` of the unit before, whose reduction still runs.
    - ``beside``: ``reducing``, and the buffers of the reductions that end meanwhile.
    - ``reduced``: the gradients of the units whose reductions have ended.
    """

    unit: int
    runs: int
    packs: int
    ends: int
    reducing: int
    beside: int
    reduced: int


def _backward(
    plans: tuple[UnitPlan, ...], full: list[int], stay: list[int], prefetch: bool, cleared: bool
) -> Iterator[_Backward]:
    """Yield one item a unit, the last unit first. ``cleared``: whether gradients were cleared before."""
    is_reduced_twice = any(plan.halfway for plan in plans)
    staying, gradients = _sums(stay), _gradients(plans)
    for i in range(len(plans) - 1, -1, -1):
        plan = plans[i]
        last, before, first = (plans[i + k] if i + k < len(plans) else _NO_UNIT for k in (1, 2, 3))
        gathers = prefetch and i > 1 and plans[i - 1].resharded
        always = staying[i] + (full[i - 1] if gathers else 0)
        ends, leaves = (before, first) if is_reduced_twice else (last, before)
        freed = 0 if ends.halfway or not ends.reduced else ends.wire
        into = plan.reduced + (max(0, ends.converted - freed) if cleared or ends.on_host else 0)
        reducing = last.wire + last.reduced
        yield _Backward(
            unit=i,
            runs=always + full[i] + max(plan.unpacked, _arriving(plans[i - 1]) if gathers else 0),
            packs=always + plan.unpacked,
            ends=always + (max(plan.unpacked, into) if plan.copied else plan.unpacked + into),
            reducing=reducing,
            beside=reducing + before.halfway + (leaves.gradient if leaves.on_host else 0),
            reduced=gradients[-1] - gradients[min(i + (3 if is_reduced_twice else 2), len(plans))],
        )


def _sums(values: Iterable[int]) -> list[int]:
    """The sums of the first 0, 1, 2, ... values."""
    return list(itertools.accumulate(values, initial=0))


def _gradients(plans: Sequence[UnitPlan]) -> list[int]:
    """``_sums`` of the gradients of shards on the device."""
    return _sums(0 if plan.on_host else plan.gradient for plan in plans)


def _moments(plans: tuple[UnitPlan, ...], prefetch: bool, gathers_ahead: bool) -> Iterator[Moment]:
    """Yield the moments of a forward and backward, without the bytes that are always there.

    Units run in their order, and the root around all others. Gradients are added to those of an earlier backward.
    """
    if not plans:
        return
    full, stay = _sizes(plans)
    for i, size in _forward(plans, full, stay, gathers_ahead):
        yield Moment(i, "forward", size)
    yield Moment(0, "forward", sum(stay))
    reduced = _gradients(plans)[-1]  # of the earlier backward
    for now in _backward(plans, full, stay, prefetch, cleared=False):
        yield Moment(now.unit, "backward", reduced + now.beside + now.runs)
        yield Moment(now.unit, "reduce", reduced + now.beside + now.ends + plans[now.unit].wire)


def _cleared(plans: tuple[UnitPlan, ...], kept: list[int] | None, prefetch: bool, gathers_ahead: bool) -> Iterator[int]:
    """Yield the bytes of the moments if gradients were cleared before, without the bytes that are always there.

    ``kept``: the accumulated gradient of each unit, if micro-batches in ``no_sync`` come first; None: there are none.
    In these micro-batches, units that are not resharded stay unsharded. The last backward reduces the accumulated
    gradients, in place if they have the dtype of the wire, and they become gradients of shards.
    """
    if not plans:
        return
    full, stay = _sizes(plans)
    held = kept or [0] * len(plans)
    staying, holding = _sums(stay), _sums(held)
    for i, size in _forward(plans, full, stay, gathers_ahead):
        yield size + holding[-1] + (staying[-1] - staying[i + 1] if kept else 0)
    for now in _backward(plans, full, stay, prefetch, cleared=True):
        i, plan = now.unit, plans[now.unit]
        # accumulated gradients of host memory that are on the device now, to be added to or copied back
        near = sum(one.kept for one in plans[max(i - 1, 0) : i + 1] if kept and one.offloads)
        if kept:
            others = staying[-1] - staying[i + 1] + holding[-1] + near + (now.reducing if plan.reduces_each else 0)
            yield others + now.runs
            if plan.reduces_each:
                yield others + now.ends + plan.wire
        unreduced = holding[min(i + (2 if plan.reduces_each else 1), len(held))] + near
        others = unreduced + now.beside + now.reduced
        wire = 0 if kept and plan.kept == plan.wire else plan.wire
        yield others + now.runs
        yield others + now.packs + wire
        yield others + now.ends + wire - (held[i] if wire and not plan.reduces_each else 0)  # kept was cast into wire


def plan_of_unit(name: str, unit: Unit, optimizer_bytes: int) -> UnitPlan:
    """The plan of an existing unit. ``optimizer_bytes``: bytes of state for each element of its shard."""
    flats = [Flat(s.layout, s.flat.dtype, s.compute_dtype, s.reduce_dtype, s.is_trained) for s in unit.flat_params]
    placement = unit.options.placement
    return plan_unit(
        name,
        flats,
        placement,
        lambda dtype: optimizer_bytes,
        copy_shards=placement.param_shards if placement.has_secondary_shard else 0,
        nested=placement.outer is not None,
        offloads=unit.options.offload_grads,
        on_host=unit.options.device is not None,
    )


def phase(moment: Moment, units: Sequence[UnitPlan]) -> str:
    """The name of a moment for people."""
    name = units[moment.unit].name
    return {
        "forward": f"forward of {name}",
        "backward": f"backward of {name}",
        "reduce": f"reduction of {name}'s gradient",
    }[moment.phase]


def summary(plan: MemoryPlan) -> str:
    """Two lines: the bytes between steps and at the peak, and the moment of the peak."""
    top = max(plan.moments, key=lambda moment: moment.bytes)
    between, peak = human(plan.between_steps), human(plan.peak)
    return "\n".join(
        [
            f"each rank: {between} between steps, {peak} at the peak ({phase(top, plan.units)})",
            f"the first backward after zero_grad(): {human(plan.peak_alone)}; with micro-batches in no_sync(): "
            f"{human(plan.peak_no_sync)}; activations and buffers come on top",
        ]
    )


def _table(plan: MemoryPlan, every: bool) -> str:
    """The table of ``MemoryPlan.table``, with totals and ``summary``."""
    own = [(one.shard, one.gradient, one.optimizer, one.full, one.kept, one.padding) for one in plan.units]
    rows: list[tuple[str, ...]] = [
        ("unit", "units", "shard", "gradient", "optimizer", "unsharded", "no_sync", "padding"),
        ("", "", *("bytes a rank",) * 5, "of all ranks"),
    ]
    named = ((unit.name, *sizes) for unit, sizes in zip(plan.units, own, strict=True))
    rows += [(name, count, *map(human, sizes)) for name, count, *sizes in merged(named, every)]
    rows.append(("total", f"{len(own):,}", *(human(sum(column)) for column in zip(*own, strict=True))))
    on_host = [f"host memory: {human(plan.host)}"] if plan.host else []
    return "\n".join([aligned(rows, 1, 2, 1), "", summary(plan), *on_host])
