"""What many ranks cost: ``python -m tests.simulation.scale [SIZE ...]`` prints how costs grow with the world size.

A model of four units is built, trained for three steps, saved and loaded. For each of these the table has calls to the
store a rank, the bytes of values that went there and came from it, and milliseconds of the processor a rank. These
include the simulation's own, which copies each all-gather's output to each rank.
"""

import resource
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint

WIDTH, UNITS = 16, 4
PHASES = ("build", "first step", "second step", "third step", "save", "load")


def _now():
    """Return calls to the store, their bytes, seconds of the processor, and MiB of the process, all ranks together."""
    import _simulated_world

    used = resource.getrusage(resource.RUSAGE_SELF)
    return (*_simulated_world.calls(), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def live(rank, folder):
    """Build, train, save and load; rank 0 returns ``_now()`` at the beginning and after each phase."""
    costs = []

    def end_phase():
        dist.barrier()
        costs.append(_now())
        dist.barrier()

    end_phase()
    torch.manual_seed(0)  # no other rank runs before all values are drawn
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(UNITS)]
    model = FSDP(nn.Sequential(*map(FSDP, layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    end_phase()
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        end_phase()
    checkpoint.save(folder, model, optimizer)
    end_phase()
    checkpoint.load(folder, model, optimizer)
    end_phase()
    return costs if rank == 0 else None


def rows(size):
    """Return for each phase ``(calls, bytes, milliseconds)`` a rank, and the MiB a rank at the end."""
    from tests.simulation.process import simulated

    with tempfile.TemporaryDirectory() as folder:
        run = simulated(live, size, 0, str(Path(folder, "saved")), limit=1e5, timeout=1e4, switches=4)
    assert run.reason == 0, run.stacks
    assert not run.errors, next(iter(run.errors.values()))
    costs = run.results[0]
    found = {}
    for phase, before, after in zip(PHASES, costs, costs[1:], strict=False):
        calls, size_of, seconds, _ = (b - a for a, b in zip(before, after, strict=True))
        found[phase] = (calls / size, size_of / size, 1e3 * seconds / size)
    return found, (costs[-1][3] - costs[0][3]) / size


def main(sizes):
    print("| ranks | " + " | ".join(PHASES) + " | MiB |\n|" + "---|" * (len(PHASES) + 2))
    for size in sizes:
        found, memory = rows(size)
        cells = [f"{calls:.1f} calls, {size_of:.0f} B, {ms:.1f} ms" for calls, size_of, ms in found.values()]
        print(f"| {size} | " + " | ".join(cells) + f" | {memory:.2f} |", flush=True)


if __name__ == "__main__":
    sys.modules["tests.simulation.scale"] = sys.modules["__main__"]
    live.__module__ = "tests.simulation.scale"
    main([int(size) for size in sys.argv[1:]] or [4, 16, 64])
