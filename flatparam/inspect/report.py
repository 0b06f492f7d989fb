"""The printed report of ``inspect``, and its JSON."""

from typing import Any

from ..common.tables import aligned, human, one_name_of, without_numbers
from ..fsdp.unit.memory_plan import MemoryPlan, UnitPlan
from .planning import Settings, Unit, dtypes_of, names_of

HEADINGS = (
    *("unit", "class", "units", "params", "numel", "padding", "shard"),
    *("shard", "gradient", "optimizer", "unsharded", "peak"),
)
UNITS_OF_HEADINGS = ("", "", "", "", "elements", "elements", "elements", *("bytes a rank",) * 5)


def worst(plan: MemoryPlan, unit: int) -> int:
    """Return the peak of a rank during the moments of ``unit``, in bytes."""
    return max(moment.bytes for moment in plan.moments if moment.unit == unit)


def title(model: str, units: list[Unit], settings: Settings) -> str:
    """Return the first line: the model, the strategy and the options."""
    numel = sum(unit.numel for unit in units)
    ranks = f"{settings.world_size} rank{'s' if settings.world_size > 1 else ''}"
    if settings.shard_size is not None:
        ranks += f" ({settings.shard_size} share a parameter)"
    options = [
        f"compute in {names_of(dtypes_of(units)[0])}",
        f"optimizer {settings.optimizer}",
        "use_orig_params" if settings.use_orig_params else "",
        "segments" if settings.segments else "",
        f"shards aligned to {settings.shard_alignment} bytes" if settings.shard_alignment else "",
        "whole rows" if settings.atomic_rows else "",
        "" if settings.prefetch else "no prefetch",
        f"units under {settings.min_unit_bytes} bytes as one" if settings.min_unit_bytes else "",
    ]
    count = f"{len(units)} unit{'s' if len(units) > 1 else ''}"
    chosen = ", ".join(option for option in options if option)
    return f"{model}: {numel:,} elements in {count}, {settings.strategy.name} over {ranks}, {chosen}"


def _numbers(unit: Unit, own: UnitPlan) -> tuple[int, ...]:
    counts = (unit.parameters, unit.numel, unit.padding, unit.shard_numel)
    return (*counts, own.shard, own.gradient, own.optimizer, own.full)


def equal_units(units: list[Unit], plan: MemoryPlan) -> list[tuple[str, list[int]]]:
    """Return groups of units with equal classes and sizes, and names that differ in numbers only: name and indices."""
    groups: dict[Any, list[int]] = {}
    for i, (unit, own) in enumerate(zip(units, plan.units, strict=True)):
        groups.setdefault((without_numbers(unit.name), unit.kind, _numbers(unit, own)), []).append(i)
    return [(one_name_of([units[i].name for i in members]), members) for members in groups.values()]


def table(units: list[Unit], plan: MemoryPlan) -> str:
    """Return the table: a row for each group of equal units, with its size and highest peak; and a row of totals."""

    def row(name: str, kind: str, count: int, of: tuple[int, ...], peak: int) -> tuple[str, ...]:
        return (name, kind, *(f"{number:,}" for number in (count, *of[:4])), *map(human, (*of[4:], peak)))

    rows: list[tuple[str, ...]] = [HEADINGS, UNITS_OF_HEADINGS]
    for name, members in equal_units(units, plan):
        first = members[0]
        peak = max(worst(plan, i) for i in members)
        rows.append(row(name, units[first].kind, len(members), _numbers(units[first], plan.units[first]), peak))
    totals = tuple(map(sum, zip(*map(_numbers, units, plan.units), strict=True)))
    rows.append(row("total", "", len(units), totals, plan.peak))
    return aligned(rows, names=2, headings=2, totals=1)


def as_json(model: str, units: list[Unit], plan: MemoryPlan, settings: Settings) -> dict[str, Any]:
    """Return the report as plain types. Sizes are in elements; those under ``bytes`` in bytes of a rank."""
    return {
        "model": model,
        "world_size": settings.world_size,
        "strategy": settings.strategy.name,
        "shards": settings.shards,
        "replicas": settings.world_size // settings.shards if settings.row.replicate else 1,
        "param_dtype": None if settings.param_dtype is None else str(settings.param_dtype).removeprefix("torch."),
        "optimizer": settings.optimizer,
        "use_orig_params": settings.use_orig_params,
        "shard_alignment": settings.shard_alignment,
        "atomic": "row" if settings.atomic_rows else None,
        "bytes": {
            key: getattr(plan, key) for key in ("between_steps", "peak", "peak_alone", "peak_no_sync", "no_sync")
        },
        "moments": [
            {"unit": units[moment.unit].path, "phase": moment.phase, "bytes": moment.bytes} for moment in plan.moments
        ],
        "units": [
            _unit_as_json(unit, own, worst(plan, i))
            for i, (unit, own) in enumerate(zip(units, plan.units, strict=True))
        ],
    }


def _unit_as_json(unit: Unit, own: UnitPlan, peak: int) -> dict[str, Any]:
    return {
        "path": unit.path,
        "class": unit.kind,
        "numel": unit.numel,
        "padding": unit.padding,
        "shard_numel": unit.shard_numel,
        "bytes": {
            "shard": own.shard,
            "gradient": own.gradient,
            "optimizer": own.optimizer,
            "unsharded": own.full,
            "peak": peak,
        },
        "segments": [
            {
                "dtype": str(flat.dtype).removeprefix("torch."),
                "trained": flat.is_trained,
                "numel": flat.layout.numel,
                "shards": [flat.layout.shard(rank)._asdict() for rank in range(flat.layout.world_size)],
                "parameters": [
                    {"name": original.fqn, "shape": list(original.shape), "offset": offset}
                    for original, offset in zip(originals, flat.layout.offsets, strict=True)
                ],
            }
            for flat, originals in unit.segments
        ],
    }
