"""Calls of torch's that are noted, for what a unit does in them.

Reentrant activation checkpoints recompute, and so train, only what has an input that requires grad.
``torch.func.functional_call`` puts tensors in place of others for the time of a call.
"""

import functools
import threading
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from ..common.torch_private import _named_member_accessor


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
    for name in ("new", "new_tensor"):
        setattr(Tensor, name, _knowing_shards(getattr(Tensor, name)))
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


def _knowing_shards(method: Any) -> Any:
    """A method of ``Tensor`` that asks the dispatch keys for the device, and does not know the mark of shards."""

    @functools.wraps(method)
    def called(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            if "DeferredInit" not in str(error):
                raise
        return method(self.new_empty(0), *args, **kwargs)

    return called


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

    code = swapping.__code__.replace(co_filename=swap.__code__.co_filename)  # type: ignore[attr-defined]
    swapping.__code__ = code  # type: ignore[attr-defined]  # Dynamo goes into torch's file, and leaves out ours
    _named_member_accessor.swap_tensor = swapping
