"""The path of the gradients: a micro-batch's, the sum, the reduced shard, ``.grad`` of the original parameters."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..common.collectives import gathering
from ..common.storage import allocate, same_storage
from ..fsdp import order
from ._accumulation import Sum
from ._shown import Shown
from .states import BACKWARD_POST, BACKWARD_PRE, IDLE


class Gradients(Shown):
    """The part of the handle from backward to the optimizer."""

    _rs_handle: Any = None
    _grad_synced: bool
    _count_reduced = 0  # of how many parameters the gradients were shown when they were reduced last
    _reduced_before: Tensor | None = None  # in this backward, by a reduction whose successor is under way
    _prepared: int | None = None  # version of this backward's gradient when it was zeros
    _in_backward = False  # since prepare_gradient_for_backward(), until the state is IDLE

    # A micro-batch

    @torch.no_grad()
    def prepare_gradient_for_backward(self) -> None:
        """Make zeros in ``param_dtype`` for this backward to accumulate into: ``flat_param.grad``.

        They are ``_full_grad_padded``; the views in the modules have their parts as ``.grad``. What was reduced before
        is put aside, to be added to. Nothing happens in a frozen unit.
        """
        flat_param = self.flat_param
        if self._training_state not in (BACKWARD_PRE, IDLE):
            raise AssertionError(
                self._about(f"expects to be in BACKWARD_PRE, or IDLE when prefetching, not {self._training_state.name}")
            )
        if not flat_param.requires_grad:
            return
        self._check_on_compute_device(flat_param)
        if not self._is_unsharded:
            raise AssertionError(self._about("expects to be unsharded: call unshard() first"))
        grad = flat_param._full_grad_padded
        if self._prepared is None:
            self._set_aside()
            allocate(grad, flat_param._padded_unsharded_size)
            grad.zero_()
            self._prepared = grad._version
            self._in_backward = True
        if flat_param.grad is None:
            flat_param.grad = grad
        if self._training_state is BACKWARD_PRE:
            self._set_unsharded_grads(grad)

    def _set_aside(self) -> None:
        """Take the user's gradients from ``flat_param.grad``: reduced ones become ``_saved_grad_shard``."""
        flat_param = self.flat_param
        self._stop_showing()
        if flat_param.grad is not None and not self._in_backward:
            count = self._versions(flat_param._params)[1]
            if 0 < count < self._count_reduced:
                self._zero_cleared_pieces()
            if count:
                flat_param._saved_grad_shard = flat_param.grad
            _C.set_grad(flat_param, None)

    def _zero_cleared_pieces(self) -> None:
        """Zero in the reduced gradient what the user has cleared since it was shown."""
        flat_param = self.flat_param
        for i, (param, piece) in enumerate(zip(flat_param._params, flat_param._shard_param_infos, strict=True)):
            if param.grad is None and piece.in_shard:
                flat_param.grad[piece.offset_in_shard : piece.offset_in_shard + piece.numel_in_shard].zero_()
                flat_param._is_grad_none_mask[i] = True

    def _take_runtime_grads(self) -> list[Tensor]:
        """What this backward's gradients are in, and no longer ``flat_param.grad``.

        One buffer as a rule. Autograd makes another if ``flat_param.grad`` was cleared meanwhile, or accumulated and
        the unit is used once more.
        """
        flat_param = self.flat_param
        buffer, grad = flat_param._full_grad_padded, flat_param.grad
        grads = []
        if grad is not None and not same_storage(grad, buffer):
            grads.append(grad)
        if self._prepared is not None and (not grads or buffer._version != self._prepared):
            grads.append(buffer)
        if any(grad.requires_grad for grad in grads):
            raise RuntimeError(f"gradients of gradients are not supported: {self._names()}")
        _C.set_grad(flat_param, None)
        if flat_param._tensors[0] is not None:
            _C.clear_grads(flat_param._tensors)
        self._prepared = None
        return grads

    def accumulate_grad(self) -> None:
        """Add this backward's gradient to the sum of the micro-batches, in ``full_prec_dtype``.

        Nothing happens in a frozen unit. Raises: RuntimeError in another state than BACKWARD_POST, without
        ``prepare_gradient_for_backward()`` before, and for gradients that have a history.
        """
        if self._training_state is not BACKWARD_POST:
            raise RuntimeError(
                f"accumulate_grad() is not possible in {self._training_state.name}, only in BACKWARD_POST, for "
                f"{self._names()}"
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
        buffer = self.flat_param._full_grad_padded
        if self._prepared is not None:
            if buffer._version != self._prepared:
                raise RuntimeError(
                    f"the gradient of {self._names()} would be lost: call accumulate_grad() before "
                    "free_runtime_unshard_grad()"
                )
            self._take_runtime_grads()
        self._free(buffer)

    @torch.no_grad()
    def _leave_backward(self) -> None:
        """Give up what was prepared for a gradient that did not come; show the user what he has now."""
        flat_param = self.flat_param
        if self._prepared is not None and flat_param._full_grad_padded._version == self._prepared:
            self.free_runtime_unshard_grad()
        self._in_backward = False
        if not hasattr(flat_param, "_saved_grad"):
            self._show_sum()
            self._show_reduced()

    # The reduction

    @torch.no_grad()
    def _get_reduce_scatter_tensors(self) -> tuple[Tensor, Tensor]:
        """``(sum of the micro-batches, empty shard)``, in ``grad_dtype``; zeros for a unit that got no gradient.

        Shapes: ``[N]`` and ``[N / ranks]``. Neither is divided by the number of ranks.
        """
        flat_param = self.flat_param
        if not flat_param.requires_grad:
            raise RuntimeError(f"there is nothing to reduce of {self._names()}: all its parameters are frozen")
        self._stop_showing()
        self.wait_reduce_scatter()
        if self._prepared is not None:
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
        """Hand over what the reduce-scatter gives, or will have given when ``_rs_handle`` is waited for.

        Of a unit that is reduced more than once in a backward all count.
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

    def wait_reduce_scatter(self) -> None:
        """Wait for ``_rs_handle``, which the driver has set, and free what it has reduced."""
        if self._rs_handle is not None:
            if isinstance(self._rs_handle, dist.Work):
                order.wait(self._rs_handle, self.zero1_process_group, self.device, is_reduce_scatter=True)
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

    def _wait_for_reduction(self) -> None:
        self.wait_reduce_scatter()

    @torch.no_grad()
    def prepare_gradient_for_zero1(self) -> None:
        """Show the reduced gradient: each original parameter's ``.grad`` is its 1-D piece, in ``full_prec_dtype``.

        It is added to that of earlier reductions, unless the user has cleared it. What forwards gathered is given up:
        the optimizer steps next. A unit that nothing was reduced of keeps the gradients it has.
        """
        flat_param = self.flat_param
        self.wait_reduce_scatter()
        reduced = vars(flat_param).pop("_saved_grad", None)
        self._forget_what_was_gathered()
        self._grad_synced = False
        if reduced is None:
            return
        self._set_aside()
        if self._sum is Sum.NONE:
            self.free_full_prec_grad()
        reduced = reduced.to(self.full_prec_dtype)
        earlier = vars(flat_param).pop("_saved_grad_shard", None)
        if earlier is not None:
            reduced += earlier
        if self._is_unsharded:
            self._use_sharded_flat_param()
        flat_param.grad = reduced
        self._note_grads_came()
        self._use_sharded_grad_views()
        self._count_reduced = self._versions(flat_param._params)[1]

    prepare_gradient_for_optim = prepare_gradient_for_zero1

    @property
    def sharded_grad(self) -> Tensor | None:
        """The reduced gradient, wherever it is; None if there is none."""
        flat_param = self.flat_param
        for name in ("_saved_grad", "_saved_grad_shard"):
            if hasattr(flat_param, name):
                shard: Tensor | None = getattr(flat_param, name)
                return shard if shard is None else shard.to(self.full_prec_dtype)
        shown: Tensor | None = flat_param.grad
        return None if self._shown is not None or self._prepared is not None else shown

    # Whole gradients, outside of a step

    @torch.no_grad()
    def unshard_grad(self) -> None:
        """Show the whole reduced gradient while ``flat_param`` is unsharded; None where no rank has one.

        Communicates over the zero1 group: an all-reduce of one int32 and an all-gather, in ``full_prec_dtype``.
        """
        flat_param = self.flat_param
        if not self._is_unsharded or self._in_backward or self._shown is not None:
            raise RuntimeError(
                f"unshard_grad() needs {self._names()} unsharded, outside of backward and with reduced gradients"
            )
        shard = flat_param.grad
        count = torch.tensor([shard is not None], dtype=torch.int32, device=self.device)
        group = self.zero1_process_group
        order.wait(order.issue(dist.all_reduce, count, group=group), group, self.device)
        flat_param._saved_grad_shard = shard
        if not count.item():
            self._clear_grads()
            return
        if shard is None:
            shard = torch.zeros(flat_param._sharded_size, dtype=self.full_prec_dtype, device=self.device)
        whole = shard.new_empty(flat_param._padded_unsharded_size)
        order.wait(order.issue(gathering(), whole, shard, group=group), group, self.device)
        self._clear_grads()
        _C.set_grad(flat_param, whole)
        self._set_unsharded_grads(whole)

    @torch.no_grad()
    def reshard_grad(self) -> None:
        """Go back to the pieces of the reduced gradient; ``flat_param`` is sharded again."""
        flat_param = self.flat_param
        self._clear_grads()
        _C.set_grad(flat_param, flat_param._saved_grad_shard)
        del flat_param._saved_grad_shard
        self._use_sharded_grad_views()

    # After an exception

    @torch.no_grad()
    def recover(self) -> None:
        """Give up a step that an exception has broken off: its gathers, and the sum of its micro-batches.

        Call it for every handle on every rank, or the micro-batches of some units count and of others do not. Gradients
        that were reduced before it stay.
        """
        flat_param = self.flat_param
        self.wait_unshard()
        if hasattr(flat_param, "_full_param_padded"):
            self.wait_reduce_scatter()
            vars(flat_param).pop("_saved_grad", None)
            self._reduced_before = None
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
        self._layer_zero_state = IDLE
        self._show_reduced()

    _ran_pre_backward_hook: bool
    enter_backward: bool
