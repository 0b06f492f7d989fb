"""Full model state dicts: every parameter whole, under the names of the unwrapped model."""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .names import FSDP_PREFIX
from .unit import Unit


def strip_prefix(destination: dict[str, Any], prefix: str) -> None:
    """Rename the entries below a unit at ``prefix`` in place, the module metadata too; the order stays."""
    inner = prefix + FSDP_PREFIX
    for mapping in (destination, getattr(destination, "_metadata", None)):
        if mapping is None:
            continue
        for key in list(mapping):
            if key.startswith(inner) or key + "." == inner:
                mapping[prefix + key[len(inner) :] if key.startswith(inner) else prefix[:-1]] = mapping.pop(key)


def own_entries(
    unit: Unit, destination: dict[str, Any], prefix: str, *, keep_vars: bool, to_cpu: bool, drop: bool
) -> None:
    """Make the entries of ``unit``'s parameters tensors of their own, or drop them (on ranks that were not to get any).

    ``prefix``: of the wrapped module in ``destination``.
    """
    for segment in unit.segments:
        for original in segment.originals:
            for place in original.names:
                key = prefix + _path(unit.module, place.module, place.name)
                value = destination.get(key)
                if value is None:
                    continue
                if drop:
                    del destination[key]
                    continue
                copy = value.detach().cpu() if to_cpu else value.detach().clone()
                copy = copy.clone() if copy.data_ptr() == value.data_ptr() else copy
                destination[key] = nn.Parameter(copy, requires_grad=value.requires_grad) if keep_vars else copy


def _path(root: nn.Module, owner: nn.Module, name: str) -> str:
    """The name of ``owner``'s parameter below ``root``, with wrappers' names as they are."""
    for path, module in root.named_modules(remove_duplicate=False):
        if module is owner:
            return f"{path}.{name}" if path else name
    raise AssertionError(f"{name} is not below {type(root).__name__}")


def restore_buffers(destination: dict[str, Any], dtypes: dict[str, torch.dtype], prefix: str) -> None:
    """Buffers that are kept in a lower precision go into the state dict in their own."""
    for name, dtype in dtypes.items():
        value = destination.get(prefix + name)
        if isinstance(value, Tensor) and value.dtype != dtype:
            destination[prefix + name] = value.to(dtype)


def insert_prefix(state_dict: dict[str, Any], prefix: str) -> None:
    """Rename the entries of a state dict of the unwrapped model in place, for the unit at ``prefix``."""
    for key in list(state_dict):
        if key.startswith(prefix) and not key.startswith(prefix + FSDP_PREFIX):
            state_dict[prefix + FSDP_PREFIX + key[len(prefix) :]] = state_dict.pop(key)
