"""Whether all ranks have the same flat parameter: found out before the first of its collectives.

Ranks that differ would crash in it, where sizes differ, wait for each other in a reduction, where one of them has
frozen a unit, or train a mixture. torch compares indices of parameters, with TORCH_DISTRIBUTED_DEBUG alone.

Not compared, as no collective of every rank comes before they differ: NO_SHARD, of which a rank may run forwards
alone; replicas of HYBRID_SHARD with each other, whose group the handle does not know; what is frozen after the first
gather.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist

from ..common.collectives import all_gather_beside
from ..common.described import Described, digest_of_said, first_difference

_HALF = 16  # bytes of a digest


def check_same_on_all_ranks(handle: Any) -> None:
    """Compare ``handle`` over its group. A collective call of 32 bytes, past ``torch.distributed``'s functions.

    Names alone may differ, as torch lets them: ranks may ignore other numbers of modules. A warning says so.
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
    """``other``, with names that differ where nothing else does left out of the comparison."""
    names = [
        expected[0] if expected[1] == found[1] else found[0] for expected, found in zip(first, other, strict=False)
    ]
    return [*zip(names, (what for _, what in other), strict=False), *other[len(names) :]]


def _warn_of_names(handle: Any) -> None:
    warnings.warn(
        handle._about(
            "the ranks have other names for parameters of the same shapes: the first of one rank is trained as the "
            "first of the others, whatever its name. If they are not the same, build the same model on every rank"
        ),
        stacklevel=2,
    )


def _describe(handle: Any) -> Described:
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
