"""b. Forward and backward over the bare module, with collectives that do nothing: what sharding costs the host."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper

from benchmarks import main
from benchmarks.contestants import BARE, CONTESTANTS, FREE, FSDP1, FSDP1_FLAT, FSDP2, OURS, OURS_FLAT, RUNTIME, Wrapping
from benchmarks.measuring import clock, in_turn
from benchmarks.models import SHAPE, Stack, Unit
from benchmarks.rows import Row, Table, Target
from benchmarks.worlds import fake_world

NAMES = (BARE, FSDP1, FSDP1_FLAT, FSDP2, OURS, OURS_FLAT, FREE, RUNTIME)
WORLD = 8
SIZES = ((1, 400), (24, 12), (48, 10), (96, 16))  # (units, parameters of each)
OTHER_SIZES = ((1, 400), (48, 10))  # of the ways that are not plain fp32
BOUNDS = {(1, 400): 1.0, (24, 12): 3.0, (48, 10): 3.0}  # over the bare module, fp32


def measure(quick: bool) -> Table:
    """Every contestant on every size, in fp32, in bf16, and with activation checkpointing."""
    torch.set_num_threads(1)
    table = Table(
        "b",
        "forward + backward over the bare module, fake process group of 8",
        "parameters of 32 elements, one elementwise kernel each; ratios to the bare module, median (least-most)",
    )
    with fake_world(WORLD):
        for units, n in OTHER_SIZES if quick else SIZES:
            table.rows.append(_row("fp32", units, n, quick))
        for way in ("bf16", "fp32, checkpointed"):
            for units, n in OTHER_SIZES[: 1 if quick else None]:
                table.rows.append(_row(way, units, n, quick))
    return table


def _row(way: str, units: int, n: int, quick: bool) -> Row:
    low = torch.bfloat16 if way == "bf16" else None
    steps = {name: _step(wrapped(name, units, n, low, "checkpointed" in way), low) for name in NAMES}
    rounds = max(4, min(20, 4000 // (units * n)) // (6 if quick else 1))
    [(_, medians)] = in_turn(steps, 3 if quick else 5, rounds, warm_up=3).items()
    bound = BOUNDS.get((units, n)) if way == "fp32" else None
    targets = [] if bound is None else [Target(name, bound, text=f"<= {bound}") for name in (OURS, OURS_FLAT)]
    return Row.of(way, f"{units} x {n}", "ms", BARE, medians, 1e3, targets, units=units, parameters=n, world=WORLD)


def wrapped(name: str, units: int, n: int, low: torch.dtype | None, checkpointed: bool = False) -> nn.Module:
    """The model of ``units`` units with ``n`` parameters each, wrapped by the contestant ``name``."""
    model: nn.Module = Unit(n) if units == 1 else Stack(units, n)
    if checkpointed and isinstance(model, Stack):
        model.units = nn.ModuleList(checkpoint_wrapper(unit) for unit in model.units)
    elif checkpointed:
        model = checkpoint_wrapper(model)
    unit_type = CheckpointWrapper if checkpointed else Unit
    return CONTESTANTS[name](model, Wrapping((unit_type,), low))


def _step(model: nn.Module, low: torch.dtype | None) -> Callable[[], dict[str, float]]:
    x = torch.ones(SHAPE, dtype=low)

    def sample() -> dict[str, float]:
        start = clock()
        model(x).sum().backward()
        taken = clock() - start
        model.zero_grad(set_to_none=True)
        return {"step": taken}

    return sample


if __name__ == "__main__":
    main.run_one(measure)
