"""Check before the first gather of a flat parameter that all ranks have built it alike.

Without the check, ranks with other sizes would crash in the gather, ranks that have frozen other units would wait for
each other in a reduction, and ranks with other parameters would train a mixture. torch compares only indices of
parameters, and only with TORCH_DISTRIBUTED_DEBUG.

Not compared: NO_SHARD, as a rank may run forwards alone; replicas of HYBRID_SHARD with each other, as the handle does
not know their group; parameters that are frozen after the first gather. `gathering.py` calls this once for a handle.
"""

from typing import Any

import torch
import torch.distributed as dist

from ..common.collectives import all_gather_beside
from ..common.described import Described, digest_of_said, first_difference
from ..common.warned import warn_user
from .base import Handle

_HALF = 16  # bytes of each of the two digests


def check_same_on_all_ranks(handle: Handle) -> None:
    """Compare ``handle`` over its group. A collective call of 32 bytes, not through ``torch.distributed``'s functions.

    If only the names differ, it warns: torch allows that, for example if ranks ignore other modules.
    Raises: ValueError on all ranks alike, naming the first rank and parameter that differ from the first rank's.
    """
    group = handle.process_group
    said = _describe(handle)
    forms, names = ([each[i] for each in said] for i in (1, 0))
    digests = digest_of_said(repr(forms))[:_HALF] + digest_of_said(repr(names))[:_HALF]
    words = [int.from_bytes(digests[i : i + 8], "little", signed=True) for i in range(0, len(digests), 8)]
    everyone = all_gather_beside(torch.tensor(words, device=handle.device), group)
    if everyone is None or all(other == words for other in everyone):
        return
    if all(other[: _HALF // 8] == words[: _HALF // 8] for other in everyone):
        _warn_of_names(handle)
        return
    told: list[Any] = [None] * handle.world_size
    dist.all_gather_object(told, said, group)
    told = [_with_names_of(told[0], other) for other in told]
    raise ValueError(
        handle._about(
            "the ranks have built different units: "
            f"{first_difference(dist.get_process_group_ranks(group), told)}. Build the same model, with the same "
            "settings, on every rank"
        )
    )


def _with_names_of(first: Described, other: Described) -> Described:
    """Return ``other`` with the names of ``first`` for entries that differ only in the name: names are not compared."""
    names = [
        expected[0] if expected[1] == found[1] else found[0] for expected, found in zip(first, other, strict=False)
    ]
    return [*zip(names, (what for _, what in other), strict=False), *other[len(names) :]]


def _warn_of_names(handle: Handle) -> None:
    warn_user(
        handle._about(
            "the ranks have other names for parameters of the same shapes: the first of one rank is trained as the "
            "first of the others, whatever its name. If they are not the same, build the same model on every rank"
        ),
        [handle.process_group],
    )


def _describe(handle: Handle) -> Described:
    flat_param = handle.flat_param
    settings = (
        f"{handle._sharding_strategy.name}, {handle.world_size} ranks, {handle._orig_param_dtype}, "
        f"use_orig_params={handle._use_orig_params}, param_dtype={handle._fwd_bwd_param_dtype}, "
        f"reduce_dtype={handle._reduce_dtype}, {flat_param.numel()} elements on each rank"
    )
    originals = flat_param._params if handle._use_orig_params else [flat_param] * len(flat_param._fqns)
    fields = (flat_param._fqns, flat_param._shapes, flat_param._strides, originals)
    parameters = [
        (
            f"parameter `{fqn}`",
            f"shape {tuple(shape)}, strides {tuple(stride)}, {handle._orig_param_dtype}, "
            f"requires_grad={original.requires_grad}",
        )
        for fqn, shape, stride, original in zip(*fields, strict=True)
    ]
    return [*parameters, ("a flat parameter", settings)]
