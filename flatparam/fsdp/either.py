"""Functions of our class that are asked about models which torch's class has wrapped: torch's class answers."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch.nn as nn

from ..common.torch_private import TorchsFSDP

P = ParamSpec("P")
R = TypeVar("R")


def or_torchs(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` of a ``module`` or ``model``; where torch's class has wrapped it, torch's function of this name."""
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
    """Whether torch's class has wrapped something in it."""
    return any(isinstance(inner, TorchsFSDP) for inner in model.modules())
