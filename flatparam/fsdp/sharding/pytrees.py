"""Tensors in the arguments and results of a module: find, cast and move them, in any container.

The wrapper's forward calls this. Containers are registered pytrees, dataclasses, mappings, sequences and sets;
``find_tensors`` also looks into the attributes of other objects. The module knows no parameter.
"""

import copy
import dataclasses
import functools
import types
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...common.torch_private import _pytree as pytree
from ..errors import DeviceError

_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_HOLDERS = (dict, UserDict, list, tuple, set, frozenset)
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def find_tensors(value: Any) -> list[Tensor]:
    """Return every tensor in ``value``: in containers, and in the attributes of other objects except modules."""
    found: list[Tensor] = []
    seen: dict[int, Any] = {}
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, Tensor):
            found.append(value)
            continue
        if isinstance(value, (*_PLAIN, torch.nn.Module)) or id(value) in seen:
            continue
        seen[id(value)] = value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            children: Any = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        elif isinstance(value, Mapping):
            children = value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            children = value
        else:
            leaves = pytree.tree_leaves(value)
            children = leaves if len(leaves) != 1 or leaves[0] is not value else _attributes(value)
        rest.extend(reversed(list(children)))
    return found


def _attributes(value: Any) -> list[Any]:
    if isinstance(value, _CODE):
        return []
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    slots = [name for cls in type(value).__mro__ for name in _names(getattr(cls, "__slots__", ()))]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply ``function`` to the tensors in ``value``, and return a copy; ``value`` itself if no tensor changes.

    Unlike ``find_tensors``, this leaves the attributes of other objects alone. ``value`` is not modified.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        mapped = {name: map_tensors(function, item) for name, item in fields.items()}
        changed = {name: item for name, item in mapped.items() if item is not fields[name]}
        return dataclasses.replace(value, **changed) if changed else value
    if type(value) in (tuple, list, dict) or (isinstance(value, _HOLDERS) and pytree.tree_is_leaf(value)):
        return _map_held(function, value)
    leaves, spec = pytree.tree_flatten(value)
    items = [function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    same = all(item is leaf for item, leaf in zip(items, leaves, strict=True))
    return value if same else pytree.tree_unflatten(items, spec)


def _map_held(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``map_tensors`` for a list, tuple, set or dict, or an instance of a subclass that is no registered pytree."""
    if isinstance(value, (dict, UserDict)):
        mapped = {key: map_tensors(function, item) for key, item in value.items()}
        changed = {key: item for key, item in mapped.items() if item is not value[key]}
        if not changed:
            return value
        new: Any = copy.copy(value)
        if getattr(value, "__dict__", None) is value:  # a dict that is its own __dict__ (d.key is d["key"])
            new.__dict__ = new
        for key, item in changed.items():
            new[key] = item
        return new
    items = [map_tensors(function, item) for item in value]
    if all(item is old for item, old in zip(items, value, strict=True)):
        return value
    if isinstance(value, list):
        new = copy.copy(value)
        new[:] = items
        return new
    if isinstance(value, tuple):
        new = tuple.__new__(type(value), items)
        if hasattr(value, "__dict__"):
            vars(new).update(vars(value))
        return new
    return type(value)(items)


def cast_floats(dtype: torch.dtype, value: Any) -> Any:
    """Cast the floating-point tensors in ``value`` to ``dtype``; others stay."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def move_tensors(device: torch.device, value: Any, name: str) -> Any:
    """Move the tensors in ``value`` to ``device``; return ``value`` itself if they are there already.

    Raises: DeviceError, beginning with ``name``, for a tensor on the meta device.
    """

    def move(tensor: Tensor) -> Tensor:
        if tensor.is_meta and device.type != "meta":
            raise DeviceError(
                f"{name} computes on {device}, and got an input of shape {tuple(tensor.shape)} on the meta device, "
                "which has no data: pass one that has"
            )
        if tensor.device == device:
            return tensor
        return tensor.to(device, non_blocking=device.type != "cpu")  # the host may read a copy on the CPU at once

    return map_tensors(move, value)
