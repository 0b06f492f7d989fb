"""Unshard and reshard the flat parameter: gather, switch its data and the views, free.

torch's runtime calls these methods in each forward and backward; ``summon_full_params()`` calls them too. Usually no
method was replaced, and a step is one call to C. A method named ``..._fused`` is that fast path: it does the work of
the method without ``_fused`` and returns True, or changes nothing and returns False.
"""

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
from .base import RESHARD, TORCH_HANDLE, UNSHARD, Handle, unseen
from .comparing import check_before_gather, check_before_reduction
from .gradients import clear_grads, show_grads_after_forward
from .post_backward import let_model_go_without_backward, note_accumulator
from .recovery import leave_memory, leave_summon, note_left_gathered
from .views import SETATTR_IN_C, point_at, use_views_of
from .writeback import note_grads_left_by_backward

fast_path_is_on = os.environ.get("FLATPARAM_FUSED", "1") != "0"  # off: tests compare the fast path with the steps

_NO_SHARD = HandleShardingStrategy.NO_SHARD
_FORWARD, _BACKWARD_PRE = HandleTrainingState.FORWARD, HandleTrainingState.BACKWARD_PRE
_BACKWARD_POST = HandleTrainingState.BACKWARD_POST


# Unsharding


@unseen
def pre_unshard(handle: Handle) -> bool:
    """Prepare ``flat_param`` for the gather: write back users' changes, move to the device, cast.

    Returns: whether it changed anything. On an exception in SUMMON_FULL_PARAMS the handle goes back to IDLE.
    """
    try:
        state = handle._training_state
        if state is not HandleTrainingState.BACKWARD_PRE:
            handle._keep_moved_shard()
        if state is HandleTrainingState.SUMMON_FULL_PARAMS and handle._skipped_use_sharded_views:
            handle._use_sharded_views()
        ran = False
        if handle._use_orig_params and not handle._skip_writeback_check:
            ran = handle._writeback_orig_params()
        if handle.uses_sharded_strategy and not handle._offload_params and not handle.needs_unshard():
            pass
        elif handle._uses_param_mixed_precision and not handle._force_full_precision:
            handle._use_low_precision_shard()
            ran = True
        elif handle._offload_params and handle.flat_param.device != handle.device:
            TORCH_HANDLE.flat_param_to(handle, handle.device, non_blocking=True)  # `_local_shard` stays on the host
            ran = True
        handle._check_on_compute_device(handle.flat_param)
        return ran
    except BaseException:
        leave_summon(handle)
        raise


def use_low_precision_shard(handle: Handle) -> None:
    """Cast the shard into ``_mp_shard`` on the compute device; ``flat_param.data`` becomes ``_mp_shard``."""
    handle._check_low_precision_shard()
    flat_param = handle.flat_param
    allocate(flat_param._mp_shard, flat_param._local_shard.size())
    flat_param._mp_shard.copy_(flat_param._local_shard.to(handle.device, non_blocking=True))
    flat_param.data = flat_param._mp_shard


@unseen
def unshard(handle: Handle) -> None:
    """All-gather the flat parameter, unless it is unsharded already, and switch data and views to it.

    A collective call. In SUMMON_FULL_PARAMS it gathers even if unsharded: the values may be old. There, and in
    eval with FSDP_USE_FULL_PREC_IN_EVAL=1, it gathers in full precision. On an exception in SUMMON_FULL_PARAMS the
    handle goes back to IDLE.
    """
    if _unshard_fused(handle):
        return
    try:
        if handle.needs_unshard():
            if handle._freed_reason is None:
                free(handle._get_padded_unsharded_flat_param())  # remove the error of an earlier free
            unsharded = handle._alloc_padded_unsharded_flat_param()
            unsharded = handle._all_gather_flat_param(unsharded)
        elif handle.uses_sharded_strategy:
            unsharded = handle._get_padded_unsharded_flat_param()
            if handle._training_state is HandleTrainingState.SUMMON_FULL_PARAMS:
                handle._all_gather_flat_param(unsharded)  # old values might be shown and saved
        else:
            unsharded = handle.flat_param
        handle._use_unsharded_flat_param(unsharded)
    except BaseException:
        leave_summon(handle)
        raise


def needs_unshard(handle: Handle) -> bool:
    """Whether the strategy is sharded and the unsharded flat parameter has no memory."""
    if not handle.uses_sharded_strategy:
        return False
    unsharded = handle._get_padded_unsharded_flat_param()
    return not is_allocated(unsharded)


def alloc_padded_unsharded_flat_param(handle: Handle) -> Tensor:
    handle._check_sharded_strategy()
    unsharded = handle._get_padded_unsharded_flat_param()
    try:
        handle._check_storage_freed(unsharded)
    except AssertionError as error:
        raise handle._wrong(str(error)) from None
    allocate(unsharded, handle.flat_param._padded_unsharded_size)
    return unsharded


def get_padded_unsharded_flat_param(handle: Handle) -> Tensor:
    """Return the tensor to gather into: ``_full_param_padded``, or the full-precision one if that is forced.

    Forcing full precision frees the low-precision tensor: the user may write parameters, and it would be outdated.
    """
    handle._check_sharded_strategy()
    flat_param = handle.flat_param
    unsharded: Tensor = flat_param._full_param_padded
    if not (handle._force_full_precision and handle._uses_param_mixed_precision):
        return unsharded
    unsharded = flat_param._full_prec_full_param_padded
    if unsharded.dtype == handle._fwd_bwd_param_dtype:
        raise handle._wrong(f"Expects full precision but got {handle._fwd_bwd_param_dtype}")
    handle._free(flat_param._full_param_padded)
    return unsharded


def all_gather_flat_param(handle: Handle, padded_unsharded_flat_param: Tensor) -> Tensor:
    """All-gather ``flat_param.data`` into ``padded_unsharded_flat_param``, and return that. A collective call."""
    if not (hasattr(handle, "process_group") and hasattr(handle, "world_size")):
        raise handle._wrong("Expects a process group and world size, which this handle has no more")
    shard = handle.flat_param.data
    numel = shard.numel()
    handle._check_memory_of_shard(shard)
    handle._left_values = None
    expected = numel * handle.world_size
    if padded_unsharded_flat_param.numel() != expected:
        raise handle._wrong(f"Expects {expected} numel but got {padded_unsharded_flat_param.numel()}")
    group: Any = handle._fake_process_group if handle._use_fake_all_gather else handle.process_group
    try:
        if not handle._use_fake_all_gather:
            check_before_gather(handle)
        if _gather_in_c(handle, padded_unsharded_flat_param, shard, group):
            pass
        elif shard.is_cpu:
            chunks = padded_unsharded_flat_param.detach().chunk(handle.world_size)
            all_gather_chunks(list(chunks), shard, group)
        else:
            all_gather_single(padded_unsharded_flat_param, shard, group)
    except BaseException:
        leave_memory(handle, padded_unsharded_flat_param, shard)
        raise
    if handle._offload_params:  # the shard was copied to the device on another stream
        _no_dispatch_record_stream(shard, handle._device_handle.current_stream())
    return padded_unsharded_flat_param


def _gather_in_c(handle: Handle, padded: Tensor, shard: Tensor, group: Any) -> bool:
    """All-gather without torch's Python. Returns: False, and nothing is done, if torch's function is needed."""
    if handle._native[0] is not group:
        handle._native = group, native_gather(group, shard.device) if is_sliced(group, shard.device) else None
    native = handle._native[1]
    if native is None or not fast_path_is_on or is_replaced(dist.all_gather) or not _C.is_plain(padded, shard):
        return False
    if shard.dtype != padded.dtype:
        return False  # torch's function raises an error for it
    handle._native = (None, None)  # if the wait is interrupted, the gather goes on: do not reuse it
    native.begin(padded, shard)
    while not native.wait():
        pass
    handle._native = group, native
    return True


def free_low_precision_sharded_param(handle: Handle) -> None:
    handle._check_low_precision_shard()
    free_after_use(handle, handle.flat_param._mp_shard)


# Resharding


@unseen
def reshard(handle: Handle, free_unsharded_flat_param: bool) -> None:
    """Switch data and views to the sharded flat parameter; then free the unsharded one, if asked.

    In this order the original parameters never point to freed memory. On an exception in SUMMON_FULL_PARAMS the
    handle goes back to IDLE.
    """
    state = handle._training_state
    if state is HandleTrainingState.IDLE:  # a user calls it, as a warning advises
        handle._keep_moved_shard()
    elif state is _BACKWARD_POST:
        check_before_reduction(handle)
    if not _reshard_fused(handle, free_unsharded_flat_param):
        try:
            handle._use_sharded_flat_param()
            if free_unsharded_flat_param:
                handle._free_unsharded_flat_param()
        except BaseException:
            leave_summon(handle)
            raise
    if not free_unsharded_flat_param and state is _FORWARD:
        note_left_gathered(handle)


def free_unsharded_flat_param(handle: Handle) -> None:
    """Free the unsharded flat parameter's memory, if it has any."""
    handle._check_sharded_strategy()
    unsharded = handle._get_padded_unsharded_flat_param()
    handle._check_on_compute_device(unsharded)
    free_after_use(handle, unsharded)


def free_after_use(handle: Handle, tensor: Tensor) -> None:
    """Free the memory of ``tensor``, if it has any, after the work that the current stream has now."""
    if has_memory(tensor):
        _no_dispatch_record_stream(tensor, handle._device_handle.current_stream())
        handle._free(tensor)


def use_sharded_flat_param(handle: Handle) -> None:
    """Set ``flat_param.data`` to the local shard, and original parameters and gradients to pieces of it."""
    if handle._offload_params and not handle.uses_sharded_strategy:  # the stream may still read the copy
        _no_dispatch_record_stream(handle.flat_param.data, handle._device_handle.current_stream())
    if handle._offload_params and not handle.flat_param._local_shard.is_cpu:
        raise handle._wrong(f"Expects the local shard to be on CPU but got {handle.flat_param._local_shard.device}")
    TORCH_HANDLE._use_sharded_flat_param(handle)
    if handle._training_state == HandleTrainingState.FORWARD:
        let_model_go_without_backward(handle)
    elif not handle._use_orig_params:
        note_grads_left_by_backward(handle)


def flat_param_to(handle: Handle, *args: Any, **kwargs: Any) -> None:
    """Set ``flat_param.data = flat_param.to(...)``, and point the original parameters to it.

    With NO_SHARD ``_local_shard`` is the same tensor, and moves too: else it would keep the old memory.
    """
    flat_param = handle.flat_param
    local_shard: Any = getattr(flat_param, "_local_shard", None)
    has_shard = local_shard is not None and not handle.uses_sharded_strategy
    is_local_shard = has_shard and same_storage(local_shard, flat_param)
    TORCH_HANDLE.flat_param_to(handle, *args, **kwargs)
    if is_local_shard:
        flat_param._local_shard = flat_param.data


# The fast paths of a step


def _is_usual(handle: Handle, path: tuple[str, ...]) -> bool:
    """Whether the fast path ``path`` is right: sharded, no offload, no forced precision, and no replaced method."""
    return (
        bool(fast_path_is_on)
        and handle._unit is not None
        and handle._sharding_strategy is not _NO_SHARD
        and not handle._offload_params
        and not handle._use_full_prec_in_eval
        and handle._own_way_to_unflatten is None
        and (handle._setattr_tensor, handle._setattr_param) in SETATTR_IN_C
        and _C.is_as_defined(handle, handle._own_methods, path)
    )


def _unshard_fused(handle: Handle) -> bool:
    state = handle._training_state
    in_forward = state is _FORWARD
    skipped = handle._unsharded_flat_param_for_skipped_views is not None
    if skipped or not (in_forward or state is _BACKWARD_PRE) or not _is_usual(handle, UNSHARD):
        return False
    flat_param, orig = handle.flat_param, handle._use_orig_params
    padded = flat_param._full_param_padded
    if not is_allocated(padded):
        if has_memory(padded):
            return False  # the steps raise an error
        allocate(padded, flat_param._padded_unsharded_size)
        padded = handle._all_gather_flat_param(padded)
    if not (orig or in_forward):
        flat_param.data = padded[: flat_param._unpadded_unsharded_size.numel()]
        return True
    tensors = flat_param._tensors if orig else []
    if not use_views_of(handle, padded, tensors, not in_forward, orig and in_forward):
        handle._use_unsharded_flat_param(padded)
    elif in_forward:
        note_accumulator(handle)
    return True


def _reshard_fused(handle: Handle, free_unsharded_flat_param: bool) -> bool:
    state = handle._training_state
    in_forward = state is _FORWARD
    stays = (
        in_forward
        and torch.is_grad_enabled()
        and handle._sharding_strategy in NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES
    )
    if stays or not (in_forward or state is _BACKWARD_POST) or not _is_usual(handle, RESHARD):
        return False
    flat_param = handle.flat_param
    padded = flat_param._full_param_padded
    if not padded.is_cpu or handle.device.type != "cpu":
        return False  # the steps use streams, or raise an error
    if handle._use_orig_params:
        if not _use_pieces(handle, in_forward):
            return False
    else:
        flat_param.data = flat_param._local_shard
        if not in_forward:
            note_grads_left_by_backward(handle)
    if in_forward:
        let_model_go_without_backward(handle)
    if free_unsharded_flat_param and handle._backward_made_graph:
        handle._free(padded)
    elif free_unsharded_flat_param:
        free(padded, handle._freed_message)
    return True


def _use_pieces(handle: Handle, in_forward: bool) -> bool:
    """Do the work of ``_use_sharded_flat_param`` in C. Returns: False, and nothing is changed, if C cannot."""
    flat_param = handle.flat_param
    shard = flat_param._local_shard
    if shard.size() != flat_param._sharded_size or not point_at(handle, shard):
        return False
    handle._unsharded_flat_param_for_skipped_views = None
    if in_forward:
        grad_info = vars(flat_param)
        if flat_param.grad is not None or "_cpu_grad" in grad_info or "_saved_grad_shard" in grad_info:
            show_grads_after_forward(handle)
        else:
            clear_grads(handle)
    else:
        flat_param._tensors[:] = [None] * len(flat_param._tensors)
    return True
