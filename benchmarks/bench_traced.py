"""t. Compiled training: the demo's model in 2 gloo processes, eager, compiled, and in one graph, in turn."""

import os
import shutil

from benchmarks import main
from benchmarks.bench_train import BLOCK, launched, train_in_turn
from benchmarks.contestants import AROUND, IN_UNITS, RUNTIME, TRACED
from benchmarks.rows import Row, Table
from examples.demo.config import Config

NAMES = (RUNTIME, IN_UNITS, AROUND, TRACED)
CLOSE = 1e-3  # of the losses of the first block: inductor's kernels round otherwise, and training makes more of it


def measure(quick: bool) -> Table:
    """Wall time of a step, processor time of the thread that trains, and the losses."""
    config = Config()
    table = Table(
        "t",
        "training the demo's model compiled, on 2 gloo processes",
        f"{config.depth} blocks of width {config.width}, AdamW, one thread a process; ratios to the eager runtime",
    )
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        table.note = "Left out: inductor needs a C++ compiler, g++ or the one that CXX names."
        return table
    with launched("benchmarks.demo_model", NAMES, config) as pairs:  # the first block compiles
        trained = train_in_turn(pairs, 4 if quick else 26)
    losses = {name: blocks[0] for name, blocks in trained.losses.items()}
    values = {name: found[-1] for name, found in losses.items()}
    row = Row(f"loss of step {BLOCK}", "", "", "", values, {}, digits=7)
    row.target = f"within {CLOSE} of the eager one in every step until then"
    pairs_of = [pair for name in NAMES for pair in zip(losses[name], losses[RUNTIME], strict=True)]
    row.met = all(abs(one - other) <= CLOSE * other for one, other in pairs_of)
    table.rows += [
        Row.of("a step", "wall time", "ms", RUNTIME, trained.seconds, 1e3),
        Row.of("a step", "its thread on a processor", "ms", RUNTIME, trained.host, 1e3),
        row,
    ]
    return table


if __name__ == "__main__":
    main.run_one(measure)
