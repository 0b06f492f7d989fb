"""m. ``elastic.resize`` of a model to other ranks, beside a checkpoint that is saved and loaded there, in turn."""

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import main
from benchmarks.rows import Row, Table, Target
from benchmarks.worlds import Ranks
from flatparam import FullyShardedDataParallel, checkpoint, elastic

RANKS, FEWER, WIDTH = 4, 3, 1024
RESIZE, FILES = "resize", "save and load"
LAYER = 3 * 4 * WIDTH * (WIDTH + 1)  # bytes of a layer with Adam's state


def measure(quick: bool) -> Table:
    """Seconds of four ranks to three and back, until the slowest has its part."""
    table = Table(
        "m",
        f"a model moves from {RANKS} ranks to {FEWER}, and back",
        "parameters and Adam's state; processes on gloo, one thread each; models for the load are built before",
    )
    for layers in (4,) if quick else (32, 96):
        seconds: dict[str, dict[str, list[float]]] = {what: {RESIZE: [], FILES: []} for what in ("4 to 3", "3 to 4")}
        with Ranks(RANKS, serve, layers) as ranks:
            for _ in range(2 if quick else 5):
                for what, found in seconds.items():
                    for name, values in found.items():
                        values.append(max(ranks.ask(name, what)))
        held = f"{layers * LAYER / RANKS / 1e6:.0f} MB a rank"
        for what, found in seconds.items():
            targets = [Target(FILES, 4.0, at_least=True)]
            table.rows.append(Row.of(what, held, "s", RESIZE, found, targets=targets))
    return table


class _Model:
    """A model over some ranks, and its optimizer. ``is_here``: this rank is one of them."""

    def __init__(self, layers: int, ranks: range, group: Any):
        torch.manual_seed(0)
        module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.group, self.is_here = group, dist.get_rank() in ranks
        if self.is_here:
            for i, layer in enumerate(module):
                module[i] = FullyShardedDataParallel(layer, process_group=group)
            self.model = FullyShardedDataParallel(module, process_group=group)
            self.optimizer = torch.optim.Adam(self.model.parameters())
            self.model(torch.ones(2, WIDTH)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def serve(connection: Connection, folder: Path, layers: int) -> None:
    """Answer each command ``(way, move)`` with its seconds."""
    groups = {size: dist.new_group(list(range(size))) for size in (RANKS, FEWER)}
    moved = _Model(layers, range(RANKS), dist.group.WORLD)
    kept = {size: _Model(layers, range(size), group) for size, group in groups.items()}
    while True:
        way, what = connection.recv()
        before, after = map(int, what.split(" to "))
        dist.barrier()
        start = time.perf_counter()
        if way == RESIZE:
            elastic.resize(moved.model, moved.optimizer, range(after))
        else:
            _by_files(kept[before], kept[after], folder / "saved")
        dist.barrier()
        connection.send(time.perf_counter() - start)


def _by_files(source: _Model, target: _Model, path: Path) -> None:
    if source.is_here:
        checkpoint.save(path, source.model, source.optimizer, process_group=source.group, overwrite=True)
    dist.barrier()
    if target.is_here:
        checkpoint.load(path, target.model, target.optimizer, process_group=target.group)


if __name__ == "__main__":
    main.run_one(measure)
