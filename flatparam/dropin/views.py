"""Switch the original parameters between views of the unsharded and pieces of the sharded flat parameter.

The loops run in C (``_C.ModuleParams``), one call for each unit. They need plain tensors and nn.Module's own rules for
attributes. If a tensor has a subclass, an extension or a mode is active, or a bypassed method was replaced, torch's
method does the same for one parameter after the other.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C
from ..common.torch_private import (
    HandleTrainingState,
    _safe_setattr_tensor_or_param,
    _unsafe_setattr_param,
    _unsafe_setattr_tensor,
)
from .base import TORCH_HANDLE, VIEWS, Handle
from .post_backward import note_accumulator


def primaries(flat_param: Any) -> list[int]:
    """Return for each further place of a shared parameter the index of the original parameter."""
    shared, infos = flat_param._shared_param_infos, flat_param._param_infos
    index = {(id(info.module), info.param_name): i for i, info in enumerate(infos)} if shared else {}
    return [index[id(info.prim_module), info.prim_param_name] for info in shared]


def loops_in_c(handle: Handle, *tensors: Tensor) -> bool:
    """Whether the C loops give the same result as the methods that they bypass, for these tensors."""
    return (
        handle._unit is not None
        and handle._own_way_to_unflatten is None
        and (_C.is_as_defined(handle, handle._own_methods, VIEWS) or not handle._is_replaced(*VIEWS))
        and (handle._setattr_tensor, handle._setattr_param) in SETATTR_IN_C
        and _C.is_plain(*tensors)
    )


def is_unsafe(handle: Handle) -> bool:
    """Whether FSDP_USE_UNSAFE_SETATTR=1 lets attributes of modules be set past ``nn.Module.__setattr__``."""
    return handle._setattr_tensor is _unsafe_setattr_tensor


# Unflattening


def get_unflat_views_unaligned(handle: Handle, tensor: Tensor | None = None) -> Iterator[Tensor]:
    """Return a view of ``tensor`` (None: the flat parameter) for each original parameter, in its shape and strides.

    Shapes: ``tensor`` is ``[unpadded unsharded numel]``: the flat parameter, its gradient or optimizer state.
    """
    views = _views_in_c(handle, tensor)
    made: Any = TORCH_HANDLE._get_unflat_views_unaligned(handle, tensor) if views is None else views
    return iter(made)


def get_unflat_views_aligned(handle: Handle, tensor: Tensor | None = None) -> list[Tensor]:
    """Return the same views as a list, for a layout with padding between parameters."""
    views = _views_in_c(handle, tensor)
    made: list[Tensor] = TORCH_HANDLE._get_unflat_views_aligned(handle, tensor) if views is None else views
    return made


def _views_in_c(handle: Handle, tensor: Tensor | None) -> list[Tensor] | None:
    flat = handle.flat_param if tensor is None else tensor
    in_c = handle._unit is not None and torch.is_grad_enabled() and _C.is_plain(flat)
    return handle._unit.views(flat) if in_c else None


# Unsharded


def use_unsharded_views(handle: Handle, as_params: bool) -> None:
    """Make each original parameter a view of the unsharded flat parameter.

    ``as_params``: as ``nn.Parameter`` objects; else, for forward and backward, as tensors that autograd tracks back
    to the flat parameter. They have a history even in ``no_grad``: a prefetch may run in another module's
    ``no_grad`` forward (torch PR 116792).
    """
    state = handle._training_state
    if not as_params and _lacks_views_of_forward(handle, state):
        handle._state = HandleTrainingState.FORWARD  # in FORWARD views are made and listed in `_tensors`
        try:
            handle._use_unsharded_views(as_params)
        finally:
            handle._state = state
        return
    if not loops_in_c(handle, handle.flat_param):
        _use_unsharded_views_as_torch(handle, as_params)
    else:
        handle._check_unsharded(handle.flat_param)
        if as_params:
            _use_unsharded_params(handle)
        else:
            _use_unsharded_tensors(handle)
    if not as_params and state is HandleTrainingState.FORWARD:
        note_accumulator(handle)


def _lacks_views_of_forward(handle: Handle, state: HandleTrainingState) -> bool:
    """Whether an earlier backward of this forward has ended and removed the views from `_tensors`."""
    in_backward = handle._use_orig_params and state is HandleTrainingState.BACKWARD_PRE
    return in_backward and any(tensor is None for tensor in handle.flat_param._tensors)


def _use_unsharded_views_as_torch(handle: Handle, as_params: bool) -> None:
    try:
        TORCH_HANDLE._use_unsharded_views(handle, as_params)
    except AssertionError as error:
        if "prim_param" not in str(error):
            raise
        infos = handle.flat_param._shared_param_infos
        names = ", ".join(f"{info.module_name}.{info.param_name}" for info in infos)
        raise handle._wrong(f"{names} should share an nn.Parameter each: {error}") from None


def _use_unsharded_params(handle: Handle) -> None:
    flat_param, unit = handle.flat_param, handle._unit
    if handle._use_orig_params:
        if not unit.use_parameters(flat_param, flat_param._params, flat_param._shared_params, is_unsafe(handle)):
            _use_unsharded_views_as_torch(handle, as_params=True)
    else:
        params = [nn.Parameter(view, flat_param.requires_grad) for view in handle._get_unflat_views()]
        unit.register_parameters(params, [params[i] for i in primaries(flat_param)], is_unsafe(handle))


def _use_unsharded_tensors(handle: Handle) -> None:
    flat_param, orig, state = handle.flat_param, handle._use_orig_params, handle._training_state
    listed = orig and state == HandleTrainingState.FORWARD
    again = orig and state == HandleTrainingState.BACKWARD_PRE
    tensors = flat_param._tensors if orig else []
    # In backward use the forward's tensors: autograd's graph and the post-backward hook are on them. Not for
    # NO_SHARD: old views would keep memory that the flat parameter has left
    last = tensors if again or handle.uses_sharded_strategy else None
    if not use_views_of(handle, flat_param, last, again, listed):
        _use_unsharded_views_as_torch(handle, as_params=False)


def use_views_of(handle: Handle, padded: Tensor, last: list[Tensor] | None, again: bool, listed: bool) -> bool:
    """Let the modules have views of ``padded``, the unsharded data. False, and nothing is changed: C cannot.

    ``last``: earlier views, to be used if ``again``, or if they fit. ``listed``: note the views in ``_tensors``.
    """
    flat_param = handle.flat_param
    views = handle._unit.use_unsharded(flat_param, padded, last, again, listed, is_unsafe(handle))
    if views is not None and listed:
        flat_param._tensors[:] = views
    return views is not None


def take_over_attributes(handle: Handle) -> None:
    """Replace the parameters in the modules with views, outside of ``_parameters``.

    This fixes the order in which they come back: later switches in C write the dictionaries in place.
    """
    if loops_in_c(handle, handle.flat_param) and not handle._is_replaced("_use_unsharded_views"):
        handle._check_unsharded(handle.flat_param)
        with torch.enable_grad():
            handle._unit.register_tensors(list(handle._get_unflat_views()), False, is_unsafe(handle))
        return
    unit, handle._unit = handle._unit, None
    try:
        handle._use_unsharded_views(as_params=False)
    finally:
        handle._unit = unit


# Sharded


def use_sharded_views(handle: Handle) -> None:
    """Set each original parameter to its 1-D piece of the shard, or to an empty tensor if it has no piece here.

    The Parameter objects are kept, so that an optimizer may hold them. With NO_SHARD they get their full shape.
    """
    handle._unsharded_flat_param_for_skipped_views = None
    if not handle.uses_sharded_strategy:
        handle._use_unsharded_views(as_params=True)
        return
    flat_param = handle.flat_param
    if handle._training_state is HandleTrainingState.IDLE:
        handle._keep_moved_shard()
    in_c = loops_in_c(handle, flat_param)
    if in_c:
        handle._check_sharded(flat_param)
    if not (in_c and point_at(handle, flat_param)):
        TORCH_HANDLE._use_sharded_views(handle)
    elif handle._training_state == HandleTrainingState.BACKWARD_POST:
        flat_param._tensors[:] = [None] * len(flat_param._tensors)  # backward is over: free its graph


def point_at(handle: Handle, shard: Tensor) -> bool:
    """Set the flat parameter's data to ``shard`` and the original parameters to its pieces. False: C cannot."""
    flat_param = handle.flat_param
    params, shared, infos = flat_param._params, flat_param._shared_params, flat_param._shard_param_infos
    return shard.is_contiguous() and handle._unit.use_sharded(
        flat_param, shard, params, shared, infos, is_unsafe(handle)
    )


SETATTR_IN_C = (
    (_safe_setattr_tensor_or_param, _safe_setattr_tensor_or_param),
    (_unsafe_setattr_tensor, _unsafe_setattr_param),
)
