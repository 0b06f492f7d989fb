"""Gathered optimizer states that keep their values.

For ``use_orig_params=True`` torch gathers the states of a unit (Adam's ``exp_avg``, then ``exp_avg_sq``) one after
another into one buffer, and returns views of it. Where nothing copies them (on the CPU, or ``offload_to_cpu=False``),
every state of a saved optimizer has the values of the last one. While flatparam is installed each gets its own memory.
"""

import functools
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..common.torch_private import _optim_utils
from .handle import FlatParamHandle

_NAME = "_unflatten_orig_param_states"  # called as each state is gathered; another torch may do without
_original: Any = getattr(_optim_utils, _NAME, None)


def add() -> None:
    """Copy out of the buffer what torch leaves in it, for units with flatparam's handle."""
    if _original is not None:
        setattr(_optim_utils, _NAME, _unflatten)


def remove() -> None:
    """Undo ``add()``."""
    if getattr(_optim_utils, _NAME, None) is _unflatten:
        setattr(_optim_utils, _NAME, _original)


@functools.wraps(_original)
def _unflatten(info: Any, states: dict[str, dict[str, Any]], name: str, *settings: Any, **named: Any) -> None:
    gathered = {_address(state.get(name)) for state in states.values()} - {None}
    _original(info, states, name, *settings, **named)
    if isinstance(info.handle, FlatParamHandle):
        for state in states.values():
            if _address(state.get(name)) in gathered:
                state[name] = state[name].clone()


def _address(value: Any) -> int | None:
    """Where the memory of a tensor or of a DTensor's local part begins; None for anything else."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.untyped_storage().data_ptr() if type(local) is Tensor else None
