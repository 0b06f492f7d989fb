"""Compare the class of an optimizer with a saved state, which may be of another class.

Loading Adam's state into SGD would train wrong in silence. Old states do not name their class, so this looks at their
settings and keys. Optimizer loads and checkpoints call it; it knows no ranks and no tensors.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

# Class of torch -> a key that it keeps for every parameter. A state with another class's key and without this one is
# of another class.
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
_INSIDE = ("optimizer", "_optimizer")  # attributes of accelerate's and Lightning's wrappers: the inner optimizer
_TORCHS = "torch.optim"
# Settings in groups of any class: the parameters, and the settings that torch's schedulers add
_OF_ANY = ("params", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")


def class_of(optimizer: Any) -> str:
    """Return the name of the class of torch that ``optimizer``, or the one in its wrapper, inherits from; else its own.

    Optimizers with one name keep the same keys for a parameter, whatever their settings (``fused``, ``foreach``).
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
    """Return why a saved state cannot come from ``optimizer``'s class, or None if it may. The saved class is unknown.

    ``settings``: of each saved group; ``keys``: FQN -> the keys of its saved state.
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
    """Return which state lacks the key that ``optimizer``'s class keeps, or None. As ``why_not``, from states alone."""
    kind = class_of(optimizer)
    needed = KEPT.get(kind.removeprefix(f"{_TORCHS}.")) if _steps_as_torch(_inner(optimizer)) else None
    for name, found in keys.items() if needed is not None else ():
        saved = list(found)
        if needed not in saved and not _ALL_KEPT.isdisjoint(saved):
            return f"the state of `{name}` has {saved}, and no `{needed}`, which {kind} keeps"
    return None


def _steps_as_torch(optimizer: Any) -> bool:
    """Whether ``step`` is inherited from torch. A subclass that overrides it may keep other state."""
    step = getattr(type(optimizer), "step", None)
    return getattr(inspect.unwrap(step), "__module__", "").startswith(_TORCHS) if callable(step) else False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | tuple | list) and not isinstance(value, bool)
