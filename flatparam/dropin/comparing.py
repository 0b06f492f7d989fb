"""Whether all ranks have the same flat parameter: found out before the first of its collectives.

Ranks that differ would crash in it, where sizes differ, or train a mixture. torch compares indices of parameters, with
TORCH_DISTRIBUTED_DEBUG alone.
"""

from typing import Any

import torch
import torch.distributed as dist

from ..common.collectives import all_gather_beside
from ..common.described import Described, digest_of_said, first_difference

_WORDS = 4  # of 8 bytes in a digest


def check_same_on_all_ranks(handle: Any) -> None:
    """Compare ``handle`` over its group. A collective call of 32 bytes, past ``torch.distributed``'s functions.

    Raises: ValueError on all ranks alike, naming the first rank and parameter that differ from the first rank's.
    """
    group = handle.process_group
    said = _describe(handle)
    digest = digest_of_said(said)
    words = [int.from_bytes(digest[8 * i : 8 * i + 8], "little", signed=True) for i in range(_WORDS)]
    everyone = all_gather_beside(torch.tensor(words, device=handle.device), group)
    if everyone is None or all(other == words for other in everyone):
        return
    told: list[Any] = [None] * handle.world_size
    dist.all_gather_object(told, said, group)
    raise ValueError(
        handle._about(
            "the ranks have built different units: "
            f"{first_difference(dist.get_process_group_ranks(group), told)}. Build the same model, with the same "
            "settings, on every rank"
        )
    )


def _describe(handle: Any) -> Described:
    flat_param = handle.flat_param
    settings = (
        f"{handle._sharding_strategy.name}, {handle.world_size} ranks, {handle._orig_param_dtype}, "
        f"use_orig_params={handle._use_orig_params}, param_dtype={handle._fwd_bwd_param_dtype}, "
        f"reduce_dtype={handle._reduce_dtype}, {flat_param.numel()} elements on each rank"
    )
    fields = (flat_param._fqns, flat_param._shapes, flat_param._strides)
    parameters = [
        (f"parameter `{fqn}`", f"shape {tuple(shape)}, strides {tuple(stride)}, {handle._orig_param_dtype}")
        for fqn, shape, stride in zip(*fields, strict=True)
    ]
    return [*parameters, ("a flat parameter", settings)]
