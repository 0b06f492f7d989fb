"""Tensors that ``torch.func.functional_call`` puts in place of others for the time of a call."""

import functools

import torch
import torch.nn as nn
from torch import Tensor

from ..common.torch_private import _named_member_accessor

# A module's attribute while some of its tensors are exchanged: by name, the tensor that was there, and the view of a
# unit's forward that was read in its place, or None
_EXCHANGED = "_exchanged_by_functional_call"


def is_exchanged(module: nn.Module, name: str) -> bool:
    """Whether ``functional_call`` has put something in place of this attribute."""
    return name in vars(module).get(_EXCHANGED, ())


@functools.cache
def watch() -> None:
    """Note from now on what is exchanged, and exchange views too, which are read before ``_parameters``."""
    swap = _named_member_accessor.swap_tensor

    @functools.wraps(swap)
    def swapping(module: nn.Module, name: str, tensor: Tensor, allow_missing: bool = False) -> Tensor:
        own = module.__dict__
        has_view = name in own and module._parameters.get(name) is not None
        before: Tensor = swap(module, name, tensor, allow_missing)
        exchanged = own.get(_EXCHANGED, {})
        if name in exchanged:
            if exchanged[name][0] is tensor:
                view = exchanged.pop(name)[1]
                if view is not None:
                    own[name] = view
                if not exchanged:
                    del own[_EXCHANGED]
        elif has_view or not torch.compiler.is_compiling():
            own[_EXCHANGED] = exchanged | {name: (before, own.pop(name) if has_view else None)}
        return before

    code = swapping.__code__.replace(co_filename=swap.__code__.co_filename)  # type: ignore[attr-defined]
    swapping.__code__ = code  # type: ignore[attr-defined]  # Dynamo goes into torch's file, and leaves out ours
    _named_member_accessor.swap_tensor = swapping
