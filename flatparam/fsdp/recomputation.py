"""Reentrant activation checkpoints: they recompute, and so train, only what has an input that requires grad."""

import functools
import threading
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction


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
    """Note from now on which reentrant checkpoints are under way."""
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
