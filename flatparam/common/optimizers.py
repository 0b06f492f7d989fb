"""How often optimizers of sharded parameters have stepped in this process: what was gathered before is out of date.

Ranks that run the same program count the same, so that what depends on it is the same on all of them. Versions of
tensors would not do: a rank that holds nothing of a unit sees none of them change.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _C
from .torch_private import _is_fsdp_flattened

taken = 0
# Whether an optimizer has parameters of units, and of how many parameter groups that is said
_known: weakref.WeakKeyDictionary[Optimizer, tuple[bool, int]] = weakref.WeakKeyDictionary()
_last: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # what `taken` was after its last step


@functools.cache
def watch() -> None:
    """Count from now on."""
    register_optimizer_step_post_hook(_count)


@functools.cache
def ask_before(check: Callable[..., tuple[Any, Any] | None]) -> None:
    """Call ``check(optimizer, args, kwargs)`` before each step from now on. It may raise, or give other arguments."""
    register_optimizer_step_pre_hook(check)


def have_stepped(params: Iterable[Tensor], since: int) -> bool:
    """Whether an optimizer of one of ``params``, which lives, has stepped since ``taken`` was ``since``.

    Alike on all ranks: optimizers have the parameters of which a rank holds nothing, too.
    """
    ids = set(map(id, params))
    later = [optimizer for optimizer, count in _last.items() if count > since]
    return any(id(param) in ids for each in later for group in each.param_groups for param in group["params"])


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global taken
    _C.note_optimizer_step()
    if _has_units(optimizer):
        taken += 1
        _last[optimizer] = taken


def _has_units(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    known, count = _known.get(optimizer, (False, -1))
    if not known and count != len(groups):
        known = any(_is_fsdp_flattened(param) for group in groups for param in group["params"])
        _known[optimizer] = (known, len(groups))
    return known
