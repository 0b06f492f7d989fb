"""y. The demo's language model in 2 gloo processes beside DeepSpeed, if it is installed; four steps of each in turn."""

import importlib.util
from collections.abc import Mapping, Sequence

from benchmarks import main
from benchmarks.bench_train import launched, train_in_turn
from benchmarks.contestants import RUNTIME, ZERO_1, ZERO_STAGE_1, ZERO_STAGE_3
from benchmarks.rows import Row, Table, Target
from examples.demo.config import Config

PAIRS = {ZERO_STAGE_3: RUNTIME, ZERO_STAGE_1: ZERO_1}  # theirs: ours, which shards as much
MOST = {(ZERO_STAGE_3, 1): 0.75, (ZERO_STAGE_3, 8): 0.85, (ZERO_STAGE_1, 1): 0.9, (ZERO_STAGE_1, 8): 0.9}  # by batch
CLOSE = 1e-2  # ZeRO-3 adds in another order


def measure(quick: bool) -> Table:
    """Processor time of all threads of both ranks, tokens a second, memory and losses."""
    table = Table(
        "y",
        "training the demo's model on 2 gloo processes, beside DeepSpeed",
        "AdamW (fused), one thread a process; ratios to the same stage of ZeRO\n"
        "processor time: of all threads of both ranks; peak: of a rank's resident memory over that before the model",
    )
    if importlib.util.find_spec("deepspeed") is None:
        table.note = "Left out: deepspeed is not installed (pip install --no-build-isolation deepspeed)."
        return table
    for batch in (1, 8):
        config = Config(batch=batch)
        tokens = config.ranks * batch * config.context
        with launched("benchmarks.demo_model", [*PAIRS, *PAIRS.values()], config) as pairs:
            trained = train_in_turn(pairs, 4 if quick else 16)
            peaks = {name: [max(pair.ask("peak"))] for name, pair in pairs.items()}
        rates = {name: [tokens / taken for taken in values] for name, values in trained.seconds.items()}
        for theirs in PAIRS:
            size = f"batch {batch}"
            table.rows += [
                _beside(theirs, "processor time of a step", size, "ms", trained.work, 1e3, MOST[theirs, batch]),
                _beside(theirs, "tokens a second", size, "", rates),
                _beside(theirs, "peak of the larger rank", size, "MiB", peaks, most=1.0),
            ]
        last = {name: blocks[-1][-1] for name, blocks in trained.losses.items()}
        row = Row("loss of the last step", f"batch {batch}", "", "", last, {}, digits=7)
        row.target, row.met = f"within {CLOSE}", max(last.values()) - min(last.values()) <= CLOSE
        table.rows.append(row)
    return table


def _beside(
    theirs: str,
    what: str,
    size: str,
    unit: str,
    values: Mapping[str, Sequence[float]],
    scale: float = 1.0,
    most: float | None = None,
) -> Row:
    ours = PAIRS[theirs]
    targets = [] if most is None else [Target(ours, most)]
    return Row.of(what, size, unit, theirs, {name: values[name] for name in (theirs, ours)}, scale, targets)


if __name__ == "__main__":
    main.run_one(measure)
