"""Optimizers that step as soon as a gradient is there: torch's ``_apply_optimizer_in_backward``."""

import functools
import weakref

from .errors import StateError
from .unit import Unit

_OPTIMIZERS = "_in_backward_optimizers"  # torch's: a list of them, each for this parameter alone


def step_in_backward(unit: Unit) -> None:
    """Have such optimizers of ``unit`` step when its gradient was reduced, after which the gradient is gone.

    Raises: StateError, with ``use_orig_params=False``: a flat parameter is of no use to them.
    """
    if not any(hasattr(param, _OPTIMIZERS) for _, param in unit.parameters()):
        return
    if not unit.options.use_orig_params:
        raise StateError(f"{unit.name}: an optimizer in backward is only supported with use_orig_params=True")
    unit.step.reduced = functools.partial(_reduced, weakref.ref(unit))


def _reduced(unit: "weakref.ref[Unit]", part: int) -> None:
    alive = unit()
    for original in () if alive is None else alive.segments[part].originals:
        if original.param.grad is not None:  # it has a piece here
            for optimizer in getattr(original.param, _OPTIMIZERS, ()):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
