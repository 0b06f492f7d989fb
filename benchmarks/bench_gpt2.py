"""k. Host time of a real model: transformers' GPT-2 in 2 gloo processes, four steps of each contestant in turn."""

import importlib.util

from benchmarks import main
from benchmarks.bench_train import launched, train_in_turn
from benchmarks.contestants import BARE, FSDP1, FSDP1_FLAT, FSDP2, OURS, OURS_FLAT, RUNTIME
from benchmarks.rows import Row, Table, Target
from examples.demo.config import Config

NAMES = (BARE, OURS, OURS_FLAT, RUNTIME, FSDP1, FSDP1_FLAT, FSDP2)
SIZES = Config(depth=12, width=64, context=32, batch=2)
MOST_OF_BARE, MOST_OF_FSDP1 = 1.3, 0.8


def measure(quick: bool) -> Table:
    """Processor time of the thread that trains, optimizer included, and tokens a second."""
    tokens = SIZES.ranks * SIZES.batch * SIZES.context
    table = Table(
        "k",
        "training transformers' GPT-2 on 2 gloo processes",
        f"{SIZES.depth} layers of width {SIZES.width}, {tokens} tokens a step, AdamW, one thread a process",
    )
    if importlib.util.find_spec("transformers") is None:
        table.note = "Left out: transformers is not installed (pip install flatparam[bench])."
        return table
    with launched("benchmarks.gpt2_model", NAMES, SIZES) as pairs:
        losses, seconds, host, _ = train_in_turn(pairs, 5 if quick else 31)
    table.rows += [
        Row.of("host time of a step", "of bare", "ms", BARE, host, 1e3, [Target(RUNTIME, MOST_OF_BARE)]),
        Row.of("host time of a step", "of FSDP1", "ms", FSDP1, host, 1e3, [Target(OURS, MOST_OF_FSDP1)]),
        Row.of("tokens a second", "", "", FSDP1, {name: [tokens / taken for taken in seconds[name]] for name in NAMES}),
        _losses(losses),
    ]
    return table


def _losses(losses: dict[str, list[list[float]]]) -> Row:
    wrapped = {name: blocks for name, blocks in losses.items() if name != BARE}  # bare: each process by itself
    row = Row("loss of the last step", "", "", "", {name: blocks[-1][-1] for name, blocks in wrapped.items()}, {})
    row.digits, row.target = 17, "no digit differs in any step"
    row.met = all(blocks == losses[FSDP1] for blocks in wrapped.values())
    return row


if __name__ == "__main__":
    main.run_one(measure)
