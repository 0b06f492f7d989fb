"""Let ``torch.distributed.checkpoint.state_dict`` work on our units.

Its functions use the name ``FSDP``, torch's class. ``watch`` changes that name, in that module alone, to a class that
answers for both. ``copying.py`` calls ``watch``.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.nn as nn
from torch import Tensor

from ...common.after_import import after_import
from ...common.torch_private import TorchsFSDP
from ..names import FLAT_PARAM, FSDP_WRAPPED_MODULE, join
from ..states import optimizer, state_dict_type
from ..unit import markers
from ..unit.base import Wrapper
from ..unit.registry import flat_param_of

_MODULE = "torch.distributed.checkpoint.state_dict"
_STATE_OF = "_get_module_fsdp_state_if_fully_sharded_module"


@functools.cache
def watch() -> None:
    """Change the module when it is imported, or now if it is. Once per process."""
    after_import(_MODULE, _teach)


def _teach(helpers: Any) -> None:
    """Replace the three names in ``helpers``. A torch release without them stays refused (``unit/markers.py``)."""
    known = getattr(helpers, "FSDP", None)
    if not (isinstance(known, type) and hasattr(helpers, _STATE_OF) and hasattr(helpers, "_get_fqns")):
        return
    helpers.FSDP = _Either
    helpers._get_fqns = _names_of(helpers._get_fqns)
    setattr(helpers, _STATE_OF, _state_of(getattr(helpers, _STATE_OF)))
    markers.known_to_torch.add(_MODULE)


class _Class(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (TorchsFSDP, Wrapper))


class _Either(metaclass=_Class):
    """The name ``FSDP`` for the helpers: each static method calls our class or torch's, as the model needs."""

    fsdp_modules = staticmethod(Wrapper.fsdp_modules)
    state_dict_type = staticmethod(state_dict_type.state_dict_type)
    optim_state_dict = staticmethod(optimizer.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optimizer.optim_state_dict_to_load)


def _state_of(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_of(module: nn.Module) -> Any:
        return module if isinstance(module, Wrapper) else original(module)

    return state_of


def _names_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_get_fqns``: for a flat parameter it returns the FQNs of all its original parameters."""

    @functools.wraps(original)
    def names_of(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        path, _, last = name.rpartition(".")
        flat_param = None
        if last.startswith(FLAT_PARAM):
            param = model.get_submodule(path)._parameters.get(last)
            flat_param = flat_param_of(param) if isinstance(param, Tensor) else None
        if flat_param is None:
            return original(model, name, *args, **kwargs)
        (prefix,) = original(model, path, *args, **kwargs) if path != FSDP_WRAPPED_MODULE else ("",)
        return {join(prefix, one.fqn) for one in flat_param.originals}

    return names_of
