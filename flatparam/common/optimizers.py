"""Which optimizers of sharded parameters have stepped in this process: what was gathered before is out of date.

Ranks that run the same program step the same optimizers of these, so that what depends on it is the same on all of
them. Versions of tensors would not do: a rank that holds nothing of a unit sees none of them change.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .. import _C
from .torch_private import _is_fsdp_flattened

taken = 0
_changes = 0  # how often parameters have come to units
# Of an optimizer: whether it has parameters of units, of how many of its groups and after how many changes that is
# said, the units of the runtime that have them, and the counts of the drop-in's models
_known: weakref.WeakKeyDictionary[Optimizer, tuple[bool, tuple[int, int], list[weakref.ref[Any]], list[list[int]]]] = (
    weakref.WeakKeyDictionary()
)
_last: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # what `taken` was after its last step
# Parameters that wrapping has taken out of their modules: (weakly what has their values, their name, how to refuse)
_taken_out: Any = WeakIdKeyDictionary()
_taken_out_times = 0
# How often that had happened, and how many groups the optimizer had, when it was found to hold none of them
_up_to_date: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
_find_units: list[Callable[[Iterable[Tensor]], Iterable[Any]]] = []
_find_handles: list[Callable[[Iterable[Tensor]], Iterable[Any]]] = []


@functools.cache
def watch() -> None:
    """Count from now on."""
    register_optimizer_step_post_hook(_count)


@functools.cache
def ask_before(check: Callable[..., tuple[Any, Any] | None]) -> None:
    """Call ``check(optimizer, args, kwargs)`` before each step from now on. It may raise, or give other arguments."""
    register_optimizer_step_pre_hook(check)


def take_out(params: Iterable[tuple[Tensor, str]], owner: Any, refuse: Callable[[Any, str, str], None]) -> None:
    """Have an optimizer that trains one of ``params``, each with its name, in vain told so before its next step.

    ``owner`` has their values now; once it is gone, nothing is said. ``refuse(owner, name, the optimizer's class)``
    raises or warns.
    """
    global _taken_out_times
    _taken_out_times += 1
    _taken_out.update((param, (weakref.ref(owner), name, refuse)) for param, name in params)
    ask_before(_refuse_taken_out)


def _refuse_taken_out(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
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


def find_units(find: Callable[[Iterable[Tensor]], Iterable[Any]]) -> None:
    """Let ``find(params)`` give the units that have some of ``params``; the ``step`` of each is told of steps."""
    _find_units.append(find)


def find_handles(find: Callable[[Iterable[Tensor]], Iterable[Any]]) -> None:
    """Let ``find(params)`` give the handles that have some of ``params``, of the drop-in: their ``steps`` count."""
    _find_handles.append(find)


def note_change() -> None:
    """Parameters have come to units: look anew which optimizers have some."""
    global _changes
    _changes += 1


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global taken
    has_some, when, found, counts = _known.get(optimizer, (False, (-1, -1), [], []))
    if when != (len(optimizer.param_groups), _changes):
        has_some, found, counts = _look(optimizer)
    units = [unit for unit in (each() for each in found) if unit is not None]
    _C.note_optimizer_step(*(unit.core for unit in units))
    for count in counts:
        count[0] += 1
    if has_some:
        taken += 1
        _last[optimizer] = taken


def _look(optimizer: Optimizer) -> tuple[bool, list[weakref.ref[Any]], list[list[int]]]:
    """Whether ``optimizer`` has parameters of units, the runtime's units that have them, and the counts of models."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    has_some = any(_is_fsdp_flattened(param) for param in params)
    found = [weakref.ref(unit) for find in _find_units for unit in find(params)]
    counts = list({id(handle.steps): handle.steps for find in _find_handles for handle in find(params)}.values())
    _known[optimizer] = has_some, (len(optimizer.param_groups), _changes), found, counts
    return has_some, found, counts
