"""Whether all ranks have built the same unit: found out before they talk past each other."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from .unit import Options, Original

_WORDS = 4


def check_same_unit(name: str, originals: list[Original], options: Options) -> None:
    """Compare a unit over the groups it is spread over. A collective call of 32 bytes.

    Raises: ValueError on all ranks alike, naming the first rank and parameter that differ from those of rank 0.
    """
    described = _describe(name, originals, options)
    digest = hashlib.sha256(repr(described).encode()).digest()
    words = [int.from_bytes(digest[8 * i : 8 * i + 8], "little", signed=True) for i in range(_WORDS)]
    for group in (options.placement.optim, options.placement.replicate):
        if group is None:
            continue
        device = dist.distributed_c10d._get_object_coll_device(group)
        mine = torch.tensor(words, dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        if any(not torch.equal(mine, other) for other in everyone):
            _explain(described, group)


def _describe(name: str, originals: list[Original], options: Options) -> list[tuple[str, str]]:
    """``(name, what it is)`` of everything that must be the same on all ranks."""
    placement, precision = options.placement, options.mixed_precision
    settings = (
        f"{placement.shards} shards, {placement.replicas} replicas, parameters over {placement.param_shards}, "
        f"nested={placement.outer is not None}, full_precision={placement.full_precision}, reshard_after_forward="
        f"{placement.reshard_after_forward}, use_orig_params={options.use_orig_params}, segments={options.segments}, "
        f"param_dtype={precision.param_dtype}, reduce_dtype={precision.reduce_dtype}, "
        f"shard_alignment={options.shard_alignment}, atomic={options.atomic is not None}"
    )
    return [
        (name, settings),
        *(
            (
                f"parameter `{original.fqn}`",
                f"shape {tuple(original.shape)}, strides {original.stride}, {original.param.dtype}, "
                f"requires_grad={original.param.requires_grad}, {len(original.names)} names, "
                f"blocks of {original.block}",
            )
            for original in originals
        ),
    ]


def _explain(described: list[tuple[str, str]], group: dist.ProcessGroup) -> None:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, described, group=group)
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for i in range(max(len(first), len(other))):
            expected, found = (side[i] if i < len(side) else ("nothing", "-") for side in (first, other))
            if expected != found:
                raise ValueError(
                    f"the ranks have built different units: rank 0 has {expected[0]} ({expected[1]}), rank {rank} has "
                    f"{found[0]} ({found[1]})"
                )
