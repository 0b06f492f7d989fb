"""A checkpoint that is whole or absent: full weights and optimizer state, by name, for a plain module."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from flatparam import FullyShardedDataParallel
from flatparam.demo.config import PARTIAL

FLAT_PARAM, WRAPPED = "_flat_param", "_fsdp_wrapped_module."

# No cpu_offload: of a model that is on the CPU already, torch's FSDP1 then returns views of memory that it frees.
FULL = StateDictOptions(full_state_dict=True)


def gather(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The full state of a plain or sharded model; on every rank. A collective call."""
    if isinstance(model, FullyShardedDataParallel):
        moments = full_moments(model, optimizer)
        [group] = optimizer.param_groups
        return {
            "model": model.state_dict(),
            "optimizer": {"state": moments, "param_groups": [{**group, "params": list(moments)}]},
        }
    state: Any = get_state_dict(model, optimizer, options=FULL)
    weights, optimizer_state = state
    # With use_orig_params=False all parameters of a unit get one and the same step counter from torch. A plain
    # optimizer would count it up once for each of them, so each gets its own.
    for values in optimizer_state["state"].values():
        values["step"] = values["step"].clone()
    return {"model": weights, "optimizer": optimizer_state}


def full_moments(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state of each parameter by name, put together from every rank's pieces. A collective call."""
    held = [
        (name.replace(WRAPPED, "").removesuffix(FLAT_PARAM), optimizer.state[param])
        for name, param in model.named_parameters()
        if param in optimizer.state
    ]
    ranks: list[Any] = [None] * model.world_size
    dist.all_gather_object(ranks, dict(held), group=model.process_group)
    full: dict[str, dict[str, Tensor]] = {}
    for piece in model.shard_map():
        moments = full.setdefault(piece.fqn, {})
        owner = max((name for name in ranks[piece.rank] if piece.fqn.startswith(name)), key=len)
        for key, value in ranks[piece.rank][owner].items():
            if value.dim() == 0:
                moments[key] = value.clone()
            else:
                whole = moments.setdefault(key, value.new_empty(piece.shape))
                start = 0 if owner == piece.fqn else piece.flat_start
                whole.view(-1)[piece.start :][: piece.numel] = value.flatten()[start:][: piece.numel]
    return full


def restore(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a state from ``gather`` into a plain model and its new optimizer."""
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


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


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint; tensors and plain values only, so that a file can run no code."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def difference(a: Any, b: Any) -> float:
    """The largest absolute difference of two states of the same structure; infinite where one is not finite.

    Raises: ValueError when they do not have the same keys.
    """
    if isinstance(a, dict):
        if a.keys() != b.keys():
            raise ValueError(f"expected the same names in both states, got {sorted(a.keys() ^ b.keys())} in one only")
        return max((difference(value, b[name]) for name, value in a.items()), default=0.0)
    if torch.equal(a, b):
        return 0.0
    largest = (a.double() - b.double()).abs().max().item()
    return largest if math.isfinite(largest) else math.inf
