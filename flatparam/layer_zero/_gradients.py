"""The path of gradients through the handle: a micro-batch's gradient, the sum, the reduced shard, ``.grad``.

The driver calls these methods in the order that docs/layerzero.md gives. The state says which call is allowed.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..common.collectives import gathering
from ..common.tensors import allocate, refuse_freed, same_storage
from ..dropin.post_backward import task_of_autograd
from ..fsdp.desync import checked_collectives
from ._parameters import Parameters
from ._sums import Sum
from .states import BACKWARD_POST, BACKWARD_PRE, FORWARD, IDLE, SYNC_PARAMS, HandleTrainingState, before, state_of


class Gradients(Parameters):
    """The part of the handle from backward to the optimizer."""

    _reduced_grads: Sequence[tuple[Tensor, Tensor | None]] = ()  # .grad before unshard_grad()

    @property
    def _training_state(self) -> HandleTrainingState:
        """Raises when set: ValueError for no state, RuntimeError if it may not follow the current one."""
        return self._state

    @_training_state.setter
    def _training_state(self, value: Any) -> None:
        state = value if value.__class__ is HandleTrainingState else state_of(value)
        was = self._state
        was_in_backward = was is BACKWARD_PRE or was is BACKWARD_POST
        if state is not IDLE and was not in before(state):
            is_recomputed = state is FORWARD and was_in_backward and task_of_autograd() != -1
            if not is_recomputed:
                self._refuse(state)
        self._state = state
        if state is IDLE and was_in_backward:
            self._leave_backward()

    def _leave_backward(self) -> None:
        if self._prepared >= 0 and self.flat_param._full_grad_padded._version == self._prepared:
            self.free_runtime_unshard_grad()  # no gradient came
        self._in_backward = False
        if "_saved_grad" not in vars(self.flat_param):
            self._show()

    def _refuse(self, state: HandleTrainingState) -> None:
        was = self._state
        allowed = ", ".join(other.name for other in before(state))
        raise RuntimeError(
            f"{state.name} is not possible in {was.name}, only in {allowed}, for {self._names()}"
            + (
                ": its last backward was not ended by IDLE. Where an exception ended it, call recover() of "
                "every handle on every rank, and run all micro-batches of the step again"
                if was is BACKWARD_PRE or was is BACKWARD_POST
                else ": set IDLE first"
            )
        )

    def sync_params(self) -> None:
        """Gather changed masters now, for the next forwards: call it after a load, or before evaluation.

        IDLE -> SYNC_PARAMS -> IDLE. All ranks call it. Raises: RuntimeError in any other state.
        """
        self._training_state = SYNC_PARAMS
        try:
            self._agreed = None
            if self._has_zero3_copy or self._stays_unsharded:
                self.pre_unshard()
                if self._must_refresh():
                    self._agreed, self._confirmed = True, False
                    self.unshard()
                    self.post_unshard()
                self.reshard(True)
        finally:
            self._agreed = None
            self._training_state = IDLE

    # A micro-batch

    def prepare_gradient_for_backward(self) -> None:
        """Make zeros in ``param_dtype`` for this backward to accumulate into: ``flat_param.grad``.

        They are ``_full_grad_padded``; the views in the modules have their parts as ``.grad``. No-op in a frozen unit.
        """
        flat_param, state = self.flat_param, self._state
        if state is not BACKWARD_PRE and state is not IDLE:
            raise AssertionError(
                self._about(f"expects to be in BACKWARD_PRE, or IDLE when prefetching, not {state.name}")
            )
        if not flat_param.requires_grad:
            return
        if not self._is_unsharded:
            raise AssertionError(self._about("expects to be unsharded: call unshard() first"))
        self._check_on_compute_device(flat_param)
        buffer = flat_param._full_grad_padded
        if self._prepared < 0:
            self._stop_showing()
            if not self._in_backward:
                _C.set_grad(flat_param, None)
            allocate(buffer, flat_param._padded_unsharded_size)
            buffer.zero_()
            self._prepared, self._in_backward = buffer._version, True
        if flat_param.grad is None:
            flat_param.grad = buffer
        if state is BACKWARD_PRE:
            self._core.set_grads_of_views(buffer)

    def _take_runtime_grads(self) -> list[Tensor]:
        """Return the tensors with this backward's gradients, and clear ``flat_param.grad``.

        Usually it is one buffer. Autograd makes a second one if ``flat_param.grad`` was cleared meanwhile, or if it was
        accumulated and the unit is used once more.
        """
        flat_param = self.flat_param
        buffer, grad = flat_param._full_grad_padded, flat_param.grad
        grads = []
        if grad is not None and not same_storage(grad, buffer):
            grads.append(grad)
        if self._prepared >= 0 and (not grads or buffer._version != self._prepared):
            grads.append(buffer)
        if grads and (grads[0].requires_grad or grads[-1].requires_grad):
            raise RuntimeError(f"gradients of gradients are not supported: {self._names()}")
        _C.set_grad(flat_param, None)
        if flat_param._tensors[0] is not None:
            _C.clear_grads(flat_param._tensors)
        self._prepared = -1
        return grads

    def accumulate_grad(self) -> None:
        """Add this backward's gradient to the sum of the micro-batches, in ``full_prec_dtype``.

        No-op in a frozen unit. Raises: RuntimeError in another state than BACKWARD_POST, without
        prepare_gradient_for_backward() before, and for gradients that have a history.
        """
        if self._state is not BACKWARD_POST:
            raise RuntimeError(
                f"accumulate_grad() is not possible in {self._state.name}, only in BACKWARD_POST, for {self._names()}"
            )
        if not self.flat_param.requires_grad:
            return
        grads = self._take_runtime_grads() if self._in_backward else []
        if not grads:
            raise RuntimeError(
                f"{self._names()} has no gradient to accumulate: call prepare_gradient_for_backward() before its "
                "backward, and accumulate_grad() once after it"
            )
        self._add(grads)

    def free_runtime_unshard_grad(self) -> None:
        """Free this backward's gradient, which has been accumulated. Raises: RuntimeError if it has not."""
        if not self._is_bound:
            return
        buffer = self.flat_param._full_grad_padded
        if self._prepared >= 0:
            if buffer._version != self._prepared:
                raise RuntimeError(
                    f"the gradient of {self._names()} would be lost: call accumulate_grad() before "
                    "free_runtime_unshard_grad()"
                )
            self._take_runtime_grads()
        self._free(buffer)

    # The reduction

    @torch.no_grad()
    def _get_reduce_scatter_tensors(self) -> tuple[Tensor, Tensor]:
        """Return ``(sum of the micro-batches, empty shard)`` in ``grad_dtype``. Without a gradient the sum is zeros.

        Shapes: ``[N]`` and ``[N / ranks of zero1]``. The sum is not divided by the number of ranks.
        """
        flat_param = self.flat_param
        if not flat_param.requires_grad:
            raise RuntimeError(f"there is nothing to reduce of {self._names()}: all its parameters are frozen")
        self._stop_showing()
        self.wait_reduce_scatter()
        if self._prepared >= 0:
            came = flat_param._full_grad_padded._version != self._prepared
            grads = self._take_runtime_grads()
            if came:
                self._add(grads)
            self._free(flat_param._full_grad_padded)
        self.reload_full_prec_grad()
        self.alloc_full_prec_grad()
        total = flat_param._full_prec_grad_padded
        with self._in_order():
            whole = total.to(self._reduce_dtype)
        return whole, whole.new_empty(whole.numel() // self.zero1_world_size)

    def _get_reduce_scatter_group(self) -> dist.ProcessGroup:
        return self.zero1_process_group

    def set_shard_grad(self, shard_grad: Tensor) -> None:
        """Take the result of the reduce-scatter. If ``_rs_handle`` is set, the result is complete after waiting for it.

        A unit may be reduced several times in one backward: the results are added.
        """
        flat_param = self.flat_param
        self._check_size(shard_grad, "sharded", flat_param._sharded_size)
        self._stop_showing()
        self._reduced_before = vars(flat_param).pop("_saved_grad", None)
        flat_param._saved_grad = shard_grad
        if self._rs_handle is None:
            self._add_reduced_before()
        self._sum = Sum.NONE
        self._grad_synced = True

    @torch.no_grad()
    def prepare_gradient_for_zero1(self) -> None:
        """Show the reduced gradient: each original parameter's ``.grad`` is its 1-D piece, in ``full_prec_dtype``.

        It is added to the gradient of earlier reductions, unless the user has cleared that. The gathered parameters are
        given up, as the optimizer steps next. Without a reduction the gradients stay as they are.
        """
        flat_param = self.flat_param
        self.wait_reduce_scatter()
        reduced = vars(flat_param).pop("_saved_grad", None)
        self._forget_what_was_gathered()
        self._grad_synced = False
        if reduced is None:
            return
        self._stop_showing()
        if self._sum == Sum.NONE:
            self.free_full_prec_grad()
        if self._is_unsharded:
            self._use_sharded_flat_param()
        self._core.add_reduced(reduced.to(self.full_prec_dtype))

    prepare_gradient_for_optim = prepare_gradient_for_zero1

    def _reset_flat_param_grad_info_if_needed(self) -> None:
        """Drop gradients that the user has cleared, and update ``flat_param.requires_grad``.

        During a backward no gradient is dropped: the prepared buffer is not the user's yet.
        """
        flat_param = self.flat_param
        summary = _C.grad_summary(flat_param._params)
        requires_grad = summary[1] if summary else any(param.requires_grad for param in flat_param._params)
        if flat_param.requires_grad != requires_grad:
            flat_param.requires_grad = requires_grad
        if self._state is IDLE:
            self._stop_showing()
            self._show()

    # Whole gradients, outside of a step

    @torch.no_grad()
    def unshard_grad(self) -> None:
        """Show the whole reduced gradient while ``flat_param`` is unsharded; None if no rank has one.

        Communicates over the zero1 group: an all-reduce of one int32 and an all-gather, in ``full_prec_dtype``.
        """
        flat_param = self.flat_param
        if not self._is_unsharded or self._in_backward or self._is_shown:
            raise RuntimeError(
                f"unshard_grad() needs {self._names()} unsharded, outside of backward and with reduced gradients"
            )
        shard = flat_param.grad
        refuse_freed(shard, self._about("the reduced gradient"))
        count = torch.tensor([shard is not None], dtype=torch.int32, device=self.device)
        group = self.zero1_process_group
        checked_collectives.run(dist.all_reduce, count, group=group)
        self._reduced_grads = [(one, one.grad) for one in (flat_param, *flat_param._params)]
        if not count.item():
            return
        if shard is None:
            shard = torch.zeros(flat_param._sharded_size, dtype=self.full_prec_dtype, device=self.device)
        whole = shard.new_empty(flat_param._padded_unsharded_size)
        checked_collectives.run(gathering(), whole, shard, group=group)
        _C.set_grad(flat_param, whole)
        for param, view in zip(flat_param._params, self.unit.flat_params[0].unsharded(whole), strict=True):
            _C.set_grad(param, view)

    @torch.no_grad()
    def reshard_grad(self) -> None:
        """Show the pieces of the reduced gradient again. ``flat_param`` is sharded already."""
        for one, grad in self._reduced_grads:
            _C.set_grad(one, grad)
        self._reduced_grads = []

    # After an exception

    @torch.no_grad()
    def recover(self) -> None:
        """After an exception in a step, drop the gathered parameters and the sum of the micro-batches; go to IDLE.

        Call it for every handle on every rank: else the micro-batches would count in some units and not in others.
        Gradients that were reduced before the step stay. No collective call, but it waits for those that have begun.
        """
        flat_param = self.flat_param
        self.wait_unshard()
        if hasattr(flat_param, "_full_param_padded"):
            self.wait_reduce_scatter()
            vars(flat_param).pop("_saved_grad", None)
            self._reduced_before = None
            with contextlib.suppress(ValueError):  # a change of what is dropped
                self._stop_showing()
            if self._in_backward:
                self._take_runtime_grads()
            self._free(flat_param._full_grad_padded)
            self._sum = Sum.NONE
            self.free_full_prec_grad()
            self._is_from_masters = self._in_backward = False
            self._use_sharded_flat_param()
            self._free_unsharded_flat_tensor()
            flat_param._tensors[:] = [None] * len(flat_param._tensors)
            self._forget_what_was_gathered()
        self._grad_synced = self._prefetched = self._ran_pre_backward_hook = self.enter_backward = False
        self._state = IDLE
        self._show()
