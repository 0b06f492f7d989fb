"""c. Wrapping a large module as one unit: time, and the peak of resident memory over what the module itself takes."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from benchmarks import main, memory
from benchmarks.contestants import CONTESTANTS, FSDP1, FSDP1_FLAT, FSDP2, OURS, OURS_FLAT, RUNTIME, Wrapping, installed
from benchmarks.measuring import clock
from benchmarks.memory import MIB
from benchmarks.rows import Row, Table, Target
from benchmarks.worlds import fake_world

WORLD = 8
WIDTH = 2048  # each layer's weight takes 16 MiB
SIZES = (768, 3072)  # MiB
ALLOWED = 32  # MiB over the shard and the largest parameter
NAMES = (OURS, OURS_FLAT, RUNTIME, FSDP1, FSDP1_FLAT, FSDP2)


class Layers(nn.Module):
    """``mib`` MiB of fp32 weights and a bias for each."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        for i in range(mib * MIB // (4 * WIDTH * WIDTH)):
            layer = nn.Linear(WIDTH, WIDTH, device="meta").to_empty(device="cpu")
            nn.init.constant_(layer.weight, 1.0 + i)  # touches every page
            nn.init.constant_(layer.bias, -1.0 - i)
            self.add_module(f"layer{i}", layer)


def measure(quick: bool) -> Table:
    """Each wrapping in a process of its own, contestants in turn."""
    table = Table(
        "c",
        "wrapping a module as one unit of 8 ranks",
        "fp32, weights of 16 MiB and their biases; each in a process of its own, after a small one;\n"
        "peak: of resident memory over that of the unwrapped module",
    )
    for mib in SIZES[: 1 if quick else None]:
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(3 if mib < 1024 and not quick else 2):
            for name in NAMES:
                found.setdefault(name, []).append(_in_a_process(name, mib))
        table.rows += _rows(mib, found)
    return table


def _rows(mib: int, found: dict[str, list[dict[str, float]]]) -> list[Row]:
    ours = (OURS, OURS_FLAT, RUNTIME)
    size = f"{mib} MiB"
    peaks = {name: [each["peak"] for each in taken] for name, taken in found.items()}
    allowed = mib / WORLD + 4 * WIDTH * WIDTH / MIB + ALLOWED
    peak = Row.of("peak over base", size, "MiB", FSDP2, peaks, allowed=allowed)
    peak.target = f"<= {allowed:.0f} MiB"
    peak.met = all(peak.values[name] <= allowed for name in ours)
    times = {name: [each["seconds"] for each in taken] for name, taken in found.items()}
    targets = [Target(name, 1.0, text="") for name in ours]
    time = Row.of("time", size, "s", FSDP2, times, 1.0, targets)
    time.target = "<= FSDP2's"
    return [peak, time]


def _in_a_process(name: str, mib: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.bench_wrap", "--wrap", name, str(mib)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def wrap(name: str, mib: int) -> dict[str, float]:
    """Wrap such a module in this process; returns seconds, and MiB of the peak over base and of what stays over it."""
    torch.set_num_threads(1)
    with fake_world(WORLD), installed() if name in (OURS, OURS_FLAT) else nullcontext():
        CONTESTANTS[name](nn.Linear(8, 8), Wrapping(()))  # what is imported and made once
        module = Layers(mib)
        assert memory.reset_peak(), "the peak of resident memory cannot be reset here (/proc/self/clear_refs)"
        base = memory.resident()
        start = clock()
        wrapped = CONTESTANTS[name](module, Wrapping(()))
        taken = clock() - start
        peak = memory.peak() - base
        del module
        stays = memory.resident() - base
        held = sum(parameter.numel() for parameter in wrapped.parameters())
        assert held > 0
        return {"seconds": taken, "peak": peak / MIB, "stays": stays / MIB}


if __name__ == "__main__":
    if "--wrap" in sys.argv:
        print(json.dumps(wrap(sys.argv[2], int(sys.argv[3]))))
    else:
        main.run_one(measure)
