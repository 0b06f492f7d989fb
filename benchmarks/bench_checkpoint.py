"""j. Checkpoints: saved and loaded by 2 ranks, against torch's; planned for many ranks."""

import time

import torch

from benchmarks import checkpoint_worker, main
from benchmarks.checkpoint_worker import COPY, FSDP1, FSDP2, OURS, WIDTH
from benchmarks.measuring import turned
from benchmarks.rows import Row, Table, Target
from benchmarks.worlds import Ranks, fake_world
from flatparam import FullyShardedDataParallel
from flatparam.checkpoint.files import Chunk
from flatparam.checkpoint.model_plan import ModelPlan
from flatparam.checkpoint.pieces import all_held
from flatparam.checkpoint.planning import plan_save
from flatparam.checkpoint.reading import Source
from flatparam.common.dense import Dense

RANKS = 2
NAMES = (OURS, FSDP1, FSDP2, COPY)
PLANS = ((64, 48, 1.0), (1024, 768, 10.0))


def measure(quick: bool) -> Table:
    """Seconds and memory of a save and a load; seconds of planning."""
    layers = 16 if quick else 360
    bytes_ = layers * (WIDTH + 1) * WIDTH * 4 * 3
    table = Table(
        "j",
        "checkpoints of 2 ranks, parameters and Adam's state",
        f"{bytes_ / 1e9:.2f} GB in {layers} units of {WIDTH} x {WIDTH}; down to the disk (fsync); one thread a process",
    )
    found: dict[str, dict[str, list[tuple[float, int]]]] = {name: {"save": [], "load": []} for name in NAMES}
    for turn in range(1 if quick else 3):
        for name in turned(NAMES, turn):
            for what, value in _run(name, layers).items():
                found[name][what].append(value)
    for what in ("save", "load"):
        names = [name for name in NAMES if what == "save" or name != COPY]
        seconds = {name: [value for value, _ in found[name][what]] for name in names}
        targets = [Target(FSDP1, 1.0, at_least=True), Target(FSDP2, 1.0, at_least=True)]
        if what == "save":
            targets.append(Target(COPY, 0.8, at_least=True, text="a plain write >= 0.8 of ours"))
        table.rows.append(Row.of(what, f"{bytes_ / 1e9:.2f} GB", "s", OURS, seconds, targets=targets))
        peaks = {name: [max(1.0, value) for _, value in found[name][what]] for name in names}
        table.rows.append(Row.of(f"memory of a {what}", "", "MiB", OURS, peaks, scale=2**-20))
    table.rows += [_planning(*plan) for plan in PLANS[: 1 if quick else None]]
    return table


def _run(name: str, layers: int) -> dict[str, tuple[float, int]]:
    """The slower rank's seconds, the larger one's peak."""
    with Ranks(RANKS, checkpoint_worker.serve, name, layers) as ranks:
        answers = ranks.answers()
    return {
        what: (max(answer[what][0] for answer in answers), max(answer[what][1] for answer in answers))
        for what in ("save", "load")
    }


def _planning(saved: int, loading: int, most: float) -> Row:
    """10,000 parameters saved by some ranks, planned for one of others."""
    source = Source()
    source.optimizer = {}
    with fake_world(saved):
        model = _many()
        start = time.perf_counter()
        plan_save(model, None, None, 0)
        planning_save = time.perf_counter() - start
        source.model = _as_saved(model)
    with fake_world(loading):
        model = _many()
        start = time.perf_counter()
        targets = ModelPlan(model)
        targets.plan(list(all_held(model)), source)
        seconds = time.perf_counter() - start
    boxes = sum(map(len, source.model.values()))
    row = Row.of(
        f"planning 10,000 parameters, {saved} ranks to {loading}",
        f"{boxes} boxes",
        "s",
        "load",
        {"save": [planning_save], "load": [seconds]},
        reads=len(targets.reads),
    )
    row.target = f"load < {most:g} s"
    row.met = seconds < most
    return row


def _many() -> FullyShardedDataParallel:
    units = [torch.nn.ParameterList(torch.empty(64, 24) for _ in range(100)) for _ in range(100)]
    wrapped = [FullyShardedDataParallel(torch.nn.Sequential(unit), check_values=False) for unit in units]
    return FullyShardedDataParallel(torch.nn.Sequential(*wrapped), check_values=False)


def _as_saved(model: FullyShardedDataParallel) -> dict[str, list[Chunk]]:
    """The boxes of all ranks."""
    found: dict[str, list[Chunk]] = {}
    for piece in model.shard_map():
        dense = Dense.of(piece.shape, torch.empty(piece.shape, device="meta").stride())
        for box in dense.boxes(piece.start, piece.start + piece.numel):
            chunk = Chunk(f"{piece.rank}", "F32", piece.shape, box.offsets, box.sizes, 0)
            found.setdefault(piece.fqn, []).append(chunk)
    return found


if __name__ == "__main__":
    main.run_one(measure)
