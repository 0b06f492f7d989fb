"""l. Reductions on gloo: the runtime's, averaged or added in one order, beside gloo's reduce-scatter and all-reduce."""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import main
from benchmarks.measuring import in_turn
from benchmarks.rows import Row, Table, Target
from benchmarks.worlds import Ranks
from flatparam import FullyShardedDataParallel, ShardingStrategy
from flatparam.fsdp.desync.torch_collectives import reduce_scatter

REDUCE_SCATTER, ALL_REDUCE = "gloo reduce-scatter", "gloo all-reduce"
RUNTIME, ORDERED = "flatparam runtime", "flatparam ordered"
RANKS = (2, 3, 4)
SIZES = (10, 100, 1024, 4096, 10 * 1024, 50 * 1024)  # KiB
BOUND = 0.8  # of gloo's reduce-scatter, for two ranks


class Given(torch.autograd.Function):
    """A gradient that costs nothing to compute."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return ctx.gradient, None


class Weight(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = Given.apply(self.weight, gradient)
        return loss


def _timed(before: Callable[[], Callable[[], object]]) -> Callable[[], dict[str, float]]:
    """Samples of the call that ``before`` returns, from a moment when all ranks have come."""

    def sample() -> dict[str, float]:
        call = before()
        dist.barrier()
        start = time.perf_counter()
        call()
        return {"reduction": time.perf_counter() - start}

    return sample


def _contestants(kib: int) -> dict[str, Callable[[], dict[str, float]]]:
    ranks = dist.get_world_size()
    whole = torch.ones(kib * 256 // ranks * ranks)
    part, world = torch.empty(len(whole) // ranks), dist.group.WORLD
    assert world is not None

    def wrapped(reduction: Literal["ordered"] | None) -> Callable[[], Callable[[], object]]:
        strategy = ShardingStrategy.SHARD_GRAD_OP
        model = FullyShardedDataParallel(Weight(len(whole)), sharding_strategy=strategy, reduction=reduction)

        def backward() -> Callable[[], object]:
            model.zero_grad()
            return model(whole).backward  # type: ignore[no-any-return]

        return backward

    return {
        REDUCE_SCATTER: _timed(lambda: lambda: reduce_scatter(part, whole.clone(), world)),
        ALL_REDUCE: _timed(lambda: lambda: dist.all_reduce(whole.clone())),
        RUNTIME: _timed(wrapped(None)),
        ORDERED: _timed(wrapped("ordered")),
    }


def serve(connection: Connection, folder: Path, sizes: tuple[int, ...], quick: bool) -> None:
    """Send the medians of each of ``sizes``."""
    for kib in sizes:
        [(_, medians)] = in_turn(_contestants(kib), 3, 2 if quick else max(2, min(20, 4096 // kib)), 1).items()
        connection.send(medians)


def measure(quick: bool) -> Table:
    """Seconds of the slowest rank, by ranks and sizes."""
    table = Table(
        "l",
        "reductions of fp32 gradients on gloo, on one machine",
        "wall time of the slowest rank: a backward, and calls on a new copy of the gradient, as a backward packs it",
    )
    sizes = SIZES[::2] if quick else SIZES
    for size in RANKS[1:2] if quick else RANKS:
        with Ranks(size, serve, sizes, quick) as ranks:
            for kib in sizes:
                of_ranks = ranks.answers()
                slowest = {
                    name: [max(values) for values in zip(*(found[name] for found in of_ranks), strict=True)]
                    for name in of_ranks[0]
                }
                targets = [Target(RUNTIME, BOUND, text=f"<= {BOUND}")] if size == 2 and kib >= 1024 else []
                shown = f"{size} ranks, {kib} KiB"
                table.rows.append(Row.of("reduction", shown, "ms", REDUCE_SCATTER, slowest, 1e3, targets, ranks=size))
    return table


if __name__ == "__main__":
    main.run_one(measure)
