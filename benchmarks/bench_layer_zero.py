"""z. LayerZero: eight micro-batches a step beside FULL_SHARD with no_sync and HYBRID_SHARD, and adding up in one pass.

Host cost on a fake process group of 8 in inner groups of 4, also of units driven by hand as docs/layerzero.md shows;
bytes received over ranks that are not in the inner group; bytes of a rank; bf16 gradients added to an fp32 accumulator,
against torch's cast and add_, and against memcpy.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks import main
from benchmarks.c_testing import _C_testing
from benchmarks.measuring import clock, in_turn
from benchmarks.models import SHAPE, Stack, Unit
from benchmarks.rows import Row, Table, Target
from benchmarks.worlds import fake_world
from flatparam import FullyShardedDataParallel, ShardingStrategy

WORLD, INNER, MICRO_BATCHES = 8, 4, 8
UNITS, PARAMETERS = 48, 10
BARE, FULL, HYBRID = "bare", "FULL_SHARD, no_sync", "HYBRID_SHARD, no_sync"
OURS = ("LAYER_ZERO", "LAYER_ZERO_NESTED")
NUMEL = 4 * 2**20
BY_HAND = ((48, 10), (24, 12))
HAND = "handles by hand"


def measure(quick: bool) -> Table:
    torch.set_num_threads(1)
    table = Table(
        "z",
        f"LayerZero, {MICRO_BATCHES} micro-batches a step, {WORLD} ranks in inner groups of {INNER}",
        "a step: forward and backward of all; bytes: received by a rank on a ring, over other than inner groups",
    )
    with fake_world(WORLD):
        models = {BARE: _bare(), FULL: _wrapped("FULL_SHARD"), HYBRID: _wrapped("HYBRID_SHARD")}
        models |= {name: _wrapped(name) for name in OURS}
        steps = {name: _sample(model) for name, model in models.items()}
        [(_, medians)] = in_turn(steps, 3, 4 if quick else 12).items()
        size = f"{UNITS} x {PARAMETERS}"
        targets = [Target(name, 1.3, text="<= 1.3") for name in OURS]
        table.rows.append(Row.of("host", size, "ms", BARE, medians, 1e3, targets))
        sharded = {name: model for name, model in models.items() if name != BARE}
        outer = {name: [_outer_bytes(model)] for name, model in sharded.items()}
        table.rows.append(Row.of("bytes over the outer network", size, "KB", FULL, outer, 1e-3))
        table.rows += [_by_hand(units, n, quick) for units, n in BY_HAND]
        plans = {name: model.memory_plan() for name, model in sharded.items()}
        held = {name: [plan.peak + plan.no_sync] for name, plan in plans.items()}
        table.rows.append(Row.of("bytes of a rank at most", size, "KB", FULL, held, 1e-3))
    table.rows += _accumulate(quick)
    return table


def _bare() -> nn.Module:
    return Stack(UNITS, PARAMETERS)


def _wrapped(strategy: str) -> Any:
    groups = [dist.new_group(range(i, i + INNER)) for i in range(0, WORLD, INNER)]
    outer = [dist.new_group(range(i, WORLD, INNER)) for i in range(INNER)]
    process_group: Any = None
    if strategy == "HYBRID_SHARD":
        process_group = (groups[0], outer[0])
    elif strategy in OURS:
        process_group = (groups[0], dist.group.WORLD)
    return FullyShardedDataParallel(
        _bare(),
        process_group,
        ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Unit}),
        use_orig_params=True,
    )


def _step(model: Any) -> None:
    x = torch.ones(SHAPE)
    for k in range(MICRO_BATCHES):
        last = k == MICRO_BATCHES - 1 or not hasattr(model, "no_sync")
        with contextlib.nullcontext() if last else model.no_sync():
            model(x).sum().backward()


def _sample(model: Any) -> Callable[[], dict[str, float]]:
    return _timed(model, lambda: _step(model))


def _timed(model: Any, step: Callable[[], object]) -> Callable[[], dict[str, float]]:
    optim = torch.optim.SGD(model.parameters(), lr=0.0)

    def sample() -> dict[str, float]:
        start = clock()
        step()
        taken = clock() - start
        optim.step()
        optim.zero_grad()
        return {"step": taken}

    return sample


def _driver() -> Any:
    """The class that docs/layerzero.md shows."""
    text = (Path(__file__).parents[1] / "docs" / "layerzero.md").read_text()
    [code] = [code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "class Driver" in code]
    names: dict[str, Any] = {}
    exec(code, names)
    return names["Driver"]


def _by_hand(units: int, n: int, quick: bool) -> Row:
    """The units of a model by the driver of docs/layerzero.md, over the bare model, with all micro-batches."""
    model = Stack(units, n)
    inner = [dist.new_group(range(i, i + INNER)) for i in range(0, WORLD, INNER)]
    driver = _driver()(list(model.units), torch.device("cpu"), inner[0], dist.group.WORLD)
    x = torch.ones(SHAPE)
    sample = _timed(model, lambda: driver.backward([lambda: model(x).sum()] * MICRO_BATCHES))
    [(_, medians)] = in_turn({BARE: _sample(Stack(units, n)), HAND: sample}, 3, 4 if quick else 12).items()
    return Row.of("host, by hand", f"{units} x {n}", "ms", BARE, medians, 1e3, [Target(HAND, 1.5)])


def _outer_bytes(model: Any) -> float:
    total = 0.0

    @contextlib.contextmanager
    def counting() -> Iterator[None]:
        names = {name: getattr(dist, name) for name in dir(dist) if name.startswith(("all_gather_", "reduce_scatter_"))}
        names["all_reduce"] = dist.all_reduce

        def replaced(name: str, original: Any) -> Any:
            def call(output: Any, source: Any = None, group: Any = None, **kwargs: Any) -> Any:
                nonlocal total
                ranks = dist.get_world_size(group)
                whole = source if name.startswith("reduce") else output
                if dist.get_process_group_ranks(group) != list(range(INNER)):
                    times = 2 if name == "all_reduce" else 1
                    total += times * whole.numel() * whole.element_size() * (ranks - 1) / ranks
                arguments = (output,) if source is None else (output, source)
                return original(*arguments, group=group, **kwargs)

            return call

        for name, original in names.items():
            setattr(dist, name, replaced(name, original))
        try:
            yield
        finally:
            for name, original in names.items():
                setattr(dist, name, original)

    torch.optim.SGD(model.parameters(), lr=0.0).step()
    with counting():
        _step(model)
    model.zero_grad()
    return total


def _accumulate(quick: bool) -> list[Row]:
    """One pass that casts and adds, as a unit's backward does it."""
    low, kept = torch.randn(NUMEL).bfloat16(), torch.zeros(NUMEL)
    whole, other = torch.zeros(NUMEL), torch.ones(NUMEL)
    ours: Any = kept.view(torch.uint8).numpy()
    theirs: Any = low.view(torch.uint8).numpy()
    segments = [(memoryview(theirs), 0, NUMEL)]

    def of(call: Callable[[], Any], bytes_each: int) -> Callable[[], dict[str, float]]:
        def sample() -> dict[str, float]:
            start = clock()
            call()
            taken = clock() - start
            return {"seconds": taken, "per byte": taken / bytes_each}

        return sample

    calls = {
        "flatparam": of(
            lambda: _C_testing.pack(segments, "bfloat16", memoryview(ours), "float32", 0, NUMEL, None, True), 10
        ),
        "torch": of(lambda: kept.add_(low.to(torch.float32)), 10),
        "copy": of(lambda: whole.copy_(other), 8),
    }
    medians = in_turn(calls, 3, 5 if quick else 20)
    seconds = {name: values for name, values in medians["seconds"].items() if name != "copy"}
    speed = {name: [1.0 / value for value in values] for name, values in medians["per byte"].items() if name != "torch"}
    rows = [
        Row.of("add bf16 to fp32", f"{NUMEL >> 20} Mi", "ms", "torch", seconds, 1e3, [Target("flatparam", 0.5)]),
        Row.of(
            "the same in bytes a second",
            f"{NUMEL >> 20} Mi",
            "GB/s",
            "copy",
            speed,
            NUMEL * 1e-9,
            [Target("flatparam", 0.7, at_least=True)],
        ),
    ]
    return rows


if __name__ == "__main__":
    main.run_one(measure)
