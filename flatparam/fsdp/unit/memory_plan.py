"""A plan of memory before training: the bytes that a rank will hold.

It is a formula of layouts, dtypes and a placement, which asks no process group and no tensor.

Activations, the module's buffers and what the allocator rounds up come on top.
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
    """One flat parameter: ``dtype`` of its shard, ``compute_dtype`` of the unsharded data and ``reduce_dtype`` of its
    gradient on the wire (None: as the one before), ``is_trained``: whether it has a gradient.
    """

    layout: FlatLayout
    dtype: torch.dtype
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    is_trained: bool


@dataclass(frozen=True)
class UnitPlan:
    """Bytes that one unit takes on each rank.

    ``shard``: always; ``gradient``: of the shard, from backward to ``zero_grad``; ``optimizer``: from the first step;
    ``full``: its unsharded parameters, while it is full; ``always_full``: whether they stay; ``resharded``: freed
    between forward and backward; ``unpacked``: what autograd gives for its parameters; ``wire``: the same packed, while
    it is reduced, and ``reduced``: into this, where it is not in place; ``kept``: the unsharded gradient between
    micro-batches in ``no_sync``; ``padding``: of the shards of all ranks together, what no parameter has; ``copy``:
    this rank's part of what forward and backward gather from, where that is not the shards, during a step;
    ``halfway``: input and output of the second reduction (over replicas, or the outer group);
    ``converted``: ``gradient``, where it is made of what was reduced in another dtype;
    ``copied``: whether ``unpacked`` goes before ``reduced`` comes;
    ``reduces_each``: every micro-batch has ``wire`` and ``reduced``; ``offloads``: whether ``kept`` lies in host memory
    then, but for that of three units; ``on_host``: whether ``shard``, ``gradient`` and ``optimizer`` do.
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
    """``bytes`` on a rank while ``phase`` (``forward``, ``backward`` or ``reduce``) of unit ``unit`` runs."""

    unit: int
    phase: str
    bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a rank holds on its device for parameters, gradients and optimizer state.

    ``between_steps``: after the first optimizer step, without gradients; ``peak``: the most at any of the ``moments``
    of a synced forward and backward, whose units run in the order given, and whose gradients are added to earlier ones;
    ``peak_alone``: the same where there are none; ``peak_no_sync``: where micro-batches in ``no_sync`` came before,
    since the gradients were cleared; ``no_sync``: gradients that these keep unsharded; ``host``: what lies in host
    memory instead, where something is offloaded to it. ``print`` shows a table.
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
        """The plan as a table, which ``print`` shows: equal units whose names differ in numbers alone are one line.

        ``every``: each has a line.
        """
        return _table(self, every)

    def __str__(self) -> str:
        return self.table()


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
    """The plan of a unit of these flat parameters. ``spread``: a row of the table has None for groups of one rank.

    ``optimizer_bytes``: of state for each element of a shard of a dtype (Adam in fp32: 8); ``copy_shards``: how many
    ranks share the copy that forward and backward gather from (0: there is none), and when ``nested`` what is kept of
    gradients too; ``offloads``: which lies in host memory between micro-batches; ``on_host``: whether the shards do.
    """

    def total(of: Callable[[Flat], int]) -> int:
        return sum(map(of, flats))

    def full(flat: Flat) -> int:
        if spread.optim is None and flat.compute_dtype in (None, flat.dtype) and not on_host:
            return 0  # the shard is the whole parameter, and is used as it is
        return flat.layout.padded_numel * (flat.compute_dtype or flat.dtype).itemsize

    def of_gradients(numel: Callable[[Flat], int], dtype: Callable[[Flat], torch.dtype]) -> int:
        return total(lambda flat: numel(flat) * dtype(flat).itemsize if flat.is_trained else 0)

    def on_wire(flat: Flat) -> torch.dtype:
        return flat.reduce_dtype or flat.compute_dtype or flat.dtype

    def wire(flat: Flat) -> int:
        return flat.layout.padded_numel * on_wire(flat).itemsize if flat.is_trained else 0

    def reduced(flat: Flat) -> int:
        into = copy_shards if nested and copy_shards else flat.layout.world_size
        return wire(flat) // into if into > 1 else 0

    def halfway(flat: Flat) -> int:
        last = wire(flat) // flat.layout.world_size if nested and copy_shards else 0
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
        wire=total(wire),
        reduced=total(reduced),
        kept=of_gradients(
            lambda flat: flat.layout.padded_numel // (copy_shards if nested and copy_shards else 1),
            lambda flat: torch.float32 if flat.dtype.itemsize < 4 else flat.dtype,
        ),
        padding=total(lambda f: (f.layout.padded_numel - sum(f.layout.numels)) * f.dtype.itemsize),
        copy=total(full) // copy_shards if copy_shards else 0,
        halfway=total(halfway),
        converted=of_gradients(
            lambda flat: flat.layout.shard_numel if on_wire(flat) != flat.dtype else 0, lambda flat: flat.dtype
        ),
        copied=bool(copy_shards) or (spread.param is None and spread.optim is not None),
        reduces_each=nested,
        offloads=offloads,
        on_host=on_host,
    )


def plan_tree(units: Iterable[UnitPlan], prefetch: bool, gathers_ahead: bool = False) -> MemoryPlan:
    """The plan of a tree, the outermost unit first.

    ``prefetch``: whether a further unit is gathered ahead; ``gathers_ahead``: in forward, whatever ``prefetch`` is.
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
        host=sum(plan.shard + plan.optimizer + 2 * plan.gradient for plan in there)  # another may be added to it
        + sum(plan.kept for plan in plans if plan.offloads),
    )


def _forward(
    plans: tuple[UnitPlan, ...], full: list[int], stay: list[int], gathers_ahead: bool
) -> Iterator[tuple[int, int]]:
    """The bytes unsharded in the forward of each unit but the root: what stays, it, and the next if gathered ahead."""
    staying = _sums(stay)
    for i in range(1, len(plans)):
        gathers = gathers_ahead and i + 1 < len(plans) and plans[i + 1].resharded
        ahead = full[i + 1] + _arriving(plans[i + 1]) if gathers else 0
        yield i, staying[i] + full[i] + (ahead or _arriving(plans[i]))


def _arriving(plan: UnitPlan) -> int:
    """The bytes of a shard from the host, on the device until it is in its place."""
    return plan.shard if plan.on_host else 0


def _sizes(plans: tuple[UnitPlan, ...]) -> tuple[list[int], list[int]]:
    """The bytes of each unit while it is full, and from its forward to its backward."""
    full = [0 if plan.always_full else plan.full for plan in plans]
    return full, [full[0], *(0 if plan.resharded else own for plan, own in zip(plans[1:], full[1:], strict=True))]


class _Backward(NamedTuple):
    """Bytes during the backward of unit ``unit``, beside gradients that there are already: these are added to in place.

    ``runs``: while it computes, ``packs``: while its gradients are packed, and ``ends``: while they are reduced, both
    without ``wire`` of its own;
    ``reducing``: the first reduction of the unit before; ``beside``: that and what else is under way meanwhile;
    ``reduced``: the gradients of shards of the units that are done.
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
    """Of each unit, the last one first."""
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
    """Of the first 0, 1, ... of them."""
    return list(itertools.accumulate(values, initial=0))


def _gradients(plans: Sequence[UnitPlan]) -> list[int]:
    """``_sums`` of those of shards, on the device."""
    return _sums(0 if plan.on_host else plan.gradient for plan in plans)


def _moments(plans: tuple[UnitPlan, ...], prefetch: bool, gathers_ahead: bool) -> Iterator[Moment]:
    """What a forward and backward hold beside what is always there; units run in order, the root around the others."""
    if not plans:
        return
    full, stay = _sizes(plans)
    for i, size in _forward(plans, full, stay, gathers_ahead):
        yield Moment(i, "forward", size)
    yield Moment(0, "forward", sum(stay))
    reduced = _gradients(plans)[-1]  # an earlier backward's, to which this one's are added
    for now in _backward(plans, full, stay, prefetch, cleared=False):
        yield Moment(now.unit, "backward", reduced + now.beside + now.runs)
        yield Moment(now.unit, "reduce", reduced + now.beside + now.ends + plans[now.unit].wire)


def _cleared(plans: tuple[UnitPlan, ...], kept: list[int] | None, prefetch: bool, gathers_ahead: bool) -> Iterator[int]:
    """The same where gradients were cleared before; ``kept``: those of micro-batches in ``no_sync`` that came first.

    In these units that are not resharded stay. In the last one what is kept is reduced, in place where it has the
    dtype of the wire, and becomes gradients of shards.
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
        # of what lies in host memory: added to, on its way there and back
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
        yield others + now.ends + wire - (held[i] if wire and not plan.reduces_each else 0)  # which was cast to it


def plan_of_unit(name: str, unit: Unit, optimizer_bytes: int) -> UnitPlan:
    """``plan_unit`` of a unit that there is. ``optimizer_bytes``: for each element of its shard."""
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
    """A moment in words."""
    name = units[moment.unit].name
    return {
        "forward": f"forward of {name}",
        "backward": f"backward of {name}",
        "reduce": f"reduction of {name}'s gradient",
    }[moment.phase]


def summary(plan: MemoryPlan) -> str:
    """What each rank holds, and when it is most."""
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
    """A line for each unit, or for all that differ in numbers of their names alone, and the totals."""
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
