"""t. Compiled training: the demo's model in 2 gloo processes, eager, compiled, and in one graph, in turn."""

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks import main
from benchmarks.bench_train import BLOCK, Pair
from benchmarks.contestants import AROUND, IN_UNITS, RUNTIME, TRACED
from benchmarks.rows import Row, Table
from flatparam.demo.config import Config

NAMES = (RUNTIME, IN_UNITS, AROUND, TRACED)
CLOSE = 1e-3  # of the losses of the first block: inductor's kernels round otherwise, and training makes more of it


def measure(quick: bool) -> Table:
    """Wall time of a step, processor time of the thread that trains, and the losses."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config = Config()
    table = Table(
        "t",
        "training the demo's model compiled, on 2 gloo processes",
        f"{config.depth} blocks of width {config.width}, AdamW, one thread a process; ratios to the eager runtime",
    )
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        table.note = "Left out: inductor needs a C++ compiler, g++ or the one that CXX names."
        return table
    with tempfile.TemporaryDirectory(prefix="flatparam-bench-") as folder, ExitStack() as stack:
        pairs = {name: stack.enter_context(Pair("benchmarks.demo_model", name, config, Path(folder))) for name in NAMES}
        seconds: dict[str, list[float]] = {name: [] for name in NAMES}
        host: dict[str, list[float]] = {name: [] for name in NAMES}
        losses: dict[str, list[float]] = {name: [] for name in NAMES}
        for turn in range(4 if quick else 26):
            for name in NAMES[turn % len(NAMES) :] + NAMES[: turn % len(NAMES)]:
                answers = pairs[name].ask("train", turn * BLOCK, BLOCK)
                if turn == 0:
                    losses[name] = [loss for rank in answers for loss in rank[0]]
                else:  # the first block compiles
                    seconds[name].append(max(taken for _, taken, _ in answers) / BLOCK)
                    host[name].append(max(worked for _, _, worked in answers) / BLOCK)
    values = {name: found[-1] for name, found in losses.items()}
    row = Row(f"loss of step {BLOCK}", "", "", "", values, {}, digits=7)
    row.target = f"within {CLOSE} of the eager one in every step until then"
    pairs_of = [pair for name in NAMES for pair in zip(losses[name], losses[RUNTIME], strict=True)]
    row.met = all(abs(one - other) <= CLOSE * other for one, other in pairs_of)
    table.rows += [
        Row.of("a step", "wall time", "ms", RUNTIME, seconds, 1e3),
        Row.of("a step", "its thread on a processor", "ms", RUNTIME, host, 1e3),
        row,
    ]
    return table


if __name__ == "__main__":
    main.run_one(measure)
