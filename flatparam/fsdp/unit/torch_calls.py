"""Calls of torch's that are noted, for what a unit does in them.

Reentrant activation checkpoints recompute, and so train, only what has an input that requires grad.
``torch.func.functional_call`` puts tensors in place of others for the time of a call. ``requires_grad_()`` freezes.
"""

import functools
import threading
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from ... import _C
from ...common.torch_private import _named_member_accessor
from .registry import all_units


class _UnderWay(threading.local):
    """What this thread is in, the innermost last: ("unit", it records gradients), ("checkpoint", it is recomputed)."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, bool]] = []


_here = _UnderWay()


def enter_forward(records: bool) -> list[tuple[str, bool]]:
    """Note that a forward of a unit begins; ``records``: whether with gradients. The caller pops the last entry."""
    stack = _here.stack
    stack.append(("unit", records))
    return stack


def leave_forwards() -> None:
    """None is under way in this thread, whatever has not ended."""
    _here.stack.clear()


def is_never_recomputed(by_default: bool) -> bool:
    """Whether this thread is in a checkpoint that a backward will not come to, but could.

    A backward is wanted if the unit around the checkpoint records gradients; if there is no unit, ``by_default``.
    """
    found = False
    for kind, answer in reversed(_here.stack):
        if kind == "unit":
            return found and answer
        if answer:
            return False
        found = True
    return found and by_default


@functools.cache
def watch() -> None:
    """Note from now on which reentrant checkpoints are under way, and what is exchanged."""
    _watch_exchanges()
    _watch_freezing()
    forward: Any = CheckpointFunction.forward

    @functools.wraps(forward)
    def noted(ctx: Any, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
        stack = _here.stack
        stack.append(("checkpoint", any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)))
        try:
            return forward(ctx, run_function, preserve_rng_state, *args)
        finally:
            stack.pop()

    checkpoint: Any = CheckpointFunction
    checkpoint.forward = staticmethod(noted)


# A module's attribute while some of its tensors are exchanged: by name, the tensor that was there, and the view of a
# unit's forward that was read in its place, or None
_EXCHANGED = "_exchanged_by_functional_call"


def is_exchanged(module: nn.Module, name: str) -> bool:
    """Whether ``functional_call`` has put something in place of this attribute."""
    return name in vars(module).get(_EXCHANGED, ())


def _watch_exchanges() -> None:
    """Note what is exchanged, and exchange views too, which are read before ``_parameters``."""
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

    _named_member_accessor.swap_tensor = seen_as(swapping, swap)


def _watch_freezing() -> None:
    """Let ``requires_grad_()`` of what stands in a parameter's place during a forward be that of the parameter.

    It has a history, so torch refuses to freeze it, and asks nobody before. An attribute of the tensor that says
    otherwise would go with it into files and copies.
    """
    tensor: Any = Tensor
    original = tensor.requires_grad_

    @functools.wraps(original)
    def requires_grad_(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self if _C.is_leaf(self) else _frozen_by(self), *args, **kwargs)

    tensor.requires_grad_ = requires_grad_


def _frozen_by(view: Any) -> Any:
    """The parameter in whose place ``view`` stands, or ``view`` itself."""
    return next((owner for unit in all_units() if (owner := unit.core.owner_of(view)) is not None), view)


def seen_as(ours: Any, function: Any) -> Any:
    """``ours``, which Dynamo goes into as into torch's ``function``: it leaves out our files."""
    ours.__code__ = ours.__code__.replace(co_filename=function.__code__.co_filename)
    return ours
