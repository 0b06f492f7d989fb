"""The description of a unit that ranks compare before they build it: settings, parameters, digests of their values.

The wrapper's constructor passes it to ``desync/same_unit.py``. State dicts and checkpoints use the digests.
"""

import torch
import torch.distributed as dist

from ... import _C
from ...common.described import Described
from ...common.tensors import in_storage_order
from ..errors import DeviceError
from .parameters import Options, ParamInfo


def describe_unit(name: str, originals: list[ParamInfo], options: Options) -> Described:
    """Return a unit's name and settings, then one entry for each of its parameters."""
    placement, precision = options.placement, options.mixed_precision
    device = next(((options.device or original.param.device).type for original in originals), "no device")
    settings = (
        f"on {device}, {placement.shards} shards, {placement.replicas} replicas, "
        f"parameters over {placement.param_shards}, nested={placement.outer is not None}, "
        f"full_precision={placement.full_precision}, reshard_after_forward={placement.reshard_after_forward}, "
        f"use_orig_params={options.use_orig_params}, segments={options.segments}, "
        f"param_dtype={precision.param_dtype}, reduce_dtype={precision.reduce_dtype}, "
        f"reduction={'ordered' if options.in_order else None}, shard_alignment={options.shard_alignment}, "
        f"atomic={options.atomic is not None}, min_unit_bytes={options.min_unit_bytes}"
    )
    return [
        (name, settings),
        *(
            (
                f"parameter `{original.fqn}`",
                f"shape {tuple(original.shape)}, strides {original.stride}, {original.param.dtype}, "
                f"requires_grad={original.param.requires_grad}, {len(original.fqns)} names, "
                f"blocks of {original.block}{'' if original.form is None else f', {original.form}'}"
                f"{'' if original.kept is None else f', {original.kept}'}",
            )
            for original in originals
        ),
    ]


def check_device(name: str, originals: list[ParamInfo], options: Options) -> None:
    """Raises: DeviceError naming a parameter if a group of the unit has no collectives for its device."""
    for group in options.placement.compared if originals else ():
        original = originals[0]
        device = options.device or original.param.device
        has = sorted(found.type for found in getattr(group, "_device_types", ()))
        if has and device.type not in has and dist.get_world_size(group) > 1:
            raise DeviceError(
                f"{name}: expected parameter `{original.fqn}` on a device that its process group "
                f"({dist.get_backend(group)}) has collectives for, {' or '.join(has)}; it is on {device}: "
                "pass device_id= to move it, or another group"
            )


def digests_of(originals: list[ParamInfo]) -> dict[str, int]:
    """Return a digest of each parameter's values, by FQN; 0 for a parameter without values.

    A device copies samples of all its parameters to the host in one go: one wait a device. Large tensors are sampled,
    so equal digests do not prove equal values.
    """
    digests = [0] * len(originals)
    on_device: dict[torch.device, dict[int, torch.Tensor]] = {}
    for i, original in enumerate(originals):
        value = original.param
        if original.template is not None or _C.lacks_memory(value):
            continue  # flattening raises an error with the name of a parameter that lacks memory
        if value.is_cpu or not _C.is_plain_tensor(value):
            digests[i] = digest_of(value)
        else:
            ordered = in_storage_order(value.detach())
            part = ordered[:: 1 + ordered.numel() // 2**15].contiguous()  # at most 2**15 elements
            on_device.setdefault(value.device, {})[i] = part.view(torch.uint8)
    for parts in on_device.values():
        copies = torch.cat(list(parts.values())).cpu().split([len(part) for part in parts.values()])
        for i, copy in zip(parts, copies, strict=True):
            digests[i] = _C.digest(copy)
    return dict(zip((original.fqn for original in originals), digests, strict=True))


def digest_of(value: torch.Tensor) -> int:
    """Return a digest of a tensor on the host; 0 for a tensor that is not plain. Large tensors are sampled."""
    try:
        return _C.digest(value)
    except TypeError:  # it is not dense
        return _C.digest(in_storage_order(value.detach()).contiguous()) if _C.is_plain_tensor(value) else 0
