"""The sum of a unit's micro-batches, in full precision, on the device or offloaded to the host.

Between micro-batches ``.grad`` shows the sum, whole and unreduced: if the user clears or zeroes gradients, the sum is
cleared. An optimizer that would step it is refused.
"""

import warnings
import weakref
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .. import _C
from ..common import optimizers
from ..common.tensors import allocate, is_allocated, refuse_freed
from ..dropin import gradients, writeback
from ..fsdp.desync import checked_collectives
from ._base import Base
from .states import IDLE

_watched: "weakref.WeakSet[Sums]" = weakref.WeakSet()  # handles that have shown a sum
_IN_ORDER = nullcontext()  # on the host everything runs in order


class Sum(IntEnum):
    """The place of the sum of the micro-batches."""

    NONE = auto()
    ZEROS = auto()  # on the device; nothing was added yet
    ON_DEVICE = auto()
    ON_HOST = auto()  # memory on the device, if any, is ignored


class Sums(Base):
    """The part of the handle that keeps ``_full_prec_grad_padded`` and its copy ``_cpu_grad`` on the host.

    Each operation on them waits, on its stream, for the previous one (``_in_order``): the driver may use any streams.
    """

    _last_use: Any = None  # an event on an accelerator
    _is_watched = False  # optimizers are checked before they step
    _versions_shown: list[int | None] | None = None  # of each gradient as shown, if reduced ones are put aside
    _rs_handle: Any = None
    _reduced_before: Tensor | None = None  # an earlier result of this backward, while the next reduction runs

    def _in_order(self) -> AbstractContextManager[None]:
        return _IN_ORDER if self._is_on_host else self._in_order_of_streams()

    @contextmanager
    def _in_order_of_streams(self) -> Generator[None, None, None]:
        if self._last_use is not None:
            self._last_use.wait()
        yield
        self._last_use = self._device_handle.Event()
        self._last_use.record()

    def already_load_full_prec_grad(self) -> bool:
        """Whether the sum is on the device, perhaps zeros so far."""
        return self._sum in (Sum.ZEROS, Sum.ON_DEVICE)

    def alloc_full_prec_grad(self) -> None:
        """Allocate the sum on the device. It is zeroed, unless it will be reloaded from the host."""
        if self.already_load_full_prec_grad():
            return
        self._allocate_sum()
        if self._sum == Sum.NONE:
            with self._in_order():
                self.flat_param._full_prec_grad_padded.zero_()
            self._sum = Sum.ZEROS

    def _allocate_sum(self) -> None:
        self.wait_reduce_scatter()  # the reduction may still read that memory
        allocate(self.flat_param._full_prec_grad_padded, self.flat_param._padded_unsharded_size)

    def free_full_prec_grad(self) -> None:
        """Free the sum's memory on the device. Unless it was offloaded, the sum is lost."""
        if self._sum != Sum.ON_HOST:
            was_shown = self._stop_showing()
            self._sum = Sum.NONE
            if was_shown:
                self._show_reduced()
        total = self.flat_param._full_prec_grad_padded
        if is_allocated(total):
            with self._in_order():
                self._free(total)

    def _add(self, grads: list[Tensor]) -> None:
        """Add the gradients of one micro-batch, of any dtype. Each takes one pass over memory."""
        self.reload_full_prec_grad()
        total = self.flat_param._full_prec_grad_padded
        if self._sum == Sum.NONE:
            self._allocate_sum()
        with self._in_order():
            for grad in grads:
                first = self._sum == Sum.NONE
                if _C.is_plain(total, grad):
                    _C.convert(total, grad.detach(), not first)
                elif first:
                    total.copy_(grad)
                else:
                    total.add_(grad)
                self._sum = Sum.ON_DEVICE

    def offload_grad(self) -> None:
        """Move the sum to ``_cpu_grad``. ``free_full_prec_grad()`` then frees the memory on the device.

        The copy runs on the current stream. Raises: RuntimeError if nothing was accumulated since the last reduction.
        """
        if not self._offload_grads:
            warnings.warn(
                f"offload_grad() does nothing for {self._names()}: it was made with offload_grads=False", stacklevel=2
            )
            return
        if self._sum != Sum.ON_DEVICE:
            raise RuntimeError(
                f"{self._names()} has no gradient on the device to offload ({Sum(self._sum).name}): call it after "
                "accumulate_grad() of a micro-batch"
            )
        shown = self._stop_showing()
        for tensor in (self.flat_param._cpu_grad, self.flat_param._full_prec_grad_padded):
            refuse_freed(tensor, self._about("the sum of the micro-batches"))
        with self._in_order():
            self.flat_param._cpu_grad.copy_(self.flat_param._full_prec_grad_padded, non_blocking=True)
        self._sum = Sum.ON_HOST
        if shown:
            self._show_sum()

    def _reload(self) -> None:
        self._stop_showing()
        refuse_freed(self.flat_param._cpu_grad, self._about("the sum of the micro-batches on the host"))
        self._allocate_sum()
        with self._in_order():
            self.flat_param._full_prec_grad_padded.copy_(self.flat_param._cpu_grad, non_blocking=True)
        self._sum = Sum.ON_DEVICE

    # Showing it

    def _show_sum(self) -> None:
        """Let ``.grad`` show the sum, if there is one, the unit is IDLE and sharded."""
        if self._is_shown or self._state is not IDLE or self._is_unsharded:
            return
        if self._sum != Sum.ON_DEVICE and self._sum != Sum.ON_HOST:
            return
        flat_param = self.flat_param
        whole = flat_param._cpu_grad if self._sum == Sum.ON_HOST else flat_param._full_prec_grad_padded
        total = whole[: flat_param._unpadded_unsharded_size.numel()]
        has_aside = hasattr(flat_param, "_saved_grad_shard")
        if has_aside:  # csrc/tensor/fp_gradients.h has the rule
            if self._last_use is not None:
                self._last_use.synchronize()  # the host reads memory that a copy still writes
            _C.mark_zeros(total)
        gradients.clear_grads(self._flat)
        _C.set_grad(flat_param, total)
        gradients.set_unsharded_grads(self._flat, total)
        self._note_shown()
        self._versions_shown = writeback.versions_of_grads(self._flat) if has_aside else None
        if self._is_on_host and self._sum == Sum.ON_DEVICE:
            self._total = None if has_aside else total  # C can show it again, without marking zeros
        if not self._is_watched:
            self._is_watched = True
            _watched.add(self)
            optimizers.ask_before(_check)

    def _show_reduced(self) -> None:
        """Let ``.grad`` show the reduced gradient that was put aside, if there is no sum."""
        flat_param = self.flat_param
        reduced = getattr(flat_param, "_saved_grad_shard", None)
        if reduced is None or self._sum != Sum.NONE or flat_param.grad is not None or self._is_unsharded:
            return
        del flat_param._saved_grad_shard
        _C.set_grad(flat_param, reduced)
        self._use_sharded_grad_views()

    def _use_sharded_grad_views(self) -> None:
        """Set each original parameter's ``.grad`` to its 1-D piece of the reduced gradient, or to None."""
        self._flat._check_sharded(self.flat_param)
        gradients.set_sharded_grads(self._flat, self.sharded_grad)

    @property
    def sharded_grad(self) -> Tensor | None:
        """The reduced gradient in ``full_prec_dtype``, from whichever attribute holds it; None: there is none."""
        flat_param = self.flat_param
        for name in ("_saved_grad", "_saved_grad_shard"):
            if hasattr(flat_param, name):
                shard: Tensor | None = getattr(flat_param, name)
                return shard if shard is None else shard.to(self.full_prec_dtype)
        return None if self._is_shown or self._prepared >= 0 else flat_param.grad

    def _stop_showing_by_ops(self) -> bool:
        self._notice_cleared_grads()
        if self._is_shown:
            gradients.clear_grads(self._flat)
        _C.set_grad(self.flat_param, None)
        self._is_shown = False
        return True

    def _notice_cleared_grads(self) -> None:
        """Clear or zero in the sum, and in the gradient put aside, what the user has cleared or zeroed in ``.grad``.

        Raises: ValueError naming a parameter, if its gradient was changed in another way while a reduced one is put
        aside: the change would not reach that one.
        """
        if not self._is_shown or self._is_as_shown:
            return
        flat_param = self.flat_param
        if self._versions()[1] == 0:
            self._is_shown, self._sum = False, Sum.NONE
            _C.set_grad(flat_param, None)
            vars(flat_param).pop("_saved_grad_shard", None)
            self.free_full_prec_grad()
            return
        with torch.no_grad():
            zeroed = self._zeroed_grads()
            writeback.zero_dropped_grads(self._flat)
            for i in zeroed:
                writeback.zero_grad_of_earlier_backwards(self._flat, i)
        self._note_shown()

    def _zeroed_grads(self) -> list[int]:
        """Return indices of parameters whose gradients were zeroed in place. Raises: as ``_notice_cleared_grads``."""
        flat_param, zeroed = self.flat_param, []
        pairs = zip(writeback.versions_of_grads(self._flat), self._versions_shown or (), strict=False)
        changed = [i for i, (now, shown) in enumerate(pairs) if now is not None and now != shown]
        views = list(self._flat._get_unflat_views(flat_param.grad)) if changed else []
        for i in changed:
            if not _C.is_zeroed(views[i]):
                raise ValueError(
                    f"the gradient of `{flat_param._fqns[i]}` was changed in place between micro-batches. There it "
                    "shows their sum; what was reduced before was put aside, and would not have been changed. Change "
                    "gradients after the reduction, or call recover() of every handle"
                )
            zeroed.append(i)
        return zeroed

    def _drop_cleared_grad(self) -> Tensor | None:
        """Return the reduced gradient. If no original parameter has a gradient, drop it and return None."""
        flat_param = self.flat_param
        if self._versions()[1] == 0:
            _C.set_grad(flat_param, None)
            vars(flat_param).pop("_saved_grad_shard", None)
        grad: Tensor | None = flat_param.grad
        return grad

    # Reducing it

    def wait_reduce_scatter(self) -> None:
        """Wait for ``_rs_handle``, if the driver has set it, and free the sum that it has reduced."""
        if self._rs_handle is not None:
            if isinstance(self._rs_handle, dist.Work):
                checked_collectives.wait(self._rs_handle, self.zero1_process_group, self.device, is_reduce_scatter=True)
            else:
                self._rs_handle.wait()
            self._rs_handle = None
            self._add_reduced_before()
            self.free_full_prec_grad()

    @torch.no_grad()
    def _add_reduced_before(self) -> None:
        before, self._reduced_before = self._reduced_before, None
        if before is not None:
            self.flat_param._saved_grad += before


def _check(optimizer: Optimizer, *arguments: Any) -> None:
    """Before a step of ``optimizer``. Raises: ValueError naming a parameter whose ``.grad`` is this rank's own sum."""
    showing = [handle for handle in _watched if handle._is_shown]
    if not showing:
        return
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"] if param.grad is not None}
    for handle in showing:
        for fqn, param in zip(handle.flat_param._fqns, handle.flat_param._params, strict=True):
            if id(param) in stepped:
                raise ValueError(
                    f"{type(optimizer).__name__}.step(): the gradient of `{fqn}` is the sum of this rank's "
                    "micro-batches, not reduced over the ranks yet: reduce it in the last one, or clear the gradients"
                )
