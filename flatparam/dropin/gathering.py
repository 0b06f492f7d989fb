"""Unshard and reshard the flat parameter: gather, switch its data and the views, free.

torch's runtime calls these methods in each forward and backward; ``summon_full_params()`` calls them too. Usually no
method was replaced, and a step is one call to C. A method named ``..._fused`` is that fast path: it does the work of
the method without ``_fused`` and returns True, or changes nothing and returns False.
"""

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..common.collectives import all_gather_chunks, all_gather_single, is_replaced, is_sliced, native_gather
from ..common.tensors import allocate, free, has_memory, is_allocated, same_storage
from ..common.torch_private import (
    NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES,
    HandleShardingStrategy,
    HandleTrainingState,
    _no_dispatch_record_stream,
)
from .base import RESHARD, TORCH_HANDLE, UNSHARD, step_of, unseen
from .comparing import check_same_on_all_ranks
from .gradients import Gradients
from .views import SETATTR_IN_C

fast_path_is_on = os.environ.get("FLATPARAM_FUSED", "1") != "0"  # off: tests compare the fast path with the steps

_NO_SHARD = HandleShardingStrategy.NO_SHARD
_FORWARD, _BACKWARD_PRE = HandleTrainingState.FORWARD, HandleTrainingState.BACKWARD_PRE
_BACKWARD_POST = HandleTrainingState.BACKWARD_POST


class Gathering(Gradients):
    """The part of FlatParamHandle that a step and summon_full_params() go through."""

    _is_compared = False  # check_same_on_all_ranks() has run
    _native: tuple[Any, _C.Gather | None] = (None, None)  # (group, its gather in C, or None: use torch's Python)
    _chunks: tuple[Tensor | None, tuple[Tensor, ...]] = (None, ())  # (tensor, its chunks), kept between gathers

    # Unsharding

    @unseen
    def pre_unshard(self) -> bool:
        """Prepare ``flat_param`` for the gather: write back users' changes, move to the device, cast.

        Returns: whether it changed anything. On an exception in SUMMON_FULL_PARAMS the handle goes back to IDLE.
        """
        try:
            state = self._training_state
            if state is not HandleTrainingState.BACKWARD_PRE:
                self._keep_moved_shard()
            if state is HandleTrainingState.SUMMON_FULL_PARAMS and self._skipped_use_sharded_views:
                self._use_sharded_views()
            ran = False
            if self._use_orig_params and not self._skip_writeback_check:
                ran = self._writeback_orig_params()
            if self.uses_sharded_strategy and not self._offload_params and not self.needs_unshard():
                pass
            elif self._uses_param_mixed_precision and not self._force_full_precision:
                self._use_low_precision_shard()
                ran = True
            elif self._offload_params and self.flat_param.device != self.device:
                TORCH_HANDLE.flat_param_to(self, self.device, non_blocking=True)  # `_local_shard` stays on the host
                ran = True
            self._check_on_compute_device(self.flat_param)
            return ran
        except BaseException:
            self._leave_summon()
            raise

    @step_of(RESHARD)
    def _use_low_precision_shard(self) -> None:
        """Cast the shard into ``_mp_shard`` on the compute device; ``flat_param.data`` becomes ``_mp_shard``."""
        self._check_low_precision_shard()
        flat_param = self.flat_param
        allocate(flat_param._mp_shard, flat_param._local_shard.size())
        flat_param._mp_shard.copy_(flat_param._local_shard.to(self.device, non_blocking=True))
        flat_param.data = flat_param._mp_shard

    @unseen
    def unshard(self) -> None:
        """All-gather the flat parameter, unless it is unsharded already, and switch data and views to it.

        A collective call. In SUMMON_FULL_PARAMS it gathers even if unsharded: the values may be old. There, and in
        eval with FSDP_USE_FULL_PREC_IN_EVAL=1, it gathers in full precision. On an exception in SUMMON_FULL_PARAMS the
        handle goes back to IDLE.
        """
        if self._unshard_fused():
            return
        try:
            if self.needs_unshard():
                if self._freed_reason is None:
                    free(self._get_padded_unsharded_flat_param())  # remove the error of an earlier free
                unsharded = self._alloc_padded_unsharded_flat_param()
                unsharded = self._all_gather_flat_param(unsharded)
            elif self.uses_sharded_strategy:
                unsharded = self._get_padded_unsharded_flat_param()
                if self._training_state is HandleTrainingState.SUMMON_FULL_PARAMS:
                    self._all_gather_flat_param(unsharded)  # old values might be shown and saved
            else:
                unsharded = self.flat_param
            self._use_unsharded_flat_param(unsharded)
        except BaseException:
            self._leave_summon()
            raise

    @step_of(UNSHARD)
    def needs_unshard(self) -> bool:
        """Whether the strategy is sharded and the unsharded flat parameter has no memory."""
        if not self.uses_sharded_strategy:
            return False
        unsharded = self._get_padded_unsharded_flat_param()
        return not is_allocated(unsharded)

    @step_of(UNSHARD, RESHARD)
    def _alloc_padded_unsharded_flat_param(self) -> Tensor:
        self._check_sharded_strategy()
        unsharded = self._get_padded_unsharded_flat_param()
        try:
            self._check_storage_freed(unsharded)
        except AssertionError as error:
            raise self._wrong(str(error)) from None
        allocate(unsharded, self.flat_param._padded_unsharded_size)
        return unsharded

    @step_of(UNSHARD, RESHARD)
    def _get_padded_unsharded_flat_param(self) -> Tensor:
        """Return the tensor to gather into: ``_full_param_padded``, or the full-precision one if that is forced.

        Forcing full precision frees the low-precision tensor: the user may write parameters, and it would be outdated.
        """
        self._check_sharded_strategy()
        flat_param = self.flat_param
        unsharded: Tensor = flat_param._full_param_padded
        if not (self._force_full_precision and self._uses_param_mixed_precision):
            return unsharded
        unsharded = flat_param._full_prec_full_param_padded
        if unsharded.dtype == self._fwd_bwd_param_dtype:
            raise self._wrong(f"Expects full precision but got {self._fwd_bwd_param_dtype}")
        self._free(flat_param._full_param_padded)
        return unsharded

    def _all_gather_flat_param(self, padded_unsharded_flat_param: Tensor) -> Tensor:
        """All-gather ``flat_param.data`` into ``padded_unsharded_flat_param``, and return that. A collective call."""
        if not (hasattr(self, "process_group") and hasattr(self, "world_size")):
            raise self._wrong("Expects a process group and world size, which this handle has no more")
        shard = self.flat_param.data
        numel = shard.numel()
        self._check_memory_of_shard(shard)
        self._left_values = None
        expected = numel * self.world_size
        if padded_unsharded_flat_param.numel() != expected:
            raise self._wrong(f"Expects {expected} numel but got {padded_unsharded_flat_param.numel()}")
        group: Any = self._fake_process_group if self._use_fake_all_gather else self.process_group
        try:
            if not self._is_compared and not self._use_fake_all_gather:
                check_same_on_all_ranks(self)
                self._is_compared = True
            if self._gather_in_c(padded_unsharded_flat_param, shard, group):
                pass
            elif shard.is_cpu:
                all_gather_chunks(self._chunks_of(padded_unsharded_flat_param), shard, group)
            else:
                all_gather_single(padded_unsharded_flat_param, shard, group)
        except BaseException:
            self._leave_memory(padded_unsharded_flat_param, shard)
            raise
        if self._offload_params:  # the shard was copied to the device on another stream
            _no_dispatch_record_stream(shard, self._device_handle.current_stream())
        return padded_unsharded_flat_param

    def _gather_in_c(self, padded: Tensor, shard: Tensor, group: Any) -> bool:
        """All-gather without torch's Python. Returns: False, and nothing is done, if torch's function is needed."""
        if self._native[0] is not group:
            self._native = group, native_gather(group, shard.device) if is_sliced(group, shard.device) else None
        native = self._native[1]
        if native is None or not fast_path_is_on or is_replaced(dist.all_gather) or not _C.is_plain(padded, shard):
            return False
        if shard.dtype != padded.dtype:
            return False  # torch's function raises an error for it
        self._native = (None, None)  # if the wait is interrupted, the gather goes on: do not reuse it
        native.begin(padded, shard)
        while not native.wait():
            pass
        self._native = group, native
        return True

    def _chunks_of(self, padded: Tensor) -> list[Tensor]:
        """Return one chunk of ``padded`` for each rank. The chunks of the last tensor are kept."""
        kept, chunks = self._chunks
        if kept is not padded or not self._are_chunks(chunks, padded):
            chunks = padded.detach().chunk(self.world_size)  # detached: a view would refer to its owner, a cycle
            self._chunks = (padded, chunks) if _C.is_plain(padded, *chunks) else (None, ())
        return list(chunks)

    def _are_chunks(self, chunks: tuple[Tensor, ...], padded: Tensor) -> bool:
        """Whether ``chunks`` still are the chunks of ``padded``: a user may have set its data."""
        first = chunks[0]
        return (
            len(chunks) == self.world_size
            and first.numel() * self.world_size == padded.numel()
            and (first.dtype, first.storage_offset(), first.stride())
            == (padded.dtype, padded.storage_offset(), padded.stride())
            and same_storage(first, padded)
        )

    @step_of(UNSHARD)
    def _use_unsharded_flat_param(self, padded_unsharded_flat_param: Tensor) -> None:
        """Set ``flat_param.data`` to the unpadded part of the tensor, and the original parameters to views of it."""
        flat_param = self.flat_param
        flat_param.data = padded_unsharded_flat_param[: flat_param._unpadded_unsharded_size.numel()]
        in_forward = self._training_state == HandleTrainingState.FORWARD
        in_pre_backward = self._training_state == HandleTrainingState.BACKWARD_PRE
        if self._use_orig_params:
            if self._skipped_use_sharded_views and in_pre_backward:
                return  # forward's views are still in place
            self._use_unsharded_views(as_params=not in_forward and not in_pre_backward)
        elif in_forward:
            self._use_unsharded_views(as_params=False)

    post_unshard = TORCH_HANDLE.post_unshard  # frees the low-precision shard after the gather

    def _free_low_precision_sharded_param(self) -> None:
        self._check_low_precision_shard()
        self._free_after_use(self.flat_param._mp_shard)

    def to_cpu(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the unsharded flat parameter lies on the CPU, and its device memory is freed.

        If it is on the CPU already, nothing changes (torch before 2.15 then reads freed memory: pytorch#188989).
        Source: torch 2.15 ``FlatParamHandle.to_cpu``.
        """
        self._check_sharded_strategy()
        self._check_unsharded(self.flat_param)
        self._check_on_compute_device(self.flat_param)
        if not same_storage(self.flat_param, self._get_padded_unsharded_flat_param()):
            raise self._wrong("expects the unpadded parameter to be a view into the padded one")
        if self.flat_param.is_cpu:
            return contextlib.nullcontext()
        return _C.Block(self._offload_to_cpu, self._restore_unsharded_flat_param_from_cpu)

    def _offload_to_cpu(self) -> None:
        self.flat_param_to(torch.device("cpu"), copy=True)
        self._free_unsharded_flat_param()

    def _restore_unsharded_flat_param_from_cpu(self) -> None:
        self._check_unsharded(self.flat_param)
        needs_memory = self.needs_unshard()  # False if a signal interrupted an earlier call
        padded = self._alloc_padded_unsharded_flat_param if needs_memory else self._get_padded_unsharded_flat_param
        unsharded = padded()
        unsharded[: self.flat_param.numel()].copy_(self.flat_param.detach())
        self._use_unsharded_flat_param(unsharded)

    # Resharding

    @unseen
    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Switch data and views to the sharded flat parameter; then free the unsharded one, if asked.

        In this order the original parameters never point to freed memory. On an exception in SUMMON_FULL_PARAMS the
        handle goes back to IDLE.
        """
        if self._training_state is HandleTrainingState.IDLE:  # a user calls it, as a warning advises
            self._keep_moved_shard()
        if not self._reshard_fused(free_unsharded_flat_param):
            try:
                self._use_sharded_flat_param()
                if free_unsharded_flat_param:
                    self._free_unsharded_flat_param()
            except BaseException:
                self._leave_summon()
                raise
        if not free_unsharded_flat_param and self._training_state is HandleTrainingState.FORWARD:
            self._note_left_gathered()

    post_reshard = TORCH_HANDLE.post_reshard  # NO_SHARD: frees the low-precision parameter

    @step_of(RESHARD)
    def _free_unsharded_flat_param(self) -> None:
        """Free the unsharded flat parameter's memory, if it has any."""
        self._check_sharded_strategy()
        unsharded = self._get_padded_unsharded_flat_param()
        self._check_on_compute_device(unsharded)
        self._free_after_use(unsharded)

    def _free_after_use(self, tensor: Tensor) -> None:
        """Free the memory of ``tensor``, if it has any, after the work that the current stream has now."""
        if has_memory(tensor):
            _no_dispatch_record_stream(tensor, self._device_handle.current_stream())
            self._free(tensor)

    @step_of(RESHARD)
    def _use_sharded_flat_param(self) -> None:
        """Set ``flat_param.data`` to the local shard, and original parameters and gradients to pieces of it."""
        if self._offload_params and not self.uses_sharded_strategy:  # the stream may still read the copy
            _no_dispatch_record_stream(self.flat_param.data, self._device_handle.current_stream())
        if self._offload_params and not self.flat_param._local_shard.is_cpu:
            raise self._wrong(f"Expects the local shard to be on CPU but got {self.flat_param._local_shard.device}")
        TORCH_HANDLE._use_sharded_flat_param(self)
        if self._training_state == HandleTrainingState.FORWARD:
            self._let_model_go_without_backward()
        elif not self._use_orig_params:
            self._note_grads_left_by_backward()

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Set ``flat_param.data = flat_param.to(...)``, and point the original parameters to it.

        With NO_SHARD ``_local_shard`` is the same tensor, and moves too: else it would keep the old memory.
        """
        flat_param = self.flat_param
        local_shard = getattr(flat_param, "_local_shard", None)
        is_local_shard = (
            local_shard is not None and not self.uses_sharded_strategy and same_storage(local_shard, flat_param)
        )
        TORCH_HANDLE.flat_param_to(self, *args, **kwargs)
        if is_local_shard:
            flat_param._local_shard = flat_param.data

    # The fast paths of a step

    def _is_usual(self, path: str) -> bool:
        """Whether the fast path ``path`` is right: sharded, no offload, no forced precision, and no replaced method."""
        return (
            bool(fast_path_is_on)
            and self._unit is not None
            and self._sharding_strategy is not _NO_SHARD
            and not self._offload_params
            and not self._use_full_prec_in_eval
            and self._own_way_to_unflatten is None
            and (self._setattr_tensor, self._setattr_param) in SETATTR_IN_C
            and _C.is_as_defined(self, self._own_methods, self._steps[path])
        )

    def _unshard_fused(self: Any) -> bool:
        state = self._training_state
        in_forward = state is _FORWARD
        skipped = self._unsharded_flat_param_for_skipped_views is not None
        if skipped or not (in_forward or state is _BACKWARD_PRE) or not self._is_usual(UNSHARD):
            return False
        flat_param, orig = self.flat_param, self._use_orig_params
        padded = flat_param._full_param_padded
        if not is_allocated(padded):
            if has_memory(padded):
                return False  # the steps raise an error
            allocate(padded, flat_param._padded_unsharded_size)
            padded = self._all_gather_flat_param(padded)
        if not (orig or in_forward):
            flat_param.data = padded[: flat_param._unpadded_unsharded_size.numel()]
            return True
        tensors = flat_param._tensors if orig else []
        listed = orig and in_forward
        views = self._unit.use_unsharded(flat_param, padded, tensors, not in_forward, listed, self._unsafe)
        if views is None:
            self._use_unsharded_flat_param(padded)
            return True
        if in_forward:
            if orig:
                flat_param._tensors[:] = views
            self._note_accumulator()
        return True

    def _reshard_fused(self: Any, free_unsharded_flat_param: bool) -> bool:
        state = self._training_state
        in_forward = state is _FORWARD
        stays = (
            in_forward
            and torch.is_grad_enabled()
            and self._sharding_strategy in NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES
        )
        if stays or not (in_forward or state is _BACKWARD_POST) or not self._is_usual(RESHARD):
            return False
        flat_param = self.flat_param
        padded = flat_param._full_param_padded
        if not padded.is_cpu or self.device.type != "cpu":
            return False  # the steps use streams, or raise an error
        if self._use_orig_params:
            if not self._use_pieces(in_forward):
                return False
        else:
            flat_param.data = flat_param._local_shard
            if not in_forward:
                self._note_grads_left_by_backward()
        if in_forward:
            self._let_model_go_without_backward()
        if free_unsharded_flat_param and self._backward_made_graph:
            self._free(padded)
        elif free_unsharded_flat_param:
            free(padded, self._freed_message)
        return True

    def _use_pieces(self, in_forward: bool) -> bool:
        """Do the work of ``_use_sharded_flat_param`` in C. Returns: False, and nothing is changed, if C cannot."""
        flat_param = self.flat_param
        shard = flat_param._local_shard
        if shard.size() != flat_param._sharded_size or not self._point_at(shard):
            return False
        self._unsharded_flat_param_for_skipped_views = None
        if in_forward:
            grad_info = vars(flat_param)
            if flat_param.grad is not None or "_cpu_grad" in grad_info or "_saved_grad_shard" in grad_info:
                self._show_grads_after_forward()
            else:
                self._clear_grads()
        else:
            flat_param._tensors[:] = [None] * len(flat_param._tensors)
        return True
