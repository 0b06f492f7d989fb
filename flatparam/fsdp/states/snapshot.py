"""Copy the state of a module before a load, and restore it if the load fails on any rank.

``Before`` copies everything; ``Beside``, which checkpoints use too, everything but parameters. A module with its own
code for loading may change any attribute, so attributes are copied too. No collective call.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...common.tensors import refuse_freed
from ..sharding.flat_param import FlatParam
from ..sharding.parameters import ParamInfo
from ..unit.base import Wrapper
from ..unit.local_params import managed_places, unit_paths
from ..unit.unit import Unit

# Python modules whose methods and hooks for state dicts change no value: nn.Module's, ours, and those that rename only
_KNOWN = (nn.Module.__module__, f"{__package__}.model", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper")


def overrides(module: nn.Module, method: str) -> bool:
    """Whether the class of ``module`` overrides ``method`` of ``nn.Module``."""
    return getattr(type(module), method) is not getattr(nn.Module, method)


def saves_by_itself(module: nn.Module) -> bool:
    """Whether ``module`` has an override or a hook, not ours, for saving a state dict."""
    hooks = *module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()
    return _has_own(module, ("_save_to_state_dict", "state_dict"), hooks)


def loads_by_itself(module: nn.Module, known: str = "") -> bool:
    """Whether ``module`` has an override or a hook, not ours, for loading a state dict. It may change any attribute.

    ``known``: name of a Python module whose overrides are ignored.
    """
    hooks = *module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()
    return _has_own(module, ("_load_from_state_dict", "load_state_dict"), hooks, known)


def _has_own(module: nn.Module, methods: tuple[str, str], hooks: Iterable[Any], known: str = "") -> bool:
    code = [vars(module).get(name, getattr(type(module), name)) for name in methods]
    code += [getattr(hook, "hook", hook) for hook in hooks]
    return any(getattr(one, "__module__", None) not in (*_KNOWN, known) for one in code)


class Beside:
    """A copy of the buffers of all modules in ``module``, and of all attributes of modules with code for loading.

    Tensors, lists, dicts and sets are cloned, as a load may change them in place; other values are referred to.
    ``parameters``: copy those too that no unit manages.
    """

    def __init__(self, module: nn.Module, parameters: bool = False):
        self._found: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._inside: list[tuple[Any, Any]] = []
        managed = managed_places(unit_paths(module))  # a view from the last forward has no memory
        for inner in module.modules():
            mappings: list[dict[str, Any]] = [inner._buffers, *([inner._parameters] if parameters else [])]
            if loads_by_itself(inner) and not isinstance(inner, Wrapper):
                mappings += [vars(inner), inner._modules]
            for mapping in mappings:
                self._found.append((mapping, dict(mapping)))
                for name, value in mapping.items():
                    if (inner, name) not in managed and _is_changed_in_place(value):
                        refuse_freed(value, f"`{name}` of a {type(inner).__name__}")
                        copied = value.detach().clone() if isinstance(value, Tensor) else value.copy()
                        self._inside.append((value, copied))

    @torch.no_grad()
    def restore(self) -> None:
        """Put all values back, into the same objects."""
        for value, copied in self._inside:
            if isinstance(value, Tensor):
                if value.shape != copied.shape:
                    value.resize_(copied.shape)
                value.detach().copy_(copied)
            elif isinstance(value, list):
                value[:] = copied
            else:
                value.clear()
                value.update(copied)
        for mapping, values in self._found:
            mapping.clear()
            mapping.update(values)


def _is_changed_in_place(value: Any) -> bool:
    if isinstance(value, Tensor):
        return (value.layout == torch.strided or isinstance(value, nn.Parameter)) and not value.is_meta
    return type(value) in (list, dict, set)


class Before:
    """A copy of all values of ``module``: shards of ``units``, other parameters, buffers, attributes, extra states.

    ``units``: all units in ``module``; ``parameters``: copy those too that no unit manages. Memory: a second copy of
    these values, this rank's shards included.
    """

    def __init__(self, module: nn.Module, units: list[Unit], parameters: bool = True):
        self._units = [(unit, unit.mismatched) for unit in units]
        self._shards: list[tuple[FlatParam, Tensor]] = []
        self._templates: list[tuple[ParamInfo, Tensor | None]] = []
        for unit in units:
            unit.sync_user_writes()
            for flat_param in unit.flat_params:
                self._shards.append((flat_param, flat_param.flat.detach().clone()))
                self._templates += [(original, original.template) for original in flat_param.originals]
        self._beside = Beside(module, parameters)
        self._kept = [
            (inner, copy.deepcopy(inner.get_extra_state()))
            for inner in module.modules()
            if overrides(inner, "get_extra_state") and overrides(inner, "set_extra_state")
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put all values back, into the same tensors; units gather again, as their shards were written."""
        for flat_param, shard in self._shards:
            flat_param.flat.detach().copy_(shard)
        for unit, apart in self._units:
            unit.filled()
            unit.mismatched = apart
        for original, template in self._templates:
            original.template = template
        self._beside.restore()
        for inner, kept in self._kept:
            inner.set_extra_state(kept)
