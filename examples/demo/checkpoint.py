"""Checkpoints of the runs: those of ``flatparam.checkpoint``, and for torch's wrapper a file of the full state."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

import flatparam.checkpoint

from .config import PARTIAL

# No cpu_offload: of a model that is on the CPU already, torch's FSDP1 then returns views of memory that it frees.
FULL = StateDictOptions(full_state_dict=True)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Replace the checkpoint at ``path``, which is whole at every moment. A collective call."""
    if not isinstance(model, FullyShardedDataParallel):
        flatparam.checkpoint.save(path, model, optimizer, {"step": step}, overwrite=True)
        return
    # For a state that is not there yet torch takes a step, and leaves it counted.
    state = full_state(model, optimizer) if step else {"model": get_model_state_dict(model, options=FULL)}
    if dist.get_rank() == 0:
        write_atomically({"step": step, **state}, path)


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint into a model of any wrapper, or none; returns its step. A collective call."""
    if path.is_dir():
        step: int = flatparam.checkpoint.load(path, model, optimizer).extra["step"]
    else:
        state = read(path)
        step = state["step"]
        set_model_state_dict(model, state["model"], options=FULL)
        if step:
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FULL)
    return step


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return weights and optimizer state under the names of the plain model, on every rank. A collective call."""
    state: Any = get_state_dict(model, optimizer, options=FULL)
    weights, optimizer_state = state
    # With use_orig_params=False all parameters of a unit get one and the same step counter from torch. A plain
    # optimizer would count it up once for each of them, so each gets its own.
    for values in optimizer_state["state"].values():
        values["step"] = values["step"].clone()
    return {"model": weights, "optimizer": optimizer_state}


def write_atomically(state: dict[str, Any], path: Path) -> None:
    """Write ``state`` so that ``path`` is, at every moment, the old file or the new one, also after a power cut."""
    temporary = path.with_name(path.name + PARTIAL)
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path) -> dict[str, Any]:
    """Read a file of ``write_atomically``. It has tensors and plain values only, so it can run no code."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def difference(a: Any, b: Any) -> float:
    """Return the largest absolute difference of two states of the same structure; infinite if a value is not finite.

    It is 0 only where no bit differs: 0.0 and -0.0 differ by the least number above 0.

    Raises: ValueError when they do not have the same keys.
    """
    if isinstance(a, dict):
        if a.keys() != b.keys():
            raise ValueError(f"expected the same names in both states, got {sorted(a.keys() ^ b.keys())} in one only")
        return max((difference(value, b[name]) for name, value in a.items()), default=0.0)
    if a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
        return 0.0
    largest = (a.double() - b.double()).abs().max().item()
    return max(largest, math.ulp(0.0)) if math.isfinite(largest) else math.inf
