"""Of which class an optimizer is, and whether a state that was saved can be its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

# What each class of torch keeps for every parameter that it steps: a state that has others' alone is another's
KEPT = {
    "ASGD": "ax",
    "Adadelta": "acc_delta",
    "Adagrad": "sum",
    "Adam": "exp_avg",
    "AdamW": "exp_avg",
    "Adamax": "exp_inf",
    "Muon": "momentum_buffer",
    "NAdam": "mu_product",
    "RAdam": "exp_avg",
    "RMSprop": "square_avg",
    "Rprop": "prev",
    "SGD": "momentum_buffer",
}
_ALL_KEPT = frozenset(KEPT.values())
_INSIDE = ("optimizer", "_optimizer")  # where accelerate's and Lightning's wrappers have what they wrap
_TORCHS = "torch.optim"
# Numbers in groups of any class: their parameters, and what torch's schedulers put there
_OF_ANY = ("params", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")


def class_of(optimizer: Any) -> str:
    """The name of its class: torch's, if it is of one, also by inheritance or in a wrapper; else its own.

    Two optimizers of one such class keep the same for a parameter, whatever their settings (``fused``, ``foreach``).
    """
    kind = type(_inner(optimizer))
    for base in kind.__mro__:
        if base.__module__.startswith(_TORCHS) and base is not torch.optim.Optimizer:
            return f"{_TORCHS}.{base.__qualname__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _inner(optimizer: Any) -> Any:
    groups = optimizer.param_groups
    for name in _INSIDE:
        inner = vars(optimizer).get(name) if hasattr(optimizer, "__dict__") else None
        if inner is not None and getattr(inner, "param_groups", None) is groups:
            return _inner(inner)
    return optimizer


def why_not(optimizer: Any, settings: Iterable[Mapping[str, Any]], keys: Mapping[str, Iterable[str]]) -> str | None:
    """Why what was saved of an optimizer of an unknown class is not one's of ``optimizer``'s; None: it may be.

    ``settings``: those of its groups; ``keys``: of its states, by the parameter's name.
    """
    kind = class_of(optimizer)
    defaults = getattr(_inner(optimizer), "defaults", {})
    for saved in settings:
        here = {key for key, value in defaults.items() if _is_number(value)}
        lacking = sorted(here - saved.keys())
        others = sorted(key for key, value in saved.items() if _is_number(value) and key not in {*defaults, *_OF_ANY})
        if lacking and others and saved:
            return f"its groups have `{'`, `'.join(others)}`, and not `{'`, `'.join(lacking)}`, which {kind} has"
    return lacks_state(optimizer, keys)


def lacks_state(optimizer: Any, keys: Mapping[str, Iterable[str]]) -> str | None:
    """The same for states alone."""
    kind = class_of(optimizer)
    needed = KEPT.get(kind.removeprefix(f"{_TORCHS}.")) if _steps_as_torch(_inner(optimizer)) else None
    for name, found in keys.items() if needed is not None else ():
        saved = list(found)
        if needed not in saved and not _ALL_KEPT.isdisjoint(saved):
            return f"the state of `{name}` has {saved}, and no `{needed}`, which {kind} keeps"
    return None


def _steps_as_torch(optimizer: Any) -> bool:
    """Whether its ``step`` is of a class of torch: a subclass with one of its own keeps its own state."""
    step = getattr(type(optimizer), "step", None)
    return getattr(inspect.unwrap(step), "__module__", "").startswith(_TORCHS) if callable(step) else False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | tuple | list) and not isinstance(value, bool)
