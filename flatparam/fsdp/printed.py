"""The plan of memory, the map of shards and a unit in words and tables, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..common.tables import aligned, human, merged, ranges
from ..common.tensors import has_memory

if TYPE_CHECKING:
    from .memory import MemoryPlan, Moment, Piece, UnitPlan
    from .unit import Unit


class ShowingFreed(TorchFunctionMode):
    """Prints freed tensors by their shapes: ``extra_repr`` of some modules formats all attributes of the module."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__repr__ and args[0].numel() and not args[0].is_meta and not has_memory(args[0]):
            return f"<sharded: {tuple(args[0].shape)} of {of_dtype(args[0].dtype)}>"
        return func(*args, **(kwargs or {}))


def of_dtype(dtype: object) -> str:
    """A dtype without the name of its module."""
    return str(dtype).removeprefix("torch.")


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


def table_of_plan(plan: MemoryPlan, every: bool) -> str:
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


def table_of_pieces(pieces: Iterable[Piece], every: bool) -> str:
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


def of_unit(strategy: str, unit: Unit) -> str:
    """The strategy of a unit, its ranks and sizes, in one line; the same for units that are alike."""
    placement = unit.options.placement
    over = f"{placement.shards} rank{'s' if placement.shards > 1 else ''}"
    if placement.copied:
        over += f", gathered over {placement.param_shards}"
    if placement.replicas > 1:
        over += f", {placement.replicas} replicas"
    if not unit.segments:
        return f"{strategy} over {over}; no parameters of its own"
    layouts = [segment.layout for segment in unit.segments]
    params = sum(len(layout.numels) for layout in layouts)
    shard = sum(one.layout.shard_numel * one.flat.dtype.itemsize for one in unit.segments)
    dtypes = ", ".join(dict.fromkeys(of_dtype(one.flat.dtype) for one in unit.segments))
    return (
        f"{strategy} over {over}; {params:,} parameter{'s' if params > 1 else ''} of "
        f"{sum(sum(layout.numels) for layout in layouts):,} elements, in a shard "
        f"{sum(layout.shard_numel for layout in layouts):,} of {dtypes}, {human(shard)}"
    )
