"""Static functions of our wrapper that also take models wrapped by torch's class: those calls go to torch's class.

A program may use both classes at once, and other libraries call these functions on any model.
"""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import nn

from ..common.torch_private import TorchsFSDP

P = ParamSpec("P")
R = TypeVar("R")


def or_torchs(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``function``, which has a parameter ``module`` or ``model``: forward torch's models to torch's class."""
    names = list(inspect.signature(function).parameters)
    place = next(i for i, name in enumerate(names) if name in ("module", "model"))

    @functools.wraps(function)
    def either(*args: P.args, **kwargs: P.kwargs) -> R:
        model = args[place] if place < len(args) else kwargs.get(names[place])
        asked = function
        if isinstance(model, nn.Module) and is_torchs(model):
            asked = getattr(TorchsFSDP, function.__name__)
        return asked(*args, **kwargs)

    return either


def is_torchs(model: nn.Module) -> bool:
    """Whether ``model`` or a module in it is wrapped by torch's class."""
    return any(isinstance(inner, TorchsFSDP) for inner in model.modules())
