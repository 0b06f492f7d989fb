"""Decide for each group of the optimizers here whether its saved state is of another class and is converted.

`targets.py` calls this while it plans a load; nothing is read or changed. Without ``convert`` another class is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..fsdp.states.optimizer_classes import lacks_state, why_not
from .errors import CheckpointError
from .optimizers import GRADIENT, Named

Convert = Mapping[str, str] | None  # key in the saved state -> key in the state here

_WAY_OUT = (
    "make the optimizer that was saved; or pass convert={}, which keeps the settings here and begins its state anew, "
    "or convert={key there: key here}, which takes those keys of the state; or load the model without the optimizer"
)


def converted_groups(named: Named, told: Mapping[str, Any], saved: Mapping[str, int], convert: Convert) -> list[bool]:
    """Return for each group of ``named`` whether its state is converted.

    ``told``: the index's ``optimizer``. ``saved``: FQN -> number of its saved group.
    Raises: CheckpointError naming both classes, if they differ and ``convert`` is None; naming a key, if the class here
    needs it and ``convert`` does not give it, or gives it twice.
    """
    if convert is not None and not all(isinstance(key, str) for pair in convert.items() for key in pair):
        raise CheckpointError(f"expected convert= to have str for keys and values, got {convert!r}")
    classes = told.get("classes", {})
    labels = told.get("optimizers", [""] * len(told["groups"] or ()))
    found = []
    for i, (label, (_, held)) in enumerate(zip(named.labels, named.groups, strict=True)):
        names = [one.name for one in held]
        numbers = dict.fromkeys(saved[name] for name in names if name in saved)
        before = next((kind for number in numbers if (kind := classes.get(labels[number])) is not None), None)
        keys = {name: [key for key in told["states"].get(name, {}) if key != GRADIENT] for name in names}
        here, optimizer = named.classes[label], named.optimizers[label]
        why: str | None = None
        if before is None:
            why = why_not(optimizer, [told["groups"][number][0] for number in numbers], keys)
        elif before != here:
            why = f"it was saved of {before}"
        if why is not None and convert is None:
            raise CheckpointError(
                f"the optimizer of group {i}, of `{names[0]}` and more, is {here}, and what was saved is of another "
                f"class: {why}. Expected the same class: {_WAY_OUT}"
            )
        found.append(convert is not None and (before is None or before != here))
        if found[-1]:
            assert convert is not None
            taken = {name: [convert[key] for key in own if key in convert] for name, own in keys.items()}
            for name, own in taken.items():
                if len(set(own)) != len(own):
                    raise CheckpointError(f"convert={dict(convert)!r} gives two states of `{name}` one name: {own}")
            lacking = lacks_state(optimizer, taken)
            if lacking is not None:
                raise CheckpointError(f"convert={dict(convert)!r}: {lacking}")
    return found
