"""Let ``torch.distributed.checkpoint.state_dict`` work on our units.

Its functions use the name ``FSDP``, which is torch's class. In that module alone the name becomes a class that stands
for torch's and for ours.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...common.torch_private import TorchsFSDP
from ..names import FLAT_PARAM, FSDP_WRAPPED_MODULE, join
from ..states import optimizer, state_dict_type
from ..unit import markers
from ..unit.base import Wrapper
from ..unit.registry import flat_param_of, units_live

_MODULE = "torch.distributed.checkpoint.state_dict"
_STATE_OF = "_get_module_fsdp_state_if_fully_sharded_module"
_TEST = "tests/fsdp/states/test_torch_helpers.py"


class _Class(type):
    """The class of ``_Either``: ``isinstance`` is True for wrappers of torch's class and of ours."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (TorchsFSDP, Wrapper))


class _Either(metaclass=_Class):
    """The name ``FSDP`` for the helpers: each static method calls our class or torch's, as the model needs."""

    fsdp_modules = staticmethod(Wrapper.fsdp_modules)
    state_dict_type = staticmethod(state_dict_type.state_dict_type)
    optim_state_dict = staticmethod(optimizer.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optimizer.optim_state_dict_to_load)


@units_live.replace(f"{_MODULE}:FSDP", test=_TEST)
def _either(known: Any) -> Any:
    """Let the helpers for state dicts work on both classes. A torch release without their names stays refused."""
    if not (isinstance(known, type) and all(hasattr(sys.modules[_MODULE], name) for name in (_STATE_OF, "_get_fqns"))):
        return known
    markers.known_to_torch.add(_MODULE)
    return _Either


@units_live.around(f"{_MODULE}:{_STATE_OF}", test=_TEST)
def _state_of(original: Callable[..., Any], module: nn.Module) -> Any:
    """Let the helpers find a unit of our class."""
    return module if isinstance(module, Wrapper) else original(module)


@units_live.around(f"{_MODULE}:_get_fqns", test=_TEST)
def _names_of(original: Callable[..., Any], model: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Give the FQNs of all original parameters of a flat parameter."""
    path, _, last = name.rpartition(".")
    flat_param = None
    if last.startswith(FLAT_PARAM):
        param = model.get_submodule(path)._parameters.get(last)
        flat_param = flat_param_of(param) if isinstance(param, Tensor) else None
    if flat_param is None:
        return original(model, name, *args, **kwargs)
    (prefix,) = original(model, path, *args, **kwargs) if path != FSDP_WRAPPED_MODULE else ("",)
    return {join(prefix, one.fqn) for one in flat_param.originals}
