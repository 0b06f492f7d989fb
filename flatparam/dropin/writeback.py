"""Write users' changes of original parameters and gradients back into the flat parameter.

A parameter or gradient whose storage the user has changed is copied. A gradient that the user has cleared or zeroed is
zeroed.

A pass in ``no_sync()`` leaves ``flat_param.grad`` unsharded. Without a ``zero_grad()`` the reduced shard of earlier
passes lies beside it, in ``_saved_grad_shard`` or ``_offloaded_grad``. torch's handle has two faults there. It adds
that shard to the next gradient even if the user has zeroed the gradient. And if the user sets one gradient to None, it
zeroes the elements of another one.

The rule for edited gradients is the table in csrc/tensor/fp_gradients.h, as in the runtime; `_C.mark_zeros` and
`_C.is_zeroed` tell zeroing from other changes. The rest cannot be shared with the runtime. torch's runtime and users
read and set ``flat_param.grad`` and ``_saved_grad_shard``, each one tensor for the whole unit, where our runtime has a
state for each parameter; and users replace ``_writeback_tensor``. Speed is no reason either: with 400 parameters in one
unit on two CPU processes all of this takes 0.2 % of a step, and 1 to 4 % of one with a backward in ``no_sync()``. C
looks for the changed parameters (`scan`), which every forward does.
"""

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _C
from ..common.tensors import has_memory, refuse_freed, same_storage
from ..common.torch_private import HandleTrainingState
from .base import Handle
from .post_backward import is_reduced_next


def writeback_orig_params(handle: Handle) -> bool:
    """Copy the user's replacements of original parameters and gradients into the flat parameter.

    Returns: whether a parameter was written back. The flat parameter keeps its device and dtype.
    Raises: RuntimeError naming a parameter whose shape has changed.
    """
    flat_param, skipped, sharded = handle.flat_param, handle._skipped_use_sharded_views, handle.uses_sharded_strategy
    if sharded and not handle.is_sharded(flat_param) and not skipped:
        return False
    owner = flat_param
    if skipped and sharded:
        owner = handle._unsharded_flat_param_for_skipped_views
        if not has_memory(owner):
            raise handle._wrong("the unsharded flat parameter was freed between forward and backward")
    if grad_is_unsharded(handle):
        with torch.no_grad():
            zero_dropped_grads(handle)
    changed, wroteback = changed_params(handle, owner), False
    if changed:
        with torch.no_grad():
            for i in changed:
                wroteback |= writeback_one(handle, i, owner)
    for info in flat_param._shared_param_infos:
        if getattr(info.module, info.param_name) is not getattr(info.prim_module, info.prim_param_name):
            raise NotImplementedError(
                f"Changing shared parameters is not supported yet: `{info.module_name}.{info.param_name}` no "
                f"longer is `{info.prim_module_name}.{info.prim_param_name}`"
            )
    return wroteback


def changed_params(handle: Handle, owner: Tensor) -> list[int]:
    """Return the indices of original parameters in the shard that may have changed; all indices without C loops.

    A whole parameter at another place of the owner's storage (transposed, exchanged) gets a copy as its data.
    """
    flat_param, infos = handle.flat_param, handle.flat_param._shard_param_infos
    skipped = handle._skipped_use_sharded_views
    grad = None if skipped else flat_param.grad  # no gradients are shown while skipping
    params = flat_param._tensors if skipped else flat_param._params
    changed: list[int] | None = None if handle._unit is None else handle._unit.scan(params, owner, grad, infos)
    return [i for i, piece in enumerate(infos) if piece.in_shard] if changed is None else changed


def writeback_one(handle: Handle, i: int, owner: Tensor) -> bool:
    flat_param = handle.flat_param
    info, piece = flat_param._param_infos[i], flat_param._shard_param_infos[i]
    if not hasattr(info.module, info.param_name):
        return False  # it is deregistered, as during a state dict
    current = getattr(info.module, info.param_name)
    skipped = handle._skipped_use_sharded_views
    param = flat_param._tensors[i] if skipped else flat_param._params[i]
    if not skipped and current is flat_param._tensors[i]:
        current = param  # forward's view, left by a backward that did not reach the parameters
    if skipped and param is None:
        raise handle._wrong("the views of its forward are gone", i)
    moved = current is not param or not same_storage(param, owner)
    if skipped:
        if moved:
            raise handle._wrong(
                "FSDP does not support changing the parameters between forward and backward for "
                f"{handle._sharding_strategy}",
                i,
            )
        return False
    if current is not param:
        param = flat_param._params[i] = current
    shape = torch.Size([piece.numel_in_shard])
    if moved:
        handle._writeback_tensor(as_piece(handle, param, i), flat_param, i, shape, piece.offset_in_shard, True)
    _writeback_grad(handle, i, param, shape, piece.offset_in_shard)
    return moved


def _writeback_grad(handle: Handle, i: int, param: nn.Parameter, shape: torch.Size, offset: int) -> None:
    flat_param = handle.flat_param
    if param.grad is None:
        if grad_is_unsharded(handle):
            flat_param._is_grad_none_mask[i] = True  # the gradient is zeroed already
        elif flat_param.grad is not None:
            handle._writeback_tensor(None, flat_param.grad, i, shape, offset, False)
        return
    flat_grad = flat_param.grad
    if flat_grad is not None and same_storage(param.grad, flat_grad):
        return
    if flat_grad is None:
        flat_grad = torch.zeros_like(flat_param)
    handle._writeback_tensor(as_piece(handle, param.grad, i), flat_grad, i, shape, offset, False)
    flat_param.grad = flat_grad


def as_piece(handle: Handle, tensor: Tensor, i: int) -> Tensor:
    """Return the user's tensor for parameter ``i``, or for its gradient, 1-D in the order of the flat parameter.

    If the whole parameter is on this rank (one rank, NO_SHARD), a tensor of another shape with the same numel fits
    (pytorch#151223). Else the tensor is returned unchanged.
    """
    flat_param = handle.flat_param
    refuse_freed(tensor, handle._about("the new data or gradient", i))
    numel, shape = flat_param._numels[i], flat_param._shapes[i]
    is_flat = tensor.dim() == 1 and handle.uses_sharded_strategy
    if is_flat or tensor.numel() != numel or flat_param._shard_param_infos[i].numel_in_shard != numel:
        return tensor if handle.uses_sharded_strategy else tensor.reshape(-1)
    tensor = tensor.reshape(shape)
    if flat_param._contiguities[i]:
        return tensor.reshape(-1)
    strided = torch.empty_strided(shape, flat_param._strides[i], dtype=tensor.dtype, device=tensor.device)
    return strided.copy_(tensor).as_strided((numel,), (1,))


def writeback_tensor(
    handle: Handle,
    src_tensor: Tensor | None,
    dst_tensor: Tensor,
    tensor_index: int,
    expected_shape: torch.Size,
    offset: int,
    is_param: bool,  # else a gradient
) -> None:
    """Copy ``src_tensor`` (zeros if None) to elements ``[offset, offset + numel)`` of ``dst_tensor``.

    Shapes: ``expected_shape`` is 1-D; ``src_tensor`` must have it. Raises: RuntimeError naming the parameter.
    """
    if len(expected_shape) != 1:
        raise handle._wrong(f"Expects a 1D expected shape but got {expected_shape}", tensor_index)
    what = "parameter" if is_param else "gradient"
    if handle._debug_level == dist.DebugLevel.INFO:
        shape = None if src_tensor is None else src_tensor.shape
        device = None if src_tensor is None else src_tensor.device
        warnings.warn(
            f"[Rank {handle.rank}] {what.capitalize()} needs writeback in {handle._training_state}: "
            f"{handle.flat_param._fqns[tensor_index]}\n"
            f"expected shape={expected_shape} shape={shape} expected device={dst_tensor.device} device={device}",
            stacklevel=2,
        )
    refuse_freed(dst_tensor, handle._about("the shard, or its gradient,", tensor_index))
    target = dst_tensor[offset : offset + expected_shape.numel()]
    if src_tensor is None:
        target.zero_()
        handle.flat_param._is_grad_none_mask[tensor_index] = True
        return
    if src_tensor.shape != expected_shape:
        raise RuntimeError(
            f"Cannot writeback when the {what} shape changes\nExpects {expected_shape} but got {src_tensor.shape} "
            f"for `{handle.flat_param._fqns[tensor_index]}`; assign a tensor of the expected shape, or change the "
            "parameter inside summon_full_params()"
        )
    target.copy_(src_tensor)


# Zeroed gradients


def drop_saved_grad_if_zeroed(handle: Handle) -> None:
    """Drop the shard of earlier backwards, if the user has zeroed the gradient since a backward in ``no_sync()``.

    ``_post_backward_called`` is True after such a backward; a backward that reduces resets it at its end.
    """
    flat_param = handle.flat_param
    if not (flat_param._post_backward_called and _keeps_grad_of_earlier_backwards(handle)):
        return
    grad, left = flat_param.grad, handle._versions_left_by_backward  # () if the user drives the handle himself
    pairs = zip(versions_of_grads(handle), left, strict=False)
    changed = [i for i, (version, before) in enumerate(pairs) if version != before]
    if grad is None or (changed and _C.is_zeroed(grad)):
        handle._offloaded_grad = None
        vars(flat_param).pop("_saved_grad_shard", None)
    elif changed and handle._use_orig_params:
        views = list(handle._get_unflat_views(grad))
        for i in changed:
            if _C.is_zeroed(views[i]):
                zero_grad_of_earlier_backwards(handle, i)


def give_back_unused_grad(handle: Handle) -> None:
    """After a backward without a gradient, put the gradient of earlier backwards back into ``flat_param.grad``.

    torch leaves None, and loses the earlier gradient if this backward was to reduce one. With use_orig_params
    nothing is to be done: the original parameters have kept their gradients.
    """
    handle._put_aside = False
    flat_param = handle.flat_param
    if handle._use_orig_params or flat_param.grad is not None:
        return
    if handle._offloaded_grad is not None:
        flat_param.grad, handle._offloaded_grad = flat_param._cpu_grad, None
    elif hasattr(flat_param, "_saved_grad_shard"):
        flat_param.grad = flat_param._saved_grad_shard
        del flat_param._saved_grad_shard


def _keeps_grad_of_earlier_backwards(handle: Handle) -> bool:
    return handle._offloaded_grad is not None or hasattr(handle.flat_param, "_saved_grad_shard")


def note_grads_left_by_backward(handle: Handle) -> None:
    """After a backward, note the versions of the gradients: later versions are the user's changes.

    Zeros are marked, so that zeroing can be told from other changes: csrc/tensor/fp_gradients.h has the rule.
    """
    if handle._training_state == HandleTrainingState.BACKWARD_POST and _keeps_grad_of_earlier_backwards(handle):
        grad = handle.flat_param.grad
        if grad is not None and _C.is_plain(grad) and (handle._use_orig_params or not is_reduced_next(handle)):
            _C.mark_zeros(grad)
        handle._versions_left_by_backward = versions_of_grads(handle)


def versions_of_grads(handle: Handle) -> list[int | None]:
    flat_param = handle.flat_param
    shown = flat_param._params if handle._use_orig_params else (flat_param,)
    return [None if param.grad is None else param.grad._version for param in shown]


def grad_is_unsharded(handle: Handle) -> bool:
    """Whether ``flat_param.grad`` is an unsharded gradient of ``no_sync()``: of the whole unit, on every rank."""
    flat_param = handle.flat_param
    if flat_param.grad is None or not handle.uses_sharded_strategy or handle._skipped_use_sharded_views:
        return False
    size = flat_param._unpadded_unsharded_size
    is_whole: bool = flat_param.grad.shape == size
    return is_whole and size != flat_param._sharded_size  # equal sizes: one rank has the whole


def zero_dropped_grads(handle: Handle) -> None:
    """Zero the parts of the unsharded gradient whose ``.grad`` the user has set to None, in the shard or not.

    torch's handle zeroes at the parameter's offset in the *shard*: in the unsharded gradient another parameter.
    """
    flat_param = handle.flat_param
    dropped = [i for i, param in enumerate(flat_param._params) if param.grad is None]
    views = list(handle._get_unflat_views(flat_param.grad)) if dropped else []
    for i in dropped:
        views[i].data.zero_()  # no change of a user's: the versions of the other gradients stay
        zero_grad_of_earlier_backwards(handle, i)


def zero_grad_of_earlier_backwards(handle: Handle, i: int) -> None:
    """Zero parameter ``i`` in the reduced gradient of earlier backwards, which lies beside an unsharded one."""
    piece = handle.flat_param._shard_param_infos[i]
    offloaded = handle._offloaded_grad
    for shard in (getattr(handle.flat_param, "_saved_grad_shard", None), None if offloaded is None else offloaded[0]):
        if shard is not None and piece.in_shard:
            shard[piece.offset_in_shard : piece.offset_in_shard + piece.numel_in_shard].zero_()
