"""The sum of a unit's micro-batches, in full precision, on the device or offloaded to the host.

Between micro-batches ``.grad`` shows the sum, whole and unreduced. Edits of users count by the table in
`csrc/tensor/fp_gradients.h`. An optimizer that would step the sum is refused.
"""

import weakref
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .. import _C
from ..common.patches import Lifetime
from ..common.tensors import allocate, is_allocated, refuse_freed
from ..common.warned import warn_user
from ..fsdp.desync import checked_collectives
from ._base import Base
from .states import IDLE

_shown_live = Lifetime("from the first sum of micro-batches that a LayerZero handle shows to the end of the last")
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

    _sum = Sum.NONE
    _last_use: Any = None  # an event on an accelerator
    _is_watched = False  # optimizers are checked before they step
    _rs_handle: Any = None
    _reduced_before: Tensor | None = None  # an earlier result of this backward, while the next reduction runs

    def _in_order(self) -> AbstractContextManager[None]:
        return _IN_ORDER if self.device.type == "cpu" else self._in_order_of_streams()

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
                self._show()
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
            warn_user(
                "offload_grad() does nothing: the handle was made with offload_grads=False", (self.zero1_process_group,)
            )
            return
        if self._sum != Sum.ON_DEVICE:
            raise RuntimeError(
                f"{self._names()} has no gradient on the device to offload ({Sum(self._sum).name}): call it after "
                "accumulate_grad() of a micro-batch"
            )
        was_shown = self._stop_showing()
        if self._sum != Sum.ON_DEVICE:  # the user has cleared it
            return
        for tensor in (self.flat_param._cpu_grad, self.flat_param._full_prec_grad_padded):
            refuse_freed(tensor, self._about("the sum of the micro-batches"))
        with self._in_order():
            self.flat_param._cpu_grad.copy_(self.flat_param._full_prec_grad_padded, non_blocking=True)
        self._sum = Sum.ON_HOST
        if was_shown:
            self._show()

    def reload_full_prec_grad(self) -> None:
        """Copy the sum back to the device, on the current stream, if it was offloaded."""
        if self._sum is not Sum.ON_HOST:
            return
        self._stop_showing()
        if self._sum is not Sum.ON_HOST:  # the user has cleared it
            return
        refuse_freed(self.flat_param._cpu_grad, self._about("the sum of the micro-batches on the host"))
        self._allocate_sum()
        with self._in_order():
            self.flat_param._full_prec_grad_padded.copy_(self.flat_param._cpu_grad, non_blocking=True)
        self._sum = Sum.ON_DEVICE

    # Showing it

    def _show(self) -> None:
        """If the unit is IDLE and sharded, let ``.grad`` show the sum; without one the reduced gradient."""
        if self._is_shown or self._is_unsharded or self._state is not IDLE or self._core is None:
            return
        if self._sum is not Sum.ON_DEVICE and self._sum is not Sum.ON_HOST:
            self._core.show_sum(None)
            return
        if self._last_use is not None:
            self._last_use.synchronize()  # the host reads memory that a copy still writes
        flat_param = self.flat_param
        self._core.show_sum(flat_param._full_prec_grad_padded if self._sum is Sum.ON_DEVICE else flat_param._cpu_grad)
        self._is_shown = True
        if not self._is_watched:
            self._is_watched = True
            _watched.add(self)
            _shown_live.hold(self)

    def _stop_showing(self) -> bool:
        """Take over what the user did to the sum that ``.grad`` shows; then show the reduced gradient.

        Returns: whether the sum was shown. Raises: ValueError naming a parameter whose change cannot count.
        """
        if not self._is_shown:
            return False
        self._is_shown = False
        is_left = False
        try:
            is_left = self._core.show_accumulated(False)
        finally:
            _C.set_grad(self.flat_param, None)
            if not is_left:
                self._sum = Sum.NONE
                self.free_full_prec_grad()
        return True

    def _use_sharded_grad_views(self) -> None:
        """Set each original parameter's ``.grad`` to its 1-D piece of the reduced gradient, or to None."""
        self._check_sharded(self.flat_param)
        [flat], grad = self.unit.flat_params, self.sharded_grad
        for original, (start, numel) in zip(flat.originals, flat.piece_ranges(), strict=True):
            is_none = grad is None or numel < 0 or not original.param.requires_grad
            _C.set_grad(original.param, None if grad is None or is_none else grad.narrow(0, start, numel))

    @property
    def sharded_grad(self) -> Tensor | None:
        """The reduced gradient in ``full_prec_dtype``; None: there is none, or ``.grad`` shows the sum."""
        flat_param = self.flat_param
        if hasattr(flat_param, "_saved_grad"):
            saved: Tensor = flat_param._saved_grad.to(self.full_prec_dtype)
            return saved
        return None if self._is_shown or self._prepared >= 0 else flat_param.grad

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


@_shown_live.register(register_optimizer_step_pre_hook, "tests/layer_zero/test_layer_zero.py")
def _check(optimizer: Optimizer, *arguments: Any) -> None:
    """Refuse to step a sum that is not reduced.

    Raises: ValueError naming a parameter whose ``.grad`` is this rank's own sum.
    """
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
