"""Compute before training how many bytes a rank will hold.

The plan follows from layouts, dtypes and a placement: no tensor is read, and no process group is asked. Activations,
buffers of modules and rounding by the allocator are not in it. ``Wrapper.memory_plan``, ``inspect`` and ``advise`` call
this file. All sizes are bytes on one rank, unless a comment says otherwise.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ... import _C
from ...common.layout import FlatLayout
from ...common.redundancy import bytes_of_copies
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
    - ``parts``: the gradients of the shard in ``reduced``: with ``reduction="ordered"`` one of each rank, else one.
    - ``kept``: the accumulated gradient, between micro-batches in ``no_sync``.
    - ``padding``: in the shards of all ranks together.
    - ``copy``: the secondary shard, during a step.
    - ``halfway``: input and output of the second reduction (over replicas, or over the outer group).
    - ``converted``: ``gradient``, if its dtype is another than that of ``reduced``.
    - ``copied``: whether ``unpacked`` is freed before ``reduced`` is allocated.
    - ``reduces_each``: whether each micro-batch in ``no_sync`` has ``wire`` and ``reduced`` too.
    - ``offloads``: whether ``kept`` lies in host memory, except for up to three units at a time.
    - ``on_host``: whether ``shard``, ``gradient`` and ``optimizer`` lie in host memory.
    - ``shards``: the number of different shards; other ranks have replicas of them.
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
    parts: int = 1
    kept: int = 0
    padding: int = 0
    copy: int = 0
    halfway: int = 0
    converted: int = 0
    copied: bool = False
    reduces_each: bool = False
    offloads: bool = False
    on_host: bool = False
    shards: int = 1


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
        """The plan as a table, with totals and ``summary``.

        Units with equal sizes, whose names differ in numbers alone, share a line. ``every``: each unit has a line.
        """
        own = [(one.shard, one.gradient, one.optimizer, one.full, one.kept, one.padding) for one in self.units]
        rows: list[tuple[str, ...]] = [
            ("unit", "units", "shard", "gradient", "optimizer", "unsharded", "no_sync", "padding"),
            ("", "", *("bytes a rank",) * 5, "of all ranks"),
        ]
        named = ((unit.name, *sizes) for unit, sizes in zip(self.units, own, strict=True))
        rows += [(name, count, *map(human, sizes)) for name, count, *sizes in merged(named, every)]
        rows.append(("total", f"{len(own):,}", *(human(sum(column)) for column in zip(*own, strict=True))))
        on_host = [f"host memory: {human(self.host)}"] if self.host else []
        return "\n".join([aligned(rows, 1, 2, 1), "", summary(self), *on_host])

    def kept_by_elastic(self, world_size: int, redundancy: str = "parity") -> int:
        """The bytes of host memory that the loop of ``flatparam.elastic`` keeps more on a rank of ``world_size``."""
        state = sum((unit.shard + unit.optimizer) * unit.shards // world_size for unit in self.units)
        return bytes_of_copies(state, world_size, redundancy)

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
    in_order: bool = False,
) -> UnitPlan:
    """The plan of a unit with the flat parameters ``flats``.

    - ``spread``: its placement, or a row of the table of strategies.
    - ``optimizer_bytes``: maps the dtype of a shard to bytes of state for each element (Adam in fp32: 8).
    - ``copy_shards``: the number of ranks that share the secondary shard, 0: there is none.
    - ``nested``: whether the accumulated gradient is sharded over these ranks too.
    - ``offloads``: whether the accumulated gradient lies in host memory between micro-batches.
    - ``on_host``: whether the shards lie in host memory.
    - ``in_order``: whether it has ``reduction="ordered"``.
    """
    total: Any = Counter()
    inner = copy_shards if nested else 0  # the ranks of the first of two reductions
    parts = flats[0].layout.world_size if flats and in_order else 1
    for flat in flats:
        layout, dtype, low = flat.layout, flat.dtype, flat.compute_dtype or flat.dtype
        numel, padded, shard = sum(layout.numels), layout.padded_numel, layout.shard_numel
        in_place = spread.optim is None and low == dtype and not on_host  # the shard is the whole parameter, used as is
        full = 0 if in_place else padded * low.itemsize
        total.update(shard=shard * dtype.itemsize, full=full, padding=(padded - numel) * dtype.itemsize)
        if not flat.is_trained:
            continue
        on_wire = flat.reduce_dtype or low
        wire = padded * on_wire.itemsize
        into = inner or layout.world_size
        reduced = wire // into * parts if into > 1 else 0
        last = wire // layout.world_size if inner else 0
        total.update(
            gradient=shard * dtype.itemsize,
            optimizer=shard * optimizer_bytes(dtype),
            unpacked=numel * low.itemsize,
            wire=wire,
            reduced=reduced,
            kept=padded // (inner or 1) * max(4, dtype.itemsize),  # in fp32 at least
            halfway=reduced + last if last or spread.replicate is not None else 0,
            converted=shard * dtype.itemsize if on_wire != dtype or parts > 1 else 0,
        )
    return UnitPlan(
        name=name,
        **total,
        parts=parts,
        always_full=spread.param is None and spread.optim is not None,
        resharded=spread.reshard_after_forward,
        copy=total["full"] // copy_shards if copy_shards else 0,
        copied=bool(copy_shards) or (spread.param is None and spread.optim is not None),
        reduces_each=nested,
        offloads=offloads,
        on_host=on_host,
        shards=flats[0].layout.world_size if flats else 1,
    )


def plan_tree(
    units: Iterable[UnitPlan], prefetch: bool, gathers_ahead: bool = False, min_unit_bytes: int = 0
) -> MemoryPlan:
    """The plan of a tree. ``units``: in the order of their forwards, the root first.

    ``prefetch``: whether one unit is gathered ahead in forward and backward; ``gathers_ahead``: whether forward gathers
    ahead in any case, as on an accelerator. ``min_unit_bytes``: the wrapper's argument. Not on an accelerator, small
    units that are gathered as one take two buffers more.
    """
    plans = tuple(units)
    here = [plan for plan in plans if not plan.on_host]
    there = [plan for plan in plans if plan.on_host]
    base = sum(plan.shard + plan.optimizer for plan in here) + sum(plan.full for plan in plans if plan.always_full)
    always = base + sum(plan.copy for plan in plans)
    kept = [0 if plan.offloads else plan.kept for plan in plans]
    added_to_coming_going = sum(sorted(plan.kept for plan in plans if plan.offloads)[-3:])
    order, packs = range(len(plans)), not gathers_ahead
    forward = _units_ahead(plans, order, prefetch or gathers_ahead, min_unit_bytes, packs)
    backward = _units_ahead(plans, order[:0:-1], prefetch, 0, packs)
    added, alone, no_sync = (
        tuple(_moments(plans, always, forward, backward, earlier, held))
        for earlier, held in ((True, None), (False, None), (False, kept))
    )
    peak, peak_alone, peak_no_sync = (
        max((moment.bytes for moment in moments), default=base) for moments in (added, alone, no_sync)
    )
    return MemoryPlan(
        units=plans,
        between_steps=base,
        peak=peak,
        no_sync=sum(kept) + added_to_coming_going,
        moments=added,
        peak_alone=peak_alone,
        peak_no_sync=peak_no_sync,
        host=sum(plan.shard + plan.optimizer + (1 + plan.parts) * plan.gradient for plan in there)  # new ones are added
        + sum(plan.kept for plan in plans if plan.offloads),
    )


def _sums(values: Iterable[int]) -> list[int]:
    """The sums of the first 0, 1, 2, ... values."""
    return list(itertools.accumulate(values, initial=0))


class _Ahead(NamedTuple):
    """Bytes that are there for units that are gathered ahead: in ``shards`` until their gathers have ended."""

    full: int = 0
    shards: int = 0


def _units_ahead(
    plans: Sequence[UnitPlan], order: Sequence[int], one: bool, min_unit_bytes: int, packs: bool
) -> dict[int, _Ahead]:
    """What is gathered ahead while each unit of ``order`` runs.

    ``one``: whether a unit is gathered ahead that is not small; ``packs``: whether small ones are gathered in buffers.
    """
    found, together, buffers = {}, list[UnitPlan](), 0
    for at, unit in enumerate(order):
        together = together[1:]
        following = [plans[i] for i in order[at + 1 : at + 1 + _C.MOST_TOGETHER]]
        if not together:
            together = _small(following, min_unit_bytes)
            buffers = sum(each.full + each.full // each.shards for each in together) if packs and together[1:] else 0
        gathered = together or [each for each in following[:1] if one and each.resharded]
        shards = sum(each.shard for each in gathered if each.on_host)
        full = sum(each.full for each in gathered if not each.always_full)
        found[unit] = _Ahead(full + (buffers if together else 0), shards)
    return found


def _small(plans: Iterable[UnitPlan], min_unit_bytes: int) -> list[UnitPlan]:
    """The units at the begin of ``plans`` that are gathered as one."""
    found: list[UnitPlan] = []
    for plan in plans:
        is_gathered = plan.shards > 1 and not plan.copy and not plan.always_full
        if not is_gathered or not 0 < plan.full < min_unit_bytes or sum(one.full for one in found) >= min_unit_bytes:
            break
        found.append(plan)
    return found


def _moments(
    plans: tuple[UnitPlan, ...],
    always: int,
    forward: dict[int, _Ahead],
    backward: dict[int, _Ahead],
    earlier: bool,
    kept: list[int] | None,
) -> Iterator[Moment]:
    """Yield the moments of a forward and backward. Units run in their order, and the root around all others.

    ``always``: the bytes that are there at each of them; ``forward``, ``backward``: those of units gathered ahead.
    ``earlier``: whether gradients are added to those of an earlier backward; else they were cleared. ``kept``: the
    accumulated gradient of each unit, if micro-batches in ``no_sync`` come first; None: there are none. In these
    micro-batches, units that are not resharded stay unsharded.
    The last backward reduces the accumulated gradients, in place if they have the dtype of the wire, and they become
    gradients of shards. A reduction ends while the unit after the next runs its backward; if it is made of two
    reductions, one unit later.
    """
    end = len(plans)
    full = [0 if plan.always_full else plan.full for plan in plans]  # ``always`` has those that are always unsharded
    stay = [0 if plan.resharded and i else full[i] for i, plan in enumerate(plans)]  # from forward to backward
    coming = [plan.shard if plan.on_host else 0 for plan in plans]  # on the device until the all-gather has ended
    held = kept or [0] * end
    staying, holding = _sums(stay), _sums(held)
    gradients = _sums(0 if plan.on_host else plan.gradient for plan in plans)
    is_reduced_twice = any(plan.halfway for plan in plans)
    throughout = always + holding[end] + (gradients[end] if earlier else 0)
    for i in range(1, end):
        here = staying[i] + full[i] + (sum(forward[i]) or coming[i])
        yield Moment(i, "forward", throughout + here + (staying[end] - staying[i + 1] if kept else 0))
    if plans:
        yield Moment(0, "forward", throughout + staying[end])
    for i in reversed(range(end)):
        plan = plans[i]
        last, before, first = (plans[i + k] if i + k < end else _NO_UNIT for k in (1, 2, 3))
        ends, leaves = (before, first) if is_reduced_twice else (last, before)
        ahead = backward.get(i, _Ahead())
        unsharded = always + staying[i] + ahead.full
        freed = 0 if ends.halfway or not ends.reduced else ends.wire
        into = plan.reduced + (0 if earlier and not ends.on_host else max(0, ends.converted - freed))
        reducing = last.wire + last.reduced  # of the unit before, whose reduction still runs
        beside = reducing + before.halfway + (leaves.gradient if leaves.on_host else 0)
        reduced = gradients[end] - (0 if earlier else gradients[min(i + 2 + is_reduced_twice, end)])
        # accumulated gradients of host memory that are on the device now, to be added to or copied back
        near = sum(one.kept for one in plans[max(i - 1, 0) : i + 1] if kept and one.offloads)
        runs = unsharded + full[i] + max(plan.unpacked, ahead.shards)
        packs = unsharded + plan.unpacked
        reduces = unsharded + (max(plan.unpacked, into) if plan.copied else plan.unpacked + into)
        if kept:
            others = staying[end] - staying[i + 1] + holding[end] + near + (reducing if plan.reduces_each else 0)
            yield Moment(i, "backward", others + runs)
            if plan.reduces_each:
                yield Moment(i, "reduce", others + reduces + plan.wire)
        others = holding[min(i + 1 + plan.reduces_each, end)] + near + beside + reduced
        wire = 0 if kept and plan.kept == plan.wire else plan.wire
        cast = held[i] if wire and not plan.reduces_each else 0  # what was accumulated is cast into the wire's memory
        yield Moment(i, "backward", others + runs)
        yield Moment(i, "reduce", others + wire + max(packs, reduces - cast))


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
        in_order=unit.options.in_order,
    )


def phase(moment: Moment, units: Sequence[UnitPlan]) -> str:
    """The name of a moment for people."""
    name = units[moment.unit].name
    return f"reduction of {name}'s gradient" if moment.phase == "reduce" else f"{moment.phase} of {name}"


def summary(plan: MemoryPlan) -> str:
    """Two lines: the bytes between steps and at the peak, and the moment of the peak."""
    top = max(plan.moments, key=lambda moment: moment.bytes)
    between, peak = human(plan.between_steps), human(plan.peak)
    return (
        f"each rank: {between} between steps, {peak} at the peak ({phase(top, plan.units)})\n"
        f"the first backward after zero_grad(): {human(plan.peak_alone)}; with micro-batches in no_sync(): "
        f"{human(plan.peak_no_sync)}; activations and buffers come on top"
    )
