"""Programs that train and save a checkpoint after each step, and what must be on the disk afterwards."""

from pathlib import Path

import torch

from flatparam import checkpoint

from .faulty_programs import LR, STEPS, batch, model, unsharded, wrapped

NAME = "checkpoint"


def train_and_save(rank, folder, strategy="FULL_SHARD", in_background=False):
    """Train, and save after each step. A save that fails is caught, as by users who save again later.

    Returns by step: None, or class and text of the error.
    """
    net = wrapped(strategy)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    found = []
    for step in range(STEPS):
        net(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        error = None
        try:
            arguments = Path(folder, NAME), net, optimizer, {"steps": step + 1}
            if in_background:
                checkpoint.async_save(*arguments, overwrite=True).wait()
            else:
                checkpoint.save(*arguments, overwrite=True)
        except (checkpoint.CheckpointError, OSError) as raised:
            error = type(raised).__name__, str(raised)
        found.append(error)
    return found


def save_at_once(rank, folder):
    """Save before any unit is built: a rank that is lost before that has shown no sign of life to the others."""
    checkpoint.save(Path(folder, NAME), model())


def steps_on_disk(folder, size):
    """Return after how many steps the checkpoint in ``folder`` was saved; 0: there is none.

    Raises: CheckpointError, AssertionError if it is not whole, or has other values than these steps give.
    """
    path = Path(folder, NAME)
    if not path.exists():
        return 0
    checkpoint.verify(path)
    net = model()
    steps = checkpoint.load(path, net).extra["steps"]
    expected = unsharded(size, range(steps, STEPS))
    assert all(map(torch.equal, (param.detach() for param in net.parameters()), expected)), f"not those of step {steps}"
    return steps


def leftovers(folder):
    return sorted(path.name for path in Path(folder).iterdir() if path.name != NAME)
