"""Decide for a group of the optimizers here whether its saved state is of another class and is converted.

`optimizer_plan.py` calls this while it plans a load; nothing is read or changed. Without ``convert`` another class is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..fsdp.states.optimizer_classes import lacks_state, why_not
from .errors import CheckpointError
from .optimizers import GRADIENT, Group, Named

Convert = Mapping[str, str] | None  # key in the saved state -> key in the state here

_WAY_OUT = (
    "make the optimizer that was saved; or pass convert={}, which keeps the settings here and begins its state anew, "
    "or convert={key there: key here}, which takes those keys of the state; or load the model without the optimizer"
)


def is_converted(
    named: Named, group: Group, told: Mapping[str, Any], saved: Mapping[str, int], convert: Convert
) -> bool:
    """Whether the state of ``group`` is converted.

    ``told``: the index's ``optimizer``. ``saved``: FQN -> number of its saved group.
    Raises: CheckpointError naming both classes, if they differ and ``convert`` is None; naming a key, if the class here
    needs it and ``convert`` does not give it, or gives it twice.
    """
    if convert is not None and not all(isinstance(key, str) for pair in convert.items() for key in pair):
        raise CheckpointError(f"expected convert= to have str for keys and values, got {convert!r}")
    labels = told.get("optimizers", [""] * len(told["groups"] or ()))
    names = [one.name for one in group.params]
    numbers = dict.fromkeys(saved[name] for name in names if name in saved)
    kinds = (told.get("classes", {}).get(labels[number]) for number in numbers)
    before, here = next((kind for kind in kinds if kind is not None), None), named.classes[group.label]
    keys = {name: [key for key in told["states"].get(name, {}) if key != GRADIENT] for name in names}
    why: str | None = None
    if before is None:
        why = why_not(group.optimizer, [told["groups"][number][0] for number in numbers], keys)
    elif before != here:
        why = f"it was saved of {before}"
    if why is not None and convert is None:
        raise CheckpointError(
            f"the optimizer of group {group.number}, of `{names[0]}` and more, is {here}, and the saved state is of "
            f"another class: {why}. Expected the same class: {_WAY_OUT}"
        )
    if convert is None or before == here:
        return False
    taken = {name: [convert[key] for key in own if key in convert] for name, own in keys.items()}
    for name, own in taken.items():
        if len(set(own)) != len(own):
            raise CheckpointError(f"convert={dict(convert)!r} gives two states of `{name}` one name: {own}")
    lacking = lacks_state(group.optimizer, taken)
    if lacking is not None:
        raise CheckpointError(f"convert={dict(convert)!r}: {lacking}")
    return True
