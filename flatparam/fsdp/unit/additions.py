"""Refuse parameters and modules that are added after wrapping, and optimizers that were made before it.

No unit shards or reduces a parameter that is added later, so ranks would train it differently. torch's registration
hooks check each addition; a step checks nothing. The wrapper calls ``seal`` and ``take_out`` after it has built a unit.
"""

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
from .registry import owner_of_param, units_live
from .unit import Unit

_TEST = "tests/fsdp/wrapper/test_fsdp_refusals.py"


def take_out(unit: Unit, before: Mapping[tuple[nn.Module, str], nn.Parameter]) -> None:
    """Refuse later steps of optimizers that hold a parameter which ``unit`` has replaced by another object.

    ``before``: the parameters before wrapping, by module and name.
    """
    names = (name for original in unit.originals for name in original.names)
    had = ((before.get((name.module, name.name)), name) for name in names)
    replaced = [
        (param, name.fqn)
        for param, name in had
        if param is not None and name.module._parameters.get(name.name) is not param
    ]
    if replaced:
        optimizers.take_out(replaced, unit, _refuse_step)


def _refuse_step(unit: Unit, fqn: str, optimizer: str) -> None:
    """Raises: StateError: the step would change a tensor that the model no longer has."""
    instead = "has another object in its place"
    if not unit.options.use_orig_params:
        instead = "trains its flat parameter instead (use_orig_params=False)"
    raise StateError(
        f"{optimizer}.step(): the optimizer holds `{fqn}` from before {unit.name} was wrapped, which {instead}: it "
        "would train nothing. Wrap the model first, then make the optimizer, from the parameters() of the wrapped model"
    )


_inside: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Unit], set[nn.Parameter]]] = weakref.WeakKeyDictionary()


def seal(unit: Unit, modules: Iterable[nn.Module], ignored: set[nn.Parameter]) -> None:
    """Refuse trainable additions to ``modules`` of ``unit`` from now on. ``ignored``: parameters that stay allowed."""
    owner = weakref.ref(unit)
    _inside.update((module, (owner, ignored)) for module in modules)


def sealed(unit: Unit, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules among ``modules`` that are sealed for ``unit``. Copies and pickles seal the same ones."""
    return [module for module in modules if _unit_of(module)[0] is unit]


@units_live.register(register_module_parameter_registration_hook, _TEST, _C.count_registration_hooks)
def _on_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """Refuse trainable parameters that are added after wrapping."""
    unit, ignored = _unit_of(module)
    if unit is not None and param is not None:
        _check(unit, ignored, module, name, param, name)


@units_live.register(register_module_module_registration_hook, _TEST)
def _on_module(module: nn.Module, name: str, added: nn.Module | None) -> None:
    """Refuse modules with trainable parameters that are added after wrapping."""
    unit, ignored = _unit_of(module)
    if unit is None or added is None:
        return
    empty = True
    for path, param in added.named_parameters():
        empty = False
        if owner_of_param(param) is None:
            _check(unit, ignored, module, f"{name}.{path}", param, None)
    if empty:  # its parameters may be registered later
        seal(unit, added.modules(), ignored)


def _unit_of(module: nn.Module) -> tuple[Unit | None, set[nn.Parameter]]:
    owner, ignored = _inside.get(module, (None, set()))
    return None if owner is None else owner(), ignored


def _check(
    unit: Unit, ignored: set[nn.Parameter], module: nn.Module, name: str, param: Any, own_name: str | None
) -> None:
    """Raises: ValueError naming the parameter and the module, if the parameter may not be added.

    ``own_name``: the name of a parameter of ``module`` itself; None: the parameter belongs to a module that is added.
    """
    if not param.requires_grad or param in ignored or isinstance(param, FlatParameter):
        return
    if any(param is flat_param.flat for flat_param in unit.flat_params):
        return  # isinstance() above does not know the deep copy of a FlatParameter
    if own_name is not None and (module, own_name) in unit.places:
        return  # it replaces an original parameter: Unit.write_back() takes its values
    where, owner = f"a {type(module).__name__} in {unit.name}", owner_of_param(param)
    if owner is not None:
        raise ValueError(
            f"`{name}` of {where} cannot be tied to `{owner.name}` of {owner.unit.name} any more: that is sharded. Tie "
            "them before the model is wrapped, in one unit"
        )
    raise ValueError(
        f"parameter `{name}` was added to {where} after that was wrapped, so each rank would train another copy. Add "
        "it before, and name it in ignored_states= if that is what you want; or freeze it first (requires_grad=False)"
    )
