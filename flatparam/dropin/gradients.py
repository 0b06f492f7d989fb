"""The flat gradient from backward to the optimizer, and its views in ``.grad`` of the original parameters.

torch's runtime reduces it; this prepares ``flat_param.grad`` before a backward and shows the result after it.

| attribute | content |
|---|---|
| ``flat_param.grad`` | unsharded in backward and after ``no_sync()``, else the sharded gradient |
| ``_saved_grad_shard`` | the sharded gradient while ``grad`` is unsharded |
| ``_cpu_grad`` | when offloading: the sharded gradient of the last backward |
| ``_offloaded_grad`` | when offloading: the gradient of earlier backwards, to be added |
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _C
from ..common import optimizers
from ..common.collectives import all_gather_single, all_reduce
from ..common.patches import flat_params_live
from ..common.tensors import refuse_freed, same_storage
from ..common.torch_private import HandleTrainingState
from .base import TORCH_HANDLE, Handle, installed
from .post_backward import hook_next_backward, hook_this_backward
from .recovery import leave_summon
from .views import loops_in_c
from .writeback import drop_saved_grad_if_zeroed, give_back_unused_grad, grad_is_unsharded, note_grads_left_by_backward

_TEST = "tests/dropin/test_dropin_steps.py"

# Unsharding, outside of a step


@torch.no_grad()
def unshard_grad(handle: Handle) -> None:
    """All-gather the sharded gradient into ``flat_param.grad``. It stays None if it is None on all ranks.

    Communicates: an all-reduce of one int32 and an all-gather. ``_saved_grad_shard`` keeps the shard for
    ``reshard_grad()``.
    """
    if not handle.uses_sharded_strategy:
        handle._use_unsharded_grad_views()
        return
    flat_param, sharded = handle.flat_param, handle.flat_param.grad
    try:
        _gather_grad(handle)
    except BaseException:
        if handle._training_state == HandleTrainingState.SUMMON_FULL_PARAMS:
            gathered = flat_param.grad is not sharded
            if gathered:
                flat_param.grad = None
            vars(flat_param).pop("_saved_grad_shard", None)
            leave_summon(handle)
            if gathered:
                flat_param.grad = sharded
                handle._use_sharded_grad_views()  # with_grads needs use_orig_params
        raise


def _gather_grad(handle: Handle) -> None:
    flat_param = handle.flat_param
    handle._check_unsharded(flat_param)
    none_here = flat_param.grad is None
    if not none_here:
        refuse_freed(flat_param.grad, handle._about("the gradient"))
    ranks_without = torch.full((1,), int(none_here), dtype=torch.int32, device=handle.device)
    all_reduce(ranks_without, handle.process_group)
    if ranks_without.item() == handle.world_size:
        flat_param._saved_grad_shard = None
        handle._use_unsharded_grad_views()
        return
    if none_here:
        if handle._debug_level == dist.DebugLevel.INFO:
            warnings.warn(
                f"[Rank {handle.rank}] Only some but not all ranks have a `None` gradient of {handle._names()}; "
                "zeros stand in for it",
                stacklevel=2,
            )
        shard = torch.zeros(flat_param._sharded_size, device=handle.device)
    else:
        handle._check_sharded(flat_param.grad)
        shard = flat_param.grad
    flat_param._saved_grad_shard = None if none_here else shard
    padded = torch.empty(flat_param._padded_unsharded_size, device=handle.device, dtype=shard.dtype)
    all_gather_single(padded, shard, handle.process_group)
    size = flat_param._unpadded_unsharded_size
    flat_param.grad = padded[: size.numel()].view(size)
    handle._use_unsharded_grad_views()


# In a step


def prepare_gradient_for_backward(handle: Handle) -> None:
    """Move the sharded gradient of earlier backwards out of ``flat_param.grad``. This backward makes a new one.

    It goes to ``_saved_grad_shard``; when offloading ``_cpu_grad`` has it already. An unsharded gradient of
    ``no_sync()`` stays in ``flat_param.grad``, and autograd adds to it.
    """
    if handle._training_state not in (HandleTrainingState.BACKWARD_PRE, HandleTrainingState.IDLE):
        raise handle._wrong(f"expects to be in BACKWARD_PRE, or IDLE when prefetching, not {handle._training_state}")
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
        handle._backward_made_graph = True
    hook_this_backward(handle)
    flat_param = handle.flat_param
    grad = flat_param.grad
    drop_saved_grad_if_zeroed(handle)
    if grad is None:
        handle._offloaded_grad = None
        return
    if _C.lacks_memory(grad):  # autograd would write to freed memory
        refuse_freed(grad, handle._about("the gradient"))
    if grad.size() == flat_param._unpadded_unsharded_size and grad.device == flat_param.device:
        return
    handle._check_on_compute_device(flat_param)
    if grad.device != handle.device and not handle._offload_params:
        raise handle._wrong(f"expects the sharded gradient to be on {handle.device} but got {grad.device}")
    if grad.size() == flat_param._local_shard.size():  # a reduced gradient
        if grad.device == handle.device and not handle._offload_params:
            flat_param._saved_grad_shard = shard = grad.data
        elif getattr(flat_param, "_cpu_grad", None) is not None:
            shard = flat_param._cpu_grad
            if not same_storage(grad, shard):  # the user has set `.grad`, or pieces of it
                shard.copy_(grad)
        else:
            raise handle._wrong("`_cpu_grad` should be defined if the gradient is on CPU")
        full_precision = flat_param._local_shard.dtype
        if handle._keep_low_precision_grads and shard.dtype != full_precision:
            shard.data = shard.to(full_precision)  # gradients are accumulated in full precision
        if handle._offload_params:
            handle._offloaded_grad = (shard.clone(), shard._version)  # this backward overwrites `_cpu_grad`
        handle._put_aside = True
    elif grad.size() != flat_param._padded_unsharded_size:
        raise handle._wrong(
            "expects `.grad` to be the unsharded gradient of `no_sync()` with size "
            f"{flat_param._padded_unsharded_size} but got size {grad.size()}"
        )
    flat_param.grad = None


def prepare_gradient_for_optim(handle: Handle) -> None:
    """Show the reduced gradient as ``flat_param.grad``, for the optimizer."""
    flat_param = handle.flat_param
    hook_next_backward(handle)
    if hasattr(flat_param, "_cpu_grad"):  # NO_SHARD too
        handle._check_sharded(flat_param)
        handle._check_on_cpu(flat_param)
        if flat_param._post_backward_called or handle._use_orig_params:
            _add_offloaded_grad(handle)
            flat_param.grad = flat_param._cpu_grad
            _cast_grad_for_optim(handle)
        else:
            give_back_unused_grad(handle)  # `_cpu_grad` may be older than zero_grad()
    elif hasattr(flat_param, "_saved_grad_shard"):
        handle._check_sharded(flat_param)
        handle._check_on_compute_device(flat_param)
        if flat_param._saved_grad_shard is not None:
            handle._check_on_compute_device(flat_param._saved_grad_shard)
        if flat_param._post_backward_called:
            flat_param.grad = flat_param._saved_grad_shard
        else:
            give_back_unused_grad(handle)
        if flat_param.grad is not None and flat_param.grad.shape == flat_param._sharded_size:
            _cast_grad_for_optim(handle)
    elif handle.uses_sharded_strategy and flat_param._post_backward_called:
        raise handle._wrong("a sharded parameter got a gradient in backward and has no `_saved_grad_shard`")
    vars(flat_param).pop("_saved_grad_shard", None)  # if it existed, the next backward would add to it
    handle._check_memory_of_shard(flat_param._local_shard)  # the optimizer writes to it


def _add_offloaded_grad(handle: Handle) -> None:
    """Add the gradient of earlier backwards to this backward's, which has overwritten it in ``_cpu_grad``."""
    if handle._offloaded_grad is not None:
        (earlier, version), handle._offloaded_grad = handle._offloaded_grad, None
        if handle.flat_param._cpu_grad is not None and handle.flat_param._cpu_grad._version != version:
            handle.flat_param._cpu_grad += earlier


def _cast_grad_for_optim(handle: Handle) -> None:
    """With ``keep_low_precision_grads``, cast the gradient to the parameters' low precision."""
    flat_param = handle.flat_param
    if handle._force_full_precision or not handle._keep_low_precision_grads:
        return
    if flat_param.grad is None:
        raise handle._wrong("unexpected None gradient")
    if flat_param.grad.dtype != handle._fwd_bwd_param_dtype:
        flat_param.grad.data = flat_param.grad.to(handle._fwd_bwd_param_dtype)
        if handle._use_orig_params:
            handle._use_sharded_grad_views()


def sharded_grad(handle: Handle) -> Tensor | None:
    """The sharded gradient: ``_cpu_grad``, else ``_saved_grad_shard``, else ``grad``.

    When offloading, it is ``grad`` between backwards: after ``zero_grad()`` ``_cpu_grad`` still holds the last
    step's gradient, which must not come back (with torch's handle it does).
    """
    flat_param = handle.flat_param
    idle = handle._training_state in (HandleTrainingState.FORWARD, HandleTrainingState.IDLE)
    shown: Tensor | None = flat_param.grad
    if hasattr(flat_param, "_cpu_grad"):
        if not idle or (shown is not None and shown.size() != flat_param._sharded_size):
            shown = flat_param._cpu_grad
    elif hasattr(flat_param, "_saved_grad_shard"):
        shown = flat_param._saved_grad_shard
    elif shown is not None and handle.uses_sharded_strategy and not idle:
        raise handle._wrong(
            "sharded strategies should use `_cpu_grad` or `_saved_grad_shard` unless in IDLE or FORWARD, "
            f"not in {handle._training_state}"
        )
    return shown


@installed.around(
    "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.clip_grad_norm_", test=_TEST
)
def _checking_gradients(clip: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let ``clip_grad_norm_`` refuse gradients in memory that a user has freed: reading it crashes the interpreter."""
    for flat_param in (handle.flat_param for handle in vars(self).get("_all_handles", ())):  # else: no root
        if flat_param.grad is not None:
            refuse_freed(flat_param.grad, f"the gradient [{', '.join(flat_param._fqns)}]")
    return clip(self, *args, **kwargs)


@flat_params_live.register(register_optimizer_step_pre_hook, _TEST)
def _check_before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Refuse to step sharded units with gradients of ``no_sync()``, or with freed ones; with a closure, after it."""
    return optimizers.check_before_step(_check_gradients, optimizer, args, kwargs)


def _check_gradients(optimizer: Any) -> None:
    for handle in optimizers.handles_of(optimizer):
        grad = handle.flat_param.grad
        if grad is None:
            continue
        refuse_freed(grad, handle._about("the gradient"))
        if not grad_is_unsharded(handle):
            continue
        ours = set(map(id, (handle.flat_param, *(handle.flat_param._params or ()))))
        stepped = (param for group in optimizer.param_groups for param in group["params"] if id(param) in ours)
        if any(param.grad is not None for param in stepped):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() came after a backward in no_sync(): the gradient of "
                f"{handle._names()} is not reduced over the {handle.world_size} ranks, and does not fit the shard. Run "
                "the last backward before step() outside of no_sync()"
            )


# Views


def use_unsharded_grad_views(handle: Handle) -> None:
    """Set each original parameter's ``.grad`` to its view of the unsharded ``flat_param.grad``, or to None."""
    flat_param = handle.flat_param
    grad = flat_param.grad
    if grad is None:
        clear_grads(handle)
        return
    set_unsharded_grads(handle, grad)
    note_grads_left_by_backward(handle)
    if not handle.uses_sharded_strategy and handle._training_state == HandleTrainingState.BACKWARD_POST:
        note_grads_came(handle)  # in no_sync(); torch notes only reduced gradients, and drops these


def set_unsharded_grads(handle: Handle, grad: Tensor) -> None:
    if loops_in_c(handle, grad) and not grad.requires_grad:
        handle._check_unsharded(grad)
        with contextlib.suppress(AttributeError, TypeError):  # a parameter is missing, or not plain
            handle._unit.set_grads(grad)
            for info in handle.flat_param._shared_param_infos:
                primary = getattr(info.prim_module, info.prim_param_name)
                _set_grad(getattr(info.module, info.param_name), primary.grad)
            return
    TORCH_HANDLE._use_unsharded_grad_views(handle)


def use_sharded_grad_views(handle: Handle) -> None:
    """Set each original parameter's ``.grad`` to its 1-D piece of the sharded gradient.

    None if the parameter has no piece here, is frozen, or got no gradient (``_is_grad_none_mask``).
    """
    flat_param = handle.flat_param
    handle._check_sharded(flat_param)
    if handle._training_state is HandleTrainingState.IDLE and grad_is_unsharded(handle):
        handle._use_unsharded_grad_views()  # a gradient of no_sync(); the runtime calls this in module.to()
        return
    grad = handle.sharded_grad
    if grad is None:
        clear_grads(handle)
        return
    handle._check_sharded(grad)
    refuse_freed(grad, handle._about("the gradient"))
    params, mask, infos = flat_param._params, flat_param._is_grad_none_mask, flat_param._shard_param_infos
    in_c = handle._unit is not None and grad.is_contiguous()
    if not in_c or not handle._unit.set_grad_pieces(params, grad, mask, handle._keep_low_precision_grads, infos):
        _use_sharded_grad_views_by_ops(handle, grad)
    for param, info in zip(flat_param._shared_params, flat_param._shared_param_infos, strict=True):
        primary = getattr(info.prim_module, info.prim_param_name, None)
        param.grad = primary.grad if primary is not None and param.requires_grad else None


@torch.no_grad()
def _use_sharded_grad_views_by_ops(handle: Handle, grad: Tensor) -> None:
    flat_param = handle.flat_param
    of_each = flat_param._params, flat_param._shard_param_infos, flat_param._is_grad_none_mask
    for param, piece, is_none, shape, stride in zip(*of_each, flat_param._shapes, flat_param._strides, strict=True):
        if not piece.in_shard or is_none or not param.requires_grad:
            param.grad = None
            continue
        view = grad[piece.offset_in_shard : piece.offset_in_shard + piece.numel_in_shard]
        if param.dim() != 1 and param.shape == shape:  # NO_SHARD: the piece is in storage order
            view = view.as_strided(shape, stride)
        _set_grad(param, view, by_data=handle._keep_low_precision_grads)


def show_grads_after_forward(handle: Handle) -> None:
    """Let ``.grad`` show the gradient of earlier backwards: views if it is unsharded, else pieces of the shard."""
    flat_param = handle.flat_param
    grad = flat_param.grad
    if grad is not None and handle.uses_sharded_strategy and grad.shape == flat_param._unpadded_unsharded_size:
        handle._use_unsharded_grad_views()
    else:
        handle._use_sharded_grad_views()


def clear_grads(handle: Handle) -> None:
    params = (*handle.flat_param._params, *handle.flat_param._shared_params)
    if not _C.clear_grads(params):
        for param in params:
            param.grad = None


# Bookkeeping


def reset_flat_param_grad_info_if_needed(handle: Handle) -> None:
    """Follow ``zero_grad()`` and freezing of original parameters.

    Drop ``flat_param.grad`` if no original parameter has a gradient; ``flat_param`` requires a gradient if any of
    them does.
    """
    if not handle._use_orig_params:
        return
    flat_param = handle.flat_param
    summary = _C.grad_summary(flat_param._params)
    if summary is not None:
        all_none, requires_grad = summary
    else:
        all_none = all(param.grad is None for param in flat_param._params)
        requires_grad = any(param.requires_grad for param in flat_param._params)
    if all_none:
        flat_param.grad = None
        handle._offloaded_grad = None
        if hasattr(flat_param, "_saved_grad_shard"):  # of no_sync(), or of an interrupted backward
            del flat_param._saved_grad_shard
    if flat_param.requires_grad != requires_grad:
        flat_param.requires_grad = requires_grad


def reset_is_grad_none(handle: Handle) -> None:
    """Note that this backward gave a gradient, perhaps zeros, to each original parameter that requires one."""
    if not handle._use_orig_params:
        return
    if handle._training_state != HandleTrainingState.BACKWARD_POST:
        raise handle._wrong(f"expects to be in BACKWARD_POST, not {handle._training_state}")
    note_grads_came(handle)


def note_grads_came(handle: Handle) -> None:
    mask = handle.flat_param._is_grad_none_mask
    if any(mask):
        mask[:] = [
            none and not param.requires_grad for none, param in zip(mask, handle.flat_param._params, strict=True)
        ]


def _set_grad(param: Tensor, grad: Tensor, by_data: bool = False) -> None:
    """Set ``param.grad = grad``; through ``.grad.data``, if torch would refuse the shape, dtype or device."""
    if not by_data and (param.shape, param.dtype, param.device) == (grad.shape, grad.dtype, grad.device):
        param.grad = grad
        return
    if param.grad is None:
        param.grad = torch.empty_like(param)
    param.grad.data = grad
