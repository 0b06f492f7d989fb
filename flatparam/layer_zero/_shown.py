"""Between micro-batches ``.grad`` shows their sum, so that who clears or zeroes gradients clears it."""

import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from .. import _C
from ..common import optimizers
from ._accumulation import Accumulation, Sum
from .states import IDLE

_showing: "weakref.WeakSet[Shown]" = weakref.WeakSet()


class Shown(Accumulation):
    """The part of the handle that shows the sum, unreduced and whole, as gradients of the original parameters."""

    _shown: tuple[int, int] | None = None  # how many gradients, and the sum of their versions, when they were shown
    _saved_grad_shard: Any

    def _show_sum(self) -> None:
        """Show it if this is the time: the unit is idle, the modules have their parameters."""
        if self._shown is not None or self._training_state is not IDLE or self._is_unsharded:
            return
        if self._sum is not Sum.ON_DEVICE and self._sum is not Sum.ON_HOST:
            return
        flat_param = self.flat_param
        total = self._sum_memory[: flat_param._unpadded_unsharded_size.numel()]
        self._clear_grads()
        _C.set_grad(flat_param, total)
        self._set_unsharded_grads(total)
        self._shown = self._versions(flat_param._params)[1:]
        _showing.add(self)
        optimizers.ask_before(_check)

    def _show_reduced(self) -> None:
        """Show what was reduced before and put aside, where nothing was added up since."""
        flat_param = self.flat_param
        reduced = getattr(flat_param, "_saved_grad_shard", None)
        if reduced is None or self._sum is not Sum.NONE or flat_param.grad is not None or self._is_unsharded:
            return
        del flat_param._saved_grad_shard
        _C.set_grad(flat_param, reduced)
        self._use_sharded_grad_views()

    def _stop_showing(self) -> bool:
        """Take notice of what the user did to what was shown, and take it back. Returns whether it was shown."""
        if self._shown is None:
            return False
        self._notice_cleared_grads()
        if self._shown is not None:
            self._clear_grads()
        _C.set_grad(self.flat_param, None)
        self._shown = None
        _showing.discard(self)
        return True

    def _notice_cleared_grads(self) -> None:
        """Give up what the user has cleared or zeroed since it was shown, of this sum and of earlier reductions."""
        if self._shown is None:
            return
        flat_param = self.flat_param
        now = self._versions(flat_param._params)[1:]
        if now == self._shown:
            return
        if now[0] == 0:
            self._shown, self._sum = None, Sum.NONE
            _showing.discard(self)
            _C.set_grad(flat_param, None)
            vars(flat_param).pop("_saved_grad_shard", None)
            self.free_full_prec_grad()
            return
        with torch.no_grad():
            super()._zero_dropped_grads()
            for i, view in enumerate(self._get_unflat_views(flat_param.grad)):
                if not view.any():
                    self._zero_grad_of_earlier_backwards(i)
        self._shown = self._versions(flat_param._params)[1:]

    def _zero_dropped_grads(self) -> None:
        self._notice_cleared_grads()

    def _reset_flat_param_grad_info_if_needed(self) -> None:
        """Take notice of cleared gradients, and of parameters that were frozen since.

        Not of a backward in progress: what it has prepared is no gradient of the user's yet.
        """
        flat_param = self.flat_param
        summary = _C.grad_summary(flat_param._params)
        requires_grad = summary[1] if summary else any(param.requires_grad for param in flat_param._params)
        if flat_param.requires_grad != requires_grad:
            flat_param.requires_grad = requires_grad
        if self._shown is not None:
            self._notice_cleared_grads()
        elif self._training_state is IDLE and not self._versions(flat_param._params)[1]:
            self._drop_reduced()

    def _drop_reduced(self) -> None:
        _C.set_grad(self.flat_param, None)
        vars(self.flat_param).pop("_saved_grad_shard", None)


def _check(optimizer: Optimizer, *arguments: Any) -> None:
    """Raises: ValueError naming a parameter whose ``.grad`` is the sum of micro-batches of this rank alone."""
    if not _showing:
        return
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"] if param.grad is not None}
    for handle in list(_showing):
        for fqn, param in zip(handle.flat_param._fqns, handle.flat_param._params, strict=True):
            if id(param) in stepped and handle._shown is not None:
                raise ValueError(
                    f"{type(optimizer).__name__}.step(): the gradient of `{fqn}` is the sum of this rank's "
                    "micro-batches, not reduced over the ranks yet: reduce it in the last one, or clear the gradients"
                )
