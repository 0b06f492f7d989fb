"""o. A step of AdamW over pieces that lie side by side, beside torch's fused step over one flat tensor.

DeepSpeedCPUAdam is compiled at its first use, where deepspeed and ninja are installed.
"""

import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import main
from benchmarks.measuring import in_turn, seconds
from benchmarks.rows import Row, Table, Target
from benchmarks.worlds import Ranks
from flatparam import optim

FLAT, OURS, DEEPSPEED = "torch fused, one tensor", "flatparam.optim", "DeepSpeedCPUAdam"
KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    OURS: optim.AdamW,
    "torch fused": lambda params: torch.optim.AdamW(params, fused=True),
    "torch foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "torch loop": torch.optim.AdamW,
}
SIZES = ((480, 10, 1_000), (4_000, 4_000, 256), (4_000, 4_000, 1_000), (4_000, 4_000, 4_000))
RANKS, PIECES, NUMEL, STEPS = 8, 4_000, 4_000, 10  # of ranks at once
PROMISED = {1_000: 1.5, 4_000: 1.1}  # by elements of a piece, where all 4,000 are one run


def measure(quick: bool) -> Table:
    """Milliseconds a step, by number and length of pieces."""
    torch.set_num_threads(1)
    table = Table(
        "o",
        "the optimizer over pieces",
        "milliseconds a step of AdamW in fp32, one thread; ratios to torch's fused step over one flat tensor",
    )
    every = KINDS
    if importlib.util.find_spec("deepspeed") and importlib.util.find_spec("ninja"):
        every = KINDS | {DEEPSPEED: _with_deepspeed}
    else:
        table.note += f"\n{DEEPSPEED} is left out: pip install --no-build-isolation deepspeed ninja"
    for pieces, together, numel in SIZES[:3] if quick else SIZES:
        kinds = {name: _stepper(make, pieces, together, numel) for name, make in every.items()}
        kinds[FLAT] = _stepper(KINDS["torch fused"], 1, 1, pieces * numel)
        samples = {name: lambda step=step: {"step": seconds(step)} for name, step in kinds.items()}
        taken = in_turn(samples, 3 if quick else 5, 5 if quick else 10)["step"]
        targets = [Target(OURS, PROMISED[numel])] if numel in PROMISED and together == pieces else []
        size = f"{pieces:,} pieces of {numel:,}, {together:,} side by side"
        table.rows.append(Row.of("AdamW", size, "ms", FLAT, taken, 1e3, targets, pieces=pieces, numel=numel))
    table.rows.append(_together(quick))
    return table


def _with_deepspeed(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    os.environ["DS_ACCELERATOR"] = "cpu"
    adam = importlib.import_module("deepspeed.ops.adam")
    made: torch.optim.Optimizer = adam.DeepSpeedCPUAdam(params, adamw_mode=True, weight_decay=0.01)
    return made


def _together(quick: bool) -> Row:
    """Processor time of ranks of one thread that step their parts at once, as offloaded shards are stepped."""
    taken: dict[str, list[float]] = {OURS: [], FLAT: []}
    for _ in range(1 if quick else 3):
        for name, size in ((OURS, RANKS), (FLAT, 1)):
            with Ranks(size, serve, name) as ranks:
                taken[name].append(sum(ranks.answers()))
    shown = f"{RANKS} ranks at once, {PIECES // RANKS} pieces of {NUMEL:,} each; beside one process"
    return Row.of("AdamW, in all", shown, "ms", FLAT, taken, 1e3, [Target(OURS, PROMISED[NUMEL])])


def serve(connection: Connection, folder: Path, name: str) -> None:
    """Send the processor time of a step of this rank's share of all pieces."""
    pieces = PIECES // dist.get_world_size()
    step = _stepper(KINDS[OURS], pieces, pieces, NUMEL)
    if name == FLAT:
        step = _stepper(KINDS["torch fused"], 1, 1, pieces * NUMEL)
    step()
    dist.barrier()
    start = time.process_time()
    for _ in range(STEPS):
        step()
    connection.send((time.process_time() - start) / STEPS)


def _stepper(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], pieces: int, together: int, numel: int
) -> Callable[[], object]:
    params = []
    for _ in range(pieces // together):
        flat, grad = torch.randn(together * numel), torch.randn(together * numel)
        for data, piece in zip(flat.split(numel), grad.split(numel), strict=True):
            param = nn.Parameter(data)
            param.grad = piece
            params.append(param)
    return make(params).step


if __name__ == "__main__":
    main.run_one(measure)
