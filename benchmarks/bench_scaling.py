"""e. How cost grows: a unit with units, a parameter with parameters, a rank with ranks. Flat is an exponent of 0."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from benchmarks import handles, main
from benchmarks.contestants import BARE, CONTESTANTS, FSDP1, OURS, RUNTIME, Wrapping, installed
from benchmarks.handles import OURS as OUR_HANDLE
from benchmarks.handles import TORCH
from benchmarks.measuring import clock, in_turn, seconds
from benchmarks.models import SHAPE, Stack, Unit
from benchmarks.rows import Row, Table
from benchmarks.worlds import fake_world
from flatparam import FlatLayout

UNITS = (8, 32, 128, 512)
PARAMETERS = (10, 100, 1000, 10000)
RANKS = (2, 16, 128, 1024, 4096)
MOST = 0.1  # the exponent up to which a cost counts as flat


def measure(quick: bool) -> Table:
    """Cost of the step by units, of the steps of a handle by parameters, of layout and metadata by ranks."""
    torch.set_num_threads(1)
    table = Table(
        "e",
        "scaling: the exponent of the cost of one unit, parameter or rank as their number grows",
        "host cost, fake process groups; 0: the cost of one stays what it is; least squares on logarithms;\n"
        "at the end: ours, between the two largest numbers",
    )
    table.rows += _by_units(UNITS[: 3 if quick else None], quick)
    table.rows += _by_parameters(PARAMETERS[: 3 if quick else None], quick)
    table.rows += _by_ranks(RANKS, quick)
    return table


def _by_units(counts: Sequence[int], quick: bool) -> list[Row]:
    """Forward and backward of units of 10 parameters."""
    found: dict[str, list[list[float]]] = {}
    with fake_world(8):
        for units in counts:
            steps = {name: _step(name, units) for name in (RUNTIME, OURS, FSDP1, BARE)}
            [(_, medians)] = in_turn(steps, 3, max(2, (64 if quick else 256) // units)).items()
            for name, values in medians.items():
                found.setdefault(name, []).append([value / units for value in values])
    return [_row("forward + backward, each unit of 10", "units", counts, found)]


def _step(name: str, units: int) -> Callable[[], dict[str, float]]:
    model = CONTESTANTS[name](Stack(units, 10), Wrapping((Unit,)))
    x = torch.ones(SHAPE)

    def sample() -> dict[str, float]:
        start = clock()
        model(x).sum().backward()
        taken = clock() - start
        model.zero_grad(set_to_none=True)
        return {"step": taken}

    return sample


def _by_parameters(counts: Sequence[int], quick: bool) -> list[Row]:
    """The steps of one handle."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    with fake_world(8):
        for n in counts:
            rounds = max(2, min(50, 20000 // n) // (4 if quick else 1))
            driven = {kind: handles.Driven(kind, Unit(n), True).sample for kind in (OUR_HANDLE, TORCH)}
            for what, medians in in_turn(driven, 3, rounds).items():
                for name, values in medians.items():
                    found.setdefault(what, {}).setdefault(name, []).append([value / n for value in values])
    return [_row(f"{what}, each parameter", "parameters", counts, by_name) for what, by_name in found.items()]


def _by_ranks(counts: Sequence[int], quick: bool) -> list[Row]:
    """Layout and metadata of one rank of W, for 400 parameters; no processes."""
    numels = [32 + 8 * (i % 7) for i in range(400)]
    rounds = 5 if quick else 30
    found: dict[str, dict[str, list[list[float]]]] = {}
    for world in counts:
        calls = {OUR_HANDLE: lambda world=world: _layout(numels, world)}
        for what, medians in in_turn(calls, 3, rounds).items():
            found.setdefault(what, {}).setdefault(OUR_HANDLE, []).append(medians[OUR_HANDLE])
        with fake_world(world, rank=world // 2):
            wrapped = {
                OURS: _wrapping(OURS),
                FSDP1: _wrapping(FSDP1),
            }
            for what, medians in in_turn(wrapped, 3, max(2, rounds // 6), warm_up=1).items():
                for name, values in medians.items():
                    found.setdefault(what, {}).setdefault(name, []).append(values)
    return [_row(what, "ranks", counts, by_name) for what, by_name in found.items()]


def _layout(numels: Sequence[int], world: int) -> dict[str, float]:
    layout = FlatLayout(numels, world, itemsize=4, alignment=4)
    rank = world // 2
    return {
        "a layout of 400 parameters": seconds(lambda: FlatLayout(numels, world, itemsize=4, alignment=4)),
        "what one rank holds of them": seconds(lambda: layout.param_shards(rank)),
        "which ranks hold one of them": seconds(lambda: layout.ranks_of_param(200)),
    }


def _wrapping(name: str) -> Callable[[], dict[str, float]]:
    def sample() -> dict[str, float]:
        module = Unit(400)
        with installed() if name == OURS else nullcontext():
            return {"wrapping 400 parameters": seconds(lambda: CONTESTANTS[name](module, Wrapping(())))}

    return sample


def _row(what: str, of: str, counts: Sequence[int], found: dict[str, list[list[float]]]) -> Row:
    """``found``: {contestant: for each count, the seconds of one in each repeat}."""
    exponents = {
        name: [exponent(counts, [by_count[i] for by_count in values]) for i in range(len(values[0]))]
        for name, values in found.items()
    }
    middle = {name: sorted(values)[len(values) // 2] for name, values in exponents.items()}
    ours = next(iter(middle))
    costs = {name: [sorted(v)[len(v) // 2] for v in values] for name, values in found.items()}
    row = Row(
        what=what,
        size=f"{counts[0]}-{counts[-1]} {of}",
        unit="",
        reference="",
        values=middle,
        ratios={},
        facts={"counts": list(counts), "seconds of one": costs},
    )
    row.values["at the end"] = exponent(counts[-2:], costs[ours][-2:])
    row.target, row.met = f"<= {MOST}", all(middle[name] <= MOST for name in (ours, OURS) if name in middle)
    return row


def exponent(counts: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of log(cost) over log(count)."""
    xs, ys = [math.log(count) for count in counts], [math.log(cost) for cost in costs]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


if __name__ == "__main__":
    main.run_one(measure)
