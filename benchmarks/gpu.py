"""``make bench-gpu``: the kernels, the step, its memory and wrapping on a GPU; ``--docs`` writes docs too.

``--device cpu`` runs the same code without a GPU, to see that it runs: its figures say nothing of one.
"""

import argparse
import importlib
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import flatparam
from benchmarks import document
from benchmarks.contestants import BARE, CALLS, CONTESTANTS, FSDP1, FSDP2, OURS, RUNTIME, Wrap, Wrapping, bare, current
from benchmarks.rows import Row, Table, Target
from benchmarks.worlds import fake_world

if find_spec("matplotlib") is not None:  # a machine with a GPU may have no network
    from benchmarks import picture

ROOT = Path(__file__).parents[1]
WORLD = 8
PACK, COPY, CAT, FOREACH, CHUNK_CAT = "flatparam", "copy of one tensor", "cat", "_foreach_copy_", "_chunk_cat"
SIZES = {
    "4 KiB": (1 << 10, 0.5),
    "64 KiB": (1 << 14, 0.8),
    "1 MiB": (1 << 18, 0.8),
    "16 MiB": (1 << 22, 0.8),
}  # fp32 elements, of the copy's rate
KERNEL = "pack"  # in the name of ours


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the code")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the JSON files")
    parser.add_argument(
        "--docs", action="store_true", help="write tables and picture into docs/gpu.* and docs/targets.md too"
    )
    arguments = parser.parse_args()
    device = current(arguments.device)
    by_key = {}
    with fake_world(WORLD) as world:
        if device.type == "cuda":
            _have_collectives(world, device)
        for table in measured(device, arguments.quick):  # what is there is there, whatever becomes of the next
            print("\n".join(table.lines()), flush=True)
            table.save(arguments.out / f"gpu-{table.key}.json")
            by_key[table.key] = table
    draw(by_key, arguments.out / "gpu.png")
    if arguments.docs:
        document.write(by_key, _machine(device), ROOT / "docs" / "gpu.md", "gpu-machine")
        draw(by_key, ROOT / "docs" / "gpu.png")
    return 0


def _have_collectives(world: dist.ProcessGroup, device: torch.device) -> None:
    """NCCL's, of one rank, over this rank's part: torch's fake group copies the shard seven times for a gather."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    importlib.import_module("lone").use(world, device)


def measured(device: torch.device, quick: bool) -> Iterator[Table]:
    yield kernels(device, quick)
    yield from steps(device, quick)


def _machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    driver = runpy.run_path(str(ROOT / "tools" / "gpu.py"))["driver"]()
    return {"device": name, "driver": driver, "torch": torch.__version__, "CUDA": str(torch.version.cuda)}


class Shown(nn.Module):
    """Gives its parameters away as they are: all that a backward does is what happens to their gradients."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.params = nn.ParameterList([torch.zeros(numel) for _ in range(count)])

    def forward(self) -> list[Tensor]:
        return [param.view_as(param) for param in self.params]


def device_seconds(device: torch.device, call: Callable[[], object], kernels: str = "") -> float:
    """What the kernels of a call take that have this in their names; on the CPU, and where there are none, the call."""
    if device.type == "cpu":
        return _timed(call, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
    found = sum(event.self_device_time_total for event in seen.key_averages() if kernels in event.key)
    if not found:
        NOT_SEEN.add(kernels)
    return float(found) / 1e6 or begin.elapsed_time(end) / 1e3


NOT_SEEN: set[str] = set()  # kernels that the profiler has not shown: the time between events stands for theirs


def kernels(device: torch.device, quick: bool) -> Table:
    """Gradients of 400 parameters into one flat buffer: ours in a backward, torch's operations by themselves."""
    count = 40 if quick else 400
    table = Table("kernels", f"packing {count} gradients in fp32", "GB/s of bytes read and written; times the copy's")
    for size, (numel, bound) in list(SIZES.items())[: 3 if quick else None]:
        grads = [torch.ones(numel, device=device) for _ in range(count)]
        flat, other = torch.empty(2, count * numel, device=device)
        places = list(other.split(numel))
        with torch.no_grad():
            calls: dict[str, Callable[[], object]] = {
                COPY: partial(flat.copy_, other),
                CAT: partial(torch.cat, grads, out=flat),
                FOREACH: partial(torch._foreach_copy_, places, grads),
                CHUNK_CAT: partial(torch._chunk_cat, grads, 0, WORLD),
            }
            rounds = 5 if quick else 22
            seconds = {name: [device_seconds(device, call) for _ in range(rounds)][2:] for name, call in calls.items()}
        seconds[PACK] = _of_backwards(device, grads, rounds)[2:]
        rates = {name: [2e-9 * 4 * count * numel / each for each in values] for name, values in seconds.items()}
        is_seen = device.type == "cuda" and KERNEL not in NOT_SEEN  # else the figure is of a whole backward
        targets = [Target(PACK, bound, at_least=True)] if is_seen else []
        table.rows.append(Row.of("pack", f"{count} x {size}", "GB/s", COPY, rates, targets=targets))
    if NOT_SEEN:
        table.note += (
            "\nthe profiler shows no kernels here: flatparam's figure is of a whole backward, and no target is judged"
        )
    return table


def _of_backwards(device: torch.device, grads: list[Tensor], rounds: int) -> list[float]:
    model: Any = flatparam.FullyShardedDataParallel(
        Shown(len(grads), grads[0].numel()), device_id=device, use_orig_params=True
    )
    taken = []
    for _ in range(rounds):
        shown = model()
        taken.append(device_seconds(device, partial(torch.autograd.backward, shown, grads), KERNEL))
        model.zero_grad()
    return taken


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        more: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + more


class Unit(nn.Sequential):
    """The blocks that are sharded together."""


class Calling(nn.Module):
    """Bare units, and the collectives of sharded ones before the forward and before the backward of each."""

    def __init__(self, units: nn.Module) -> None:
        super().__init__()
        self.units = units
        params = [list(unit.parameters()) for unit in units.children()]
        self.shards = [of_unit[0].new_zeros(sum(p.numel() for p in of_unit) // WORLD) for of_unit in params]
        self.full = [shard.new_zeros(shard.numel() * WORLD) for shard in self.shards]
        self.world: Any = dist.group.WORLD  # torch.distributed's functions take the host some more time

    def forward(self, x: Tensor) -> Tensor:
        for unit, full, shard in zip(self.units.children(), self.full, self.shards, strict=True):
            self.world._allgather_base(full, shard).wait()
            x = unit(x)
            x.register_hook(partial(self._before_backward, full, shard))
        return x

    def _before_backward(self, full: Tensor, shard: Tensor, _: Tensor) -> None:
        self.world._allgather_base(full, shard).wait()
        self.world._reduce_scatter_base(shard, full).wait()


WRAPS: dict[str, Wrap] = {
    BARE: bare,
    CALLS: lambda model, how: Calling(bare(model, how)),
    **{name: CONTESTANTS[name] for name in (FSDP1, FSDP2, OURS, RUNTIME)},
}


@dataclass(frozen=True)
class Size:
    depth: int
    width: int
    tokens: int
    low: torch.dtype | None = None  # to compute in, if not fp32
    in_unit: int = 1  # blocks that are sharded together
    rounds: int = 7  # of a repeat
    repeats: int = 15

    def __str__(self) -> str:
        low = "" if self.low is None else f", {self.low}".replace("torch.", "")
        units = "" if self.in_unit == 1 else f", {self.in_unit} in a unit"
        return f"{self.depth} blocks of {self.width}{units}, {self.tokens} tokens{low}"

    def model(self) -> nn.Sequential:
        units = range(0, self.depth, self.in_unit)
        return nn.Sequential(*(Unit(*(Block(self.width) for _ in range(self.in_unit))) for _ in units))

    def input(self, device: torch.device) -> Tensor:
        return torch.ones(1, self.tokens, self.width, dtype=self.low, device=device)


BY_HOST = Size(48, 512, 128)  # the host bounds its step, the device that of the last
IN_LARGE_UNITS = replace(BY_HOST, in_unit=8)  # what to do about it
BY_DEVICE = Size(8, 4096, 4096, torch.bfloat16, rounds=5, repeats=5)
TINY = Size(4, 64, 16, rounds=2, repeats=2)
STEP = "ms; times the bare module's"
BOUND = 1.05  # of the runtime's step, times the bare module's


def steps(device: torch.device, quick: bool) -> Iterator[Table]:
    """Forward and backward of one rank of many; peak, wrapping, and as CUDA graphs."""
    step = Table("step", f"a step, rank 0 of {WORLD}", STEP)
    memory = Table("memory", "what a step takes on top, and wrapping", "MiB at the step's peak; ms to wrap")
    sizes = [TINY, replace(TINY, low=torch.bfloat16, in_unit=2)] if quick else [BY_HOST, IN_LARGE_UNITS, BY_DEVICE]
    models = _rows(sizes[0], device, step, memory)
    for size in sizes[1:]:
        _rows(size, device, step, memory)
    yield step
    yield memory
    if device.type == "cuda":
        yield _captured_steps(models, sizes[0], device)


def _targets(device: torch.device) -> list[Target]:
    return [Target(RUNTIME, BOUND)] if device.type == "cuda" else []


def _rows(size: Size, device: torch.device, step: Table, memory: Table) -> dict[str, nn.Module]:
    """Adds what is measured of a size to the tables; returns the models."""
    how = Wrapping((Unit,), size.low, device.type)
    models: dict[str, nn.Module] = {}
    wrapping: dict[str, list[float]] = {name: [] for name in WRAPS}
    for name, wrap in WRAPS.items():
        for _ in range(4):
            with device:
                module = size.model()
            _wait(device)
            start = time.perf_counter()
            models[name] = wrap(module, how)
            _wait(device)
            wrapping[name].append(time.perf_counter() - start)
    x = size.input(device)
    medians: dict[str, list[float]] = {name: [] for name in WRAPS}
    for repeat in range(size.repeats + 1):
        for name, model in models.items():
            taken = [_step(model, x, device) for _ in range(size.rounds)]
            if repeat:
                medians[name].append(statistics.median(taken))
    step.rows.append(Row.of("forward + backward", str(size), "ms", BARE, medians, 1e3, _targets(device)))
    if device.type == "cuda":
        peaks = {name: [_peak(model, x, device)] for name, model in models.items() if name != CALLS}
        memory.rows.append(Row.of("peak of a step", str(size), "MiB", BARE, peaks))
    # the drop-in is installed for each wrapping, which would be what is measured
    wrapped = {name: values[1:] for name, values in wrapping.items() if name not in (BARE, CALLS, OURS)}
    memory.rows.append(Row.of("wrapping", str(size), "ms", FSDP1, wrapped, 1e3))
    return models


def _peak(model: nn.Module, x: Tensor, device: torch.device) -> float:
    """MiB that a step takes on top."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _step(model, x, device)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _captured_steps(models: dict[str, nn.Module], size: Size, device: torch.device) -> Table:
    x = size.input(device)
    graphs = {name: _captured(models[name], x, device) for name in (BARE, CALLS, RUNTIME)}
    replays: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(size.repeats):
        for name, graph in graphs.items():
            replays[name].append(statistics.median(_timed(graph.replay, device) for _ in range(size.rounds)))
    table = Table("captured", "a step, captured once as a CUDA graph and replayed", STEP)
    table.rows.append(Row.of("forward + backward", str(size), "ms", BARE, replays, 1e3, _targets(device)))
    return table


def _captured(model: nn.Module, x: Tensor, device: torch.device) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream(device)):  # so that no gradients are left of the stream of another step
        _step(model, x, device)
    with torch.cuda.graph(graph):
        model(x).sum().backward()
    return graph


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _timed(call: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def _step(model: nn.Module, x: Tensor, device: torch.device) -> float:
    taken = _timed(lambda: model(x).sum().backward(), device)
    model.zero_grad(set_to_none=True)
    return taken


def draw(tables: dict[str, Table], path: Path) -> None:
    """Draw the steps beside the bare module's."""
    if find_spec("matplotlib") is None:
        print(f"no {path.name}: matplotlib is not installed")
        return
    groups = {row.size.replace(", ", "\n"): picture.over_bare(row) for row in tables["step"].rows}
    title = "Time of a training step on a GPU, times that of the unsharded module (dotted); shorter is better"
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(picture.chart(title, "x", groups, over_bare=True), path)


if __name__ == "__main__":
    sys.exit(main())
