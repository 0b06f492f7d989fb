"""Choose the modules that become units, by torch's wrap policies, callables or classes, and replace them by wrappers.

The constructor calls ``targets_of``, ``check_not_tied`` and ``replace_modules``, in this order; only the last changes
the module. ``inspect`` calls the first two to plan without wrapping. This file knows no unit.
"""

import collections
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchsModuleWrapPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from ...common.torch_private import _Policy
from ...common.warned import warn_user
from ..names import join


def targets_of(
    root: nn.Module,
    policy: Any,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    arguments: dict[str, Any],
) -> dict[nn.Module, dict[str, Any]]:
    """Map each descendant of ``root`` that ``policy`` selects to its constructor arguments. ``root`` is never in it.

    ``policy``: one of torch's policy objects; a collection of classes; or a callable with the keywords ``module``,
    ``recurse`` and the number of elements without a unit (``nonwrapped_numel``, in torch 1.12 ``unwrapped_params``).
    Warns if classes are given and no module has one of them. Raises: TypeError for another policy.
    """
    if isinstance(policy, set | frozenset | list | tuple):
        policy = ModuleWrapPolicy(policy)
    if isinstance(policy, _Policy):
        targets = policy._run_policy(root, ignored_modules, dict(arguments))
    elif isinstance(policy, type):
        instead = f"ModuleWrapPolicy({{{policy.__name__}}})" if issubclass(policy, nn.Module) else "an object of it"
        raise TypeError(f"auto_wrap_policy is the class {policy.__name__}: pass {instead}")
    elif callable(policy):
        chosen = _ask(root, _with_count(policy), ignored_modules, ignored_params, {}, is_root=True)
        targets = {module: dict(arguments) for module in chosen}
    else:
        raise TypeError(
            f"auto_wrap_policy must be a callable, one of torch's policies or a set of classes, got {policy!r}"
        )
    if not targets:
        _warn_of_none(root, policy)
    targets.pop(root, None)
    return targets


class ModuleWrapPolicy(TorchsModuleWrapPolicy):
    """torch's policy of this name, which takes a single class too.

    Raises: TypeError naming an item that is no class.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]] | type[nn.Module]):
        classes = {module_classes} if isinstance(module_classes, type) else set(module_classes)
        for one in classes:
            if not isinstance(one, type):
                raise TypeError(f"expected classes of modules as the units of a policy, got {one!r:.200}")
        super().__init__(classes)


def _classes_of(policy: Any) -> list[type[nn.Module]]:
    """The classes of modules that ``policy`` selects by; empty if it selects in another way."""
    if isinstance(policy, TorchsModuleWrapPolicy):
        return sorted(policy._module_classes, key=lambda one: one.__name__)
    if isinstance(policy, functools.partial) and policy.func is transformer_auto_wrap_policy:
        return sorted(policy.keywords.get("transformer_layer_cls", ()), key=lambda one: one.__name__)
    return []


def _warn_of_none(root: nn.Module, policy: Any) -> None:
    """Warn that no module has a class that ``policy`` names, and list the classes that modules have."""
    named = _classes_of(policy)
    if named:
        there = collections.Counter(type(module).__name__ for module in root.modules() if module is not root)
        found = ", ".join(f"{name} ({count})" for name, count in there.most_common(20)) or "none"
        warn_user(
            f"auto_wrap_policy chooses modules of {', '.join(one.__name__ for one in named)}, and "
            f"{type(root).__name__} has none: all of it is one unit. Its modules are of: {found}"
        )


def _with_count(policy: Callable[..., bool]) -> Callable[[nn.Module, bool, int], bool]:
    """Let ``policy`` take positional arguments. Its signature tells the name of the count."""
    try:
        names: Iterable[str] = inspect.signature(policy).parameters
    except ValueError:
        names = ()
    count = "unwrapped_params" if "unwrapped_params" in names else "nonwrapped_numel"
    return lambda module, recurse, numel: policy(module=module, recurse=recurse, **{count: numel})


def _ask(
    module: nn.Module,
    policy: Callable[[nn.Module, bool, int], bool],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    in_units: dict[nn.Module, int],
    is_root: bool = False,
) -> Iterator[nn.Module]:
    """Yield the modules at and below ``module`` that the callable ``policy`` selects, children first.

    It gets the number of elements in a module that are in no unit selected below. ``in_units``: of each module that was
    asked about, the number of its elements in selected units; it is filled.
    Source: torch 2.13 ``torch.distributed.fsdp.wrap._recursive_wrap``.
    """
    if module in in_units:
        return
    numel = sum(param.numel() for param in module.parameters() if param not in ignored_params)
    in_units[module] = 0
    if policy(module, True, numel):
        children = [child for child in module.children() if child not in ignored_modules]
        for child in children:
            yield from _ask(child, policy, ignored_modules, ignored_params, in_units)
        in_units[module] = sum(map(in_units.__getitem__, children))
        if not is_root and policy(module, False, numel - in_units[module]):
            yield module
            in_units[module] = numel


def check_not_tied(
    root: nn.Module, targets: Iterable[nn.Module], ignored_modules: set[nn.Module], ignored_params: set[nn.Parameter]
) -> None:
    """Raises: ValueError naming a parameter that two units would share, and both units."""
    units = {root, *targets}
    found: dict[nn.Parameter, tuple[nn.Module, str, str]] = {}
    seen: set[tuple[nn.Module, nn.Module]] = set()

    waiting = [(root, "", root, "")]  # no function that calls itself: it would keep the modules until a collection
    while waiting:
        module, path, unit, at = waiting.pop()
        if module in units:
            unit, at = module, path
        if (module, unit) in seen:
            continue
        seen.add((module, unit))
        for name, param in module._parameters.items():
            if param is None or param in ignored_params:
                continue
            fqn = join(path, name)
            other, other_at, other_fqn = found.setdefault(param, (unit, at, fqn))
            if other is not unit:
                raise ValueError(
                    f"parameter `{fqn}` of the unit of {type(unit).__name__} at `{at}` is shared with `{other_fqn}` of "
                    f"the unit of {type(other).__name__} at `{other_at}`: each would train its copy. Let the policy "
                    "put both in one unit, or ignore the parameter"
                )
        below = [(child, join(path, name), unit, at) for name, child in module._modules.items() if child is not None]
        waiting += [each for each in reversed(below) if each[0] not in ignored_modules]


def replace_modules(
    root: nn.Module, targets: dict[nn.Module, dict[str, Any]], wrap: Callable[[nn.Module, dict[str, Any]], nn.Module]
) -> None:
    """Call ``wrap(module, arguments)`` for each of ``targets``, children first. Put the result in all its places."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {module: [] for module in targets}
    order = _children_first(root, {})
    for parent in order:
        for name, child in parent._modules.items():
            if child in places:
                places[child].append((parent, name))
    for module in [module for module in order if module in targets]:
        wrapper = wrap(module, targets[module])
        for parent, name in places[module]:
            setattr(parent, name, wrapper)


def _children_first(module: nn.Module, seen: dict[nn.Module, None]) -> dict[nn.Module, None]:
    """Add ``module`` and those below it to ``seen``, and return it."""
    for child in module._modules.values():
        if child is not None and child not in seen:
            _children_first(child, seen)
    seen[module] = None
    return seen
