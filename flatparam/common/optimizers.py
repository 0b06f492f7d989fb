"""Hooks on the steps of all optimizers: a step of sharded parameters makes earlier gathers stale.

Ranks that run the same program step the same optimizers, so a decision that depends on steps is the same on all ranks.
Version counters of tensors would not do: a rank that holds no element of a unit sees no version change.
The runtime and the drop-in put their functions into ``finders``, so this module knows neither.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .. import _C
from .patches import Lifetime, flat_params_live
from .torch_private import _is_fsdp_flattened
from .warned import warn_user

taken = 0  # steps of optimizers that have parameters of units
_MANY = 1_000  # parameters on the host: for so many a warning is worth it (times in _advise_fused)
_changes = 0  # the number of calls of note_change()
# By optimizer: whether it has parameters of units; the number of its groups and _changes at that time; the runtime's
# units that have its parameters; the drop-in's handles that do
_Known = tuple[bool, tuple[int, int], list[weakref.ref[Any]], list[weakref.ref[Any]]]
_known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
# Parameters that wrapping has replaced: (weak reference to the owner of their values, their name, a function to refuse)
_taken_out: Any = WeakIdKeyDictionary()
_taken_out_times = 0  # the number of calls of take_out()
# By optimizer: _taken_out_times and the number of its groups when it was last checked for replaced parameters
_up_to_date: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
# "units": returns the runtime's units that have some of the parameters; C notes each step. "handles": the drop-in's
# handles that do; a step adds 1 to ``handle.steps[0]``, once for each list: handles of one model share one
finders: dict[str, Callable[[Iterable[Tensor]], Iterable[Any]]] = {}


_replaced_live = Lifetime("from the first parameter that wrapping replaces to the end of the last one's model")


def take_out(params: Iterable[tuple[Tensor, str]], owner: Any, refuse: Callable[[Any, str, str], None]) -> None:
    """Refuse steps of optimizers that still train one of ``params``, which no module has now.

    Args: ``params``: ``(parameter, name)``; ``owner``: has the values now; held weakly, and without it nothing is
    refused; ``refuse``: called with the owner, the name and the optimizer's class name; it raises or warns.
    """
    global _taken_out_times
    _taken_out_times += 1
    _taken_out.update((param, (weakref.ref(owner), name, refuse)) for param, name in params)
    _replaced_live.hold(owner)


@_replaced_live.register(register_optimizer_step_pre_hook, "tests/fsdp/interop/test_fsdp_optimizers.py")
def _refuse_taken_out(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse steps of optimizers that were made before the model was wrapped."""
    now = _taken_out_times, len(optimizer.param_groups)
    if _up_to_date.get(optimizer) == now:
        return
    for param in (param for group in optimizer.param_groups for param in group["params"] if param.requires_grad):
        reference, name, refuse = _taken_out.get(param, (None, "", None))
        owner = None if reference is None else reference()
        if owner is not None:
            refuse(owner, name, type(optimizer).__name__)
            break
    _up_to_date[optimizer] = now


def note_change() -> None:
    """Forget which optimizers have parameters of units. Call it when a unit or handle gets parameters."""
    global _changes
    _changes += 1


@flat_params_live.register(register_optimizer_step_post_hook, "tests/dropin/test_dropin_changes.py")
def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count the steps of all optimizers: a step of sharded parameters makes earlier gathers stale."""
    global taken
    _C.note_optimizer_step(*(unit.core for unit in units_of(optimizer)))
    for count in {id(handle.steps): handle.steps for handle in handles_of(optimizer)}.values():
        count[0] += 1
    if _look(optimizer)[0]:
        taken += 1


def check_before_step(
    check: Callable[[Optimizer], object], optimizer: Optimizer, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    """Call ``check(optimizer)`` in a pre-hook of a step; with a closure, after it: it may make the gradients.

    Returns: None, or the arguments of ``step()`` with a closure that checks.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        check(optimizer)
        return None

    def checked() -> Any:
        loss = closure()
        check(optimizer)
        return loss

    return ((args[0], checked, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": checked})


def units_of(optimizer: Optimizer) -> list[Any]:
    """Return the runtime's units that have parameters of ``optimizer``."""
    return [unit for unit in (each() for each in _look(optimizer)[2]) if unit is not None]


def handles_of(optimizer: Optimizer) -> list[Any]:
    """Return the drop-in's handles that have parameters of ``optimizer``."""
    return [handle for handle in (each() for each in _look(optimizer)[3]) if handle is not None]


def _look(optimizer: Optimizer) -> _Known:
    """Find the units and handles of ``optimizer``, unless they are known."""
    known, when = _known.get(optimizer), (len(optimizer.param_groups), _changes)
    if known is not None and known[1] == when:
        return known
    params = [param for group in optimizer.param_groups for param in group["params"]]
    has_some = any(_is_fsdp_flattened(param) for param in params)
    found = {kind: [weakref.ref(each) for each in find(params)] for kind, find in finders.items()}
    units = found.get("units", [])
    _known[optimizer] = has_some, when, units, found.get("handles", [])
    if units and known is None:
        _advise_fused(optimizer)
    return _known[optimizer]


def is_half_on_host(param: Tensor) -> bool:
    """Return whether torch's fused SGD does not change ``param``, but for the elements after the last whole vector."""
    return param.is_cpu and param.dtype in (torch.bfloat16, torch.float16)


def _advise_fused(optimizer: Optimizer) -> None:
    """Warn where ``optimizer`` has a fused step and steps many parameters on the host one by one.

    torch takes its loop by default there. 1,000 pieces of 256 elements: 18 ms a step, 12 ms with ``foreach=True``,
    3.3 ms with ``fused=True`` (AdamW, one core, torch 2.13).
    """
    loops = [group for group in optimizer.param_groups if group.get("fused", True) in (None, False)]
    count = sum(
        param.is_cpu and param.is_floating_point() and param.numel() > 0
        for group in loops
        if not group.get("differentiable")
        for param in group["params"]
        if not (isinstance(optimizer, SGD) and is_half_on_host(param))
    )
    if count >= _MANY:
        name = type(optimizer).__name__
        warn_user(
            f"{name} steps {count:,} parameters on the host one by one: {name}(..., fused=True) takes a fraction of "
            "the time, and flatparam.optim, which has AdamW, Adam and SGD, a fraction of that"
        )
