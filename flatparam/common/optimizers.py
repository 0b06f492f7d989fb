"""How often optimizers of sharded parameters have stepped in this process: what was gathered before is out of date.

Ranks that run the same program count the same, so that what depends on it is the same on all of them. Versions of
tensors would not do: a rank that holds nothing of a unit sees none of them change.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _C
from .torch_private import _is_fsdp_flattened

taken = 0
# Whether an optimizer has parameters of units, and of how many parameter groups that is said
_known: weakref.WeakKeyDictionary[Optimizer, tuple[bool, int]] = weakref.WeakKeyDictionary()


@functools.cache
def watch() -> None:
    """Count from now on."""
    register_optimizer_step_post_hook(_count)


@functools.cache
def ask_before(check: Callable[..., tuple[Any, Any] | None]) -> None:
    """Call ``check(optimizer, args, kwargs)`` before each step from now on. It may raise, or give other arguments."""
    register_optimizer_step_pre_hook(check)


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global taken
    _C.note_optimizer_step()
    if _has_units(optimizer):
        taken += 1


def _has_units(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    known, count = _known.get(optimizer, (False, -1))
    if not known and count != len(groups):
        known = any(_is_fsdp_flattened(param) for group in groups for param in group["params"])
        _known[optimizer] = (known, len(groups))
    return known
