"""Reentrant activation checkpoints: they recompute, and so train, only what has an input that requires grad."""

import sys
from types import CodeType, FrameType

from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

_CHECKPOINT = CheckpointFunction.forward.__code__


def is_never_recomputed(forward: CodeType, by_default: bool) -> bool:
    """Whether the caller's caller, ``forward``, runs in a checkpoint that a backward will not come to, but could.

    ``forward`` has a local variable ``records``: whether gradients are recorded as it begins. That of the innermost one
    around the checkpoint decides whether a backward is wanted, ``by_default`` if there is none.
    """
    frame: FrameType | None = sys._getframe(3)
    found = False
    while frame is not None:
        if frame.f_code is forward:
            return found and frame.f_locals["records"]
        if frame.f_code is _CHECKPOINT:
            if any(isinstance(arg, Tensor) and arg.requires_grad for arg in frame.f_locals["args"]):
                return False
            found = True
        frame = frame.f_back
    return found and by_default
