"""``torch.distributed.checkpoint.state_dict`` with our units: what it asks torch's class, ours answers for them.

Its functions know torch's FSDP by name. There that name stands for either class, whichever the model is made of.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP

from ...common.after_import import after_import
from .. import foreign
from ..names import FLAT_PARAM, FSDP_WRAPPED_MODULE
from ..owners import segment_of
from ..wrapper import Wrapper
from .kinds import Kinds
from .optimizer import OptimizerStates

_MODULE = "torch.distributed.checkpoint.state_dict"
_STATE_OF = "_get_module_fsdp_state_if_fully_sharded_module"


@functools.cache
def watch() -> None:
    """From the first model that is wrapped on."""
    after_import(_MODULE, _teach)


def _teach(helpers: Any) -> None:
    """Let them ask either class; if this release of them asks in another way they are refused as before."""
    if getattr(helpers, "FSDP", None) is not TorchsFSDP or not hasattr(helpers, _STATE_OF):
        return
    if not hasattr(helpers, "_get_fqns"):
        return
    helpers.FSDP = _Either
    helpers._get_fqns = _names_of(helpers._get_fqns)
    setattr(helpers, _STATE_OF, _state_of(getattr(helpers, _STATE_OF)))
    foreign.taught.add(_MODULE)


class _Class(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (TorchsFSDP, Wrapper))


class _Either(metaclass=_Class):
    """The functions of torch's class that the helpers call."""

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        found: list[Any] = Wrapper.fsdp_modules(module, root_only)
        return found or TorchsFSDP.fsdp_modules(module, root_only)

    @staticmethod
    def state_dict_type(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        owner: Any = Kinds if _has_units(module) else TorchsFSDP
        return owner.state_dict_type(module, *args, **kwargs)

    @staticmethod
    def optim_state_dict(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        owner: Any = OptimizerStates if _has_units(model) else TorchsFSDP
        return owner.optim_state_dict(model, *args, **kwargs)

    @staticmethod
    def optim_state_dict_to_load(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        owner: Any = OptimizerStates if _has_units(model) else TorchsFSDP
        return owner.optim_state_dict_to_load(model, *args, **kwargs)


def _has_units(module: nn.Module) -> bool:
    return any(isinstance(inner, Wrapper) for inner in module.modules())


def _state_of(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_of(module: nn.Module) -> Any:
        return module if isinstance(module, Wrapper) else original(module)

    return state_of


def _names_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_get_fqns``, which for a flat parameter gives the names of all that are in it."""

    @functools.wraps(original)
    def names_of(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        path, _, last = name.rpartition(".")
        segment = None
        if last.startswith(FLAT_PARAM):
            param = model.get_submodule(path)._parameters.get(last)
            segment = segment_of(param) if isinstance(param, Tensor) else None
        if segment is None:
            return original(model, name, *args, **kwargs)
        (prefix,) = original(model, path, *args, **kwargs) if path != FSDP_WRAPPED_MODULE else ("",)
        return {f"{prefix}.{one.fqn}" if prefix else one.fqn for one in segment.originals}

    return names_of
