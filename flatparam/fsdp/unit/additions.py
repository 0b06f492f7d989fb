"""Parameters and modules that are added to a model once it is wrapped, and optimizers from before: refused by name.

Nobody would shard or reduce a parameter that is added. It is found where torch registers it, so a step looks for
nothing.
"""

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FlatParameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ... import _C
from ...common import optimizers
from ..errors import StateError
from .registry import owner_of_param
from .unit import Unit


def take_out(unit: Unit, before: Mapping[tuple[nn.Module, str], nn.Parameter]) -> None:
    """Refuse steps of optimizers that hold what ``unit`` has replaced; ``before``: its parameters, by their places."""
    names = (name for flat_param in unit.flat_params for original in flat_param.originals for name in original.names)
    had = ((before.get((name.module, name.name)), name) for name in names)
    replaced = [
        (param, name.fqn)
        for param, name in had
        if param is not None and name.module._parameters.get(name.name) is not param
    ]
    if replaced:
        optimizers.take_out(replaced, unit, _refuse_step)


def _refuse_step(unit: Unit, fqn: str, optimizer: str) -> None:
    """Raises: StateError, for an optimizer that would train nothing."""
    instead = "has another object in its place"
    if not unit.options.use_orig_params:
        instead = "trains its flat parameter instead (use_orig_params=False)"
    raise StateError(
        f"{optimizer}.step(): the optimizer holds `{fqn}` from before {unit.name} was wrapped, which {instead}: it "
        "would train nothing. Wrap the model first, then make the optimizer, from the parameters() of the wrapped model"
    )


_inside: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Unit], set[nn.Parameter]]] = weakref.WeakKeyDictionary()


@functools.cache
def watch_registrations() -> None:
    """From the first model that is wrapped on."""
    register_module_parameter_registration_hook(_on_parameter)
    _C.note_registration_hook()
    register_module_module_registration_hook(_on_module)


def seal(unit: Unit, modules: Iterable[nn.Module], ignored: set[nn.Parameter]) -> None:
    """Nothing that trains may be added to ``modules`` any more, which are of ``unit``; ``ignored``: what it may be."""
    owner = weakref.ref(unit)
    _inside.update((module, (owner, ignored)) for module in modules)


def sealed(unit: Unit, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of ``modules`` that nothing may be added to because they are of ``unit``."""
    return [module for module in modules if _unit_of(module)[0] is unit]


def _on_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    unit, ignored = _unit_of(module)
    if unit is not None and param is not None:
        _check(unit, ignored, module, name, param, name)


def _on_module(module: nn.Module, name: str, added: nn.Module | None) -> None:
    unit, ignored = _unit_of(module)
    if unit is None or added is None:
        return
    empty = True
    for path, param in added.named_parameters():
        empty = False
        if owner_of_param(param) is None:
            _check(unit, ignored, module, f"{name}.{path}", param, None)
    if empty:  # parameters may come later
        seal(unit, added.modules(), ignored)


def _unit_of(module: nn.Module) -> tuple[Unit | None, set[nn.Parameter]]:
    owner, ignored = _inside.get(module, (None, set()))
    return None if owner is None else owner(), ignored


def _check(
    unit: Unit, ignored: set[nn.Parameter], module: nn.Module, name: str, param: Any, own_name: str | None
) -> None:
    """Raises: ValueError naming what was added and where. ``own_name``: of a parameter of ``module`` itself."""
    if not param.requires_grad or param in ignored or isinstance(param, FlatParameter):
        return
    if any(param is flat_param.flat for flat_param in unit.flat_params):
        return  # a copied one is no FlatParameter to isinstance()
    if own_name is not None and (module, own_name) in unit.places:
        return  # in the place of one of the unit's
    where, owner = f"a {type(module).__name__} in {unit.name}", owner_of_param(param)
    if owner is not None:
        raise ValueError(
            f"`{name}` of {where} cannot be tied to `{owner[1]}` of {owner[0].name} any more: that is sharded. Tie "
            "them before the model is wrapped, in one unit"
        )
    raise ValueError(
        f"parameter `{name}` was added to {where} after that was wrapped: each rank would train it on its own. Add it "
        "before, and name it in ignored_states= if that is what you want; or freeze it first (requires_grad=False)"
    )
