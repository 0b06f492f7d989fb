"""Refuse parameters and modules that are added after wrapping, and optimizers that were made before it.

No unit shards or reduces a parameter that is added later, so ranks would train it differently. torch's registration
hooks check each addition. A frozen one may be added, and be unfrozen later, which calls no hook: so each forward of its
unit looks at it. A step of a model without additions checks nothing. The wrapper calls ``seal`` and ``take_out`` after
it has built a unit.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ... import _C
from ...common import optimizers
from ..errors import StateError
from ..names import join, printable, without_units
from .base import Wrapper, wrappers_in
from .registry import owner_of, owner_of_param, units_live
from .unit import Unit

_TEST = "tests/fsdp/desync/test_fsdp_ranks_start_apart.py"


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
    if unit is not None and param is not None and _is_unmanaged(unit, ignored, param, (module, name)):
        _check(unit, module, name, param)
        if owner_of_param(param) is None:
            _watch(unit, [module])


@units_live.register(register_module_module_registration_hook, _TEST)
def _on_module(module: nn.Module, name: str, added: nn.Module | None) -> None:
    """Refuse modules with trainable parameters that are added after wrapping, and with those of other units."""
    unit, ignored = _unit_of(module)
    if unit is None or added is None:
        return
    _refuse_moved(unit, added)
    foreign = [(path, param) for path, param in added.named_parameters() if owner_of_param(param) is None]
    unmanaged = [(path, param) for path, param in foreign if _is_unmanaged(unit, ignored, param, None)]
    for path, param in unmanaged:
        _check(unit, module, f"{name}.{path}", param)
    if not any(param in ignored for _, param in foreign):  # a module that is ignored may get more parameters
        seal(unit, [inner for inner in added.modules() if _unit_of(inner)[0] is None], ignored)
    if unmanaged:
        _watch(unit, added.modules())


def _refuse_moved(unit: Unit, added: nn.Module) -> None:
    """Raises: ValueError naming a parameter of another unit that is in ``added``, but for those in whole units there.

    Parameters are gathered, named and saved with the modules that they had when their unit was wrapped.
    """
    whole = {inner for wrapper in wrappers_in(added) for inner in wrapper.modules()}
    for inner, owner in ((inner, owner_of(inner)) for inner in added.modules()):
        if isinstance(owner, Unit) and owner is not unit and inner not in whole:
            fqn = next(name.fqn for original in owner.originals for name in original.names if name.module is inner)
            raise ValueError(
                f"`{fqn}` of {owner.name} cannot be moved into {unit.name}, which does not gather it: exchange values "
                "by their .data, or move whole units"
            )


@units_live.around("torch.nn.modules.container:ModuleList.insert", test=_TEST)
@units_live.around("torch.nn.modules.container:Sequential.insert", test=_TEST)
def _check_inserted(original: Callable[..., Any], self: nn.Module, index: int, module: nn.Module) -> Any:
    """Refuse modules with trainable parameters that ``insert()`` adds after wrapping: it calls no hook."""
    _on_module(self, str(index), module)
    return original(self, index, module)


def _unit_of(module: nn.Module) -> tuple[Unit | None, set[nn.Parameter]]:
    owner, ignored = _inside.get(module, (None, set()))
    return None if owner is None else owner(), ignored


def _is_unmanaged(
    unit: Unit, ignored: set[nn.Parameter], param: nn.Parameter, place: tuple[nn.Module, str] | None
) -> bool:
    """Return whether ``param`` at ``place``, (module, name), would be neither ignored nor a parameter of ``unit``.

    At the place of an original parameter ``Unit.write_back()`` takes its values. ``place`` None: in an added module.
    """
    if param in ignored or isinstance(param, FlatParameter):
        return False
    if any(param is flat_param.flat for flat_param in unit.flat_params):
        return False  # isinstance() above does not know the deep copy of a FlatParameter
    return place is None or place not in unit.places


def _check(unit: Unit, module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Raises: ValueError naming the parameter and the module, if the parameter is trainable: it may not be added."""
    if not param.requires_grad:
        return
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


# By unit: the modules with a frozen parameter that was added. A copied or loaded unit is not here before its forward
_watched: weakref.WeakKeyDictionary[Unit, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()


def _watch(unit: Unit, modules: Iterable[nn.Module]) -> None:
    """Let each forward of ``unit`` look at the parameters of ``modules``: to unfreeze one calls no hook of torch.

    A hook of the wrapper does it, so forwards of units without additions do nothing more.
    """
    wrappers = [each for each, (owner, _) in list(_inside.items()) if isinstance(each, Wrapper) and owner() is unit]
    for wrapper in wrappers:
        if _refuse_unfrozen not in wrapper._forward_pre_hooks.values():
            wrapper.register_forward_pre_hook(_refuse_unfrozen)
            _watched[unit] = weakref.WeakSet()
        _watched_in(wrapper).update(modules)


def _watched_in(wrapper: Wrapper) -> weakref.WeakSet[nn.Module]:
    unit = wrapper._unit
    if unit not in _watched:  # a copy has the hook of its original, and does not know the additions
        _watched[unit] = weakref.WeakSet(sealed(unit, wrapper.modules()))
    return _watched[unit]


def _refuse_unfrozen(wrapper: Wrapper, args: Any) -> None:
    """Raises: StateError naming a parameter that was added frozen and is trainable now, before it is trained.

    An evaluation without gradients may run. Modules that the model no longer has may train.
    """
    if not (torch.is_grad_enabled() or wrapper.training):  # a reentrant checkpoint enables gradients later
        return
    unit = wrapper._unit
    ignored = wrapper._ignored_params
    trained = [
        (module, name)
        for module in _watched_in(wrapper)
        for name, param in module._parameters.items()
        if isinstance(param, nn.Parameter)  # else a view of a unit's parameter
        and param.requires_grad
        and owner_of_param(param) is None
        and _is_unmanaged(unit, ignored, param, (module, name))
    ]
    inside = wrapper._outermost().named_modules() if trained else ()
    names = [join(path, name) for path, module in inside for name in module._parameters if (module, name) in trained]
    for name in map(without_units, names):
        raise StateError(
            printable(
                f"parameter `{name}` was added to {unit.name} after that was wrapped, and is trainable now "
                "(requires_grad=True), so each rank would train another copy. Freeze it again, with "
                "requires_grad_(False); or add it before the model is wrapped, and name it in ignored_states= if each "
                "rank shall train its own"
            )
        )
