"""Switch the original parameters between views of the unsharded and pieces of the sharded flat parameter.

The loops run in C (``_C.ModuleParams``), one call for each unit. They need plain tensors and nn.Module's own rules for
attributes. If a tensor has a subclass, an extension or a mode is active, or a bypassed method was replaced, torch's
method does the same for one parameter after the other.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .. import _C
from ..common.torch_private import (
    HandleTrainingState,
    _safe_setattr_tensor_or_param,
    _unsafe_setattr_param,
    _unsafe_setattr_tensor,
)
from .base import RESHARD, STREAM, TORCH_HANDLE, UNSHARD, VIEWS, HandleBase, step_of


def primaries(flat_param: Any) -> list[int]:
    """Return for each further place of a shared parameter the index of the original parameter."""
    shared, infos = flat_param._shared_param_infos, flat_param._param_infos
    index = {(id(info.module), info.param_name): i for i, info in enumerate(infos)} if shared else {}
    return [index[id(info.prim_module), info.prim_param_name] for info in shared]


class Views(HandleBase):
    """The part of FlatParamHandle that sets the parameter attributes of the modules."""

    # Set by a user. Our own method is not stored: a bound method would be a reference cycle
    _own_way_to_unflatten: Callable[..., Iterable[Tensor]] | None = None

    def _init_get_unflat_views_fn(self, align_addresses: bool) -> None:
        self._aligns_addresses = align_addresses

    @property
    def _get_unflat_views(self) -> Callable[..., Iterable[Tensor]]:
        """The function that unflattens. Users may set another one."""
        if self._own_way_to_unflatten is not None:
            return self._own_way_to_unflatten
        return self._get_unflat_views_aligned if self._aligns_addresses else self._get_unflat_views_unaligned

    @_get_unflat_views.setter
    def _get_unflat_views(self, way: Callable[..., Iterable[Tensor]]) -> None:
        self._own_way_to_unflatten = way

    def _loops_in_c(self, *tensors: Tensor) -> bool:
        """Whether the C loops give the same result as the methods that they bypass, for these tensors."""
        return (
            self._unit is not None
            and self._own_way_to_unflatten is None
            and (
                _C.is_as_defined(self, self._own_methods, self._steps[VIEWS])
                or not self._is_replaced(*self._steps[VIEWS])
            )
            and (self._setattr_tensor, self._setattr_param) in SETATTR_IN_C
            and _C.is_plain(*tensors)
        )

    @property
    def _unsafe(self) -> bool:
        return self._setattr_tensor is _unsafe_setattr_tensor

    # Unflattening

    @step_of(VIEWS, UNSHARD, RESHARD, STREAM)
    def _get_unflat_views_unaligned(self, tensor: Tensor | None = None) -> Iterator[Tensor]:
        """Return a view of ``tensor`` (None: the flat parameter) for each original parameter, in its shape and strides.

        Shapes: ``tensor`` is ``[unpadded unsharded numel]``: the flat parameter, its gradient or optimizer state.
        """
        views = self._views_in_c(tensor)
        made: Any = TORCH_HANDLE._get_unflat_views_unaligned(self, tensor) if views is None else views
        return iter(made)

    @step_of(VIEWS, UNSHARD, RESHARD, STREAM)
    def _get_unflat_views_aligned(self, tensor: Tensor | None = None) -> list[Tensor]:
        """Return the same views as a list, for a layout with padding between parameters."""
        views = self._views_in_c(tensor)
        made: list[Tensor] = TORCH_HANDLE._get_unflat_views_aligned(self, tensor) if views is None else views
        return made

    def _views_in_c(self, tensor: Tensor | None) -> list[Tensor] | None:
        flat = self.flat_param if tensor is None else tensor
        in_c = self._unit is not None and torch.is_grad_enabled() and _C.is_plain(flat)
        return self._unit.views(flat) if in_c else None

    # Unsharded

    @step_of(UNSHARD, STREAM)
    def _use_unsharded_views(self, as_params: bool) -> None:
        """Make each original parameter a view of the unsharded flat parameter.

        ``as_params``: as ``nn.Parameter`` objects; else, for forward and backward, as tensors that autograd tracks back
        to the flat parameter. They have a history even in ``no_grad``: a prefetch may run in another module's
        ``no_grad`` forward (torch PR 116792).
        """
        state = self._training_state
        if not as_params and self._lacks_views_of_forward(state):
            self._state = HandleTrainingState.FORWARD  # in FORWARD views are made and listed in `_tensors`
            try:
                self._use_unsharded_views(as_params)
            finally:
                self._state = state
            return
        if not self._loops_in_c(self.flat_param):
            self._use_unsharded_views_as_torch(as_params)
        else:
            self._check_unsharded(self.flat_param)
            if as_params:
                self._use_unsharded_params()
            else:
                self._use_unsharded_tensors()
        if not as_params and state is HandleTrainingState.FORWARD:
            self._note_accumulator()

    def _lacks_views_of_forward(self, state: HandleTrainingState) -> bool:
        """Whether an earlier backward of this forward has ended and removed the views from `_tensors`."""
        in_backward = self._use_orig_params and state is HandleTrainingState.BACKWARD_PRE
        return in_backward and any(tensor is None for tensor in self.flat_param._tensors)

    def _use_unsharded_views_as_torch(self, as_params: bool) -> None:
        try:
            TORCH_HANDLE._use_unsharded_views(self, as_params)
        except AssertionError as error:
            if "prim_param" not in str(error):
                raise
            infos = self.flat_param._shared_param_infos
            names = ", ".join(f"{info.module_name}.{info.param_name}" for info in infos)
            raise self._wrong(f"{names} should share an nn.Parameter each: {error}") from None

    def _use_unsharded_params(self) -> None:
        flat_param, unit = self.flat_param, self._unit
        if self._use_orig_params:
            if not unit.use_parameters(flat_param, flat_param._params, flat_param._shared_params, self._unsafe):
                self._use_unsharded_views_as_torch(as_params=True)
        else:
            params = [nn.Parameter(view, flat_param.requires_grad) for view in self._get_unflat_views()]
            unit.register_parameters(params, [params[i] for i in primaries(flat_param)], self._unsafe)

    def _use_unsharded_tensors(self) -> None:
        flat_param, orig, state = self.flat_param, self._use_orig_params, self._training_state
        listed = orig and state == HandleTrainingState.FORWARD
        again = orig and state == HandleTrainingState.BACKWARD_PRE
        tensors = flat_param._tensors if orig else []
        # In backward use the forward's tensors: autograd's graph and the post-backward hook are on them. Not for
        # NO_SHARD: old views would keep memory that the flat parameter has left
        last = tensors if again or self.uses_sharded_strategy else None
        views = self._unit.use_unsharded(flat_param, flat_param, last, again, listed, self._unsafe)
        if views is None:
            self._use_unsharded_views_as_torch(as_params=False)
        elif listed:
            flat_param._tensors[:] = views

    unflatten_as_params = TORCH_HANDLE.unflatten_as_params  # a context: parameters in it, tensors after it

    # Sharded

    @step_of(RESHARD)
    def _use_sharded_views(self) -> None:
        """Set each original parameter to its 1-D piece of the shard, or to an empty tensor if it has no piece here.

        The Parameter objects are kept, so that an optimizer may hold them. With NO_SHARD they get their full shape.
        """
        self._unsharded_flat_param_for_skipped_views = None
        if not self.uses_sharded_strategy:
            self._use_unsharded_views(as_params=True)
            return
        flat_param = self.flat_param
        if self._training_state is HandleTrainingState.IDLE:
            self._keep_moved_shard()
        in_c = self._loops_in_c(flat_param)
        if in_c:
            self._check_sharded(flat_param)
        if not (in_c and self._point_at(flat_param)):
            TORCH_HANDLE._use_sharded_views(self)
        elif self._training_state == HandleTrainingState.BACKWARD_POST:
            flat_param._tensors[:] = [None] * len(flat_param._tensors)  # backward is over: free its graph

    def _point_at(self, shard: Tensor) -> bool:
        """Set the flat parameter's data to ``shard`` and the original parameters to its pieces. False: C cannot."""
        flat_param = self.flat_param
        params, shared, infos = flat_param._params, flat_param._shared_params, flat_param._shard_param_infos
        return shard.is_contiguous() and self._unit.use_sharded(flat_param, shard, params, shared, infos, self._unsafe)

    _deregister_orig_params = TORCH_HANDLE._deregister_orig_params


SETATTR_IN_C = (
    (_safe_setattr_tensor_or_param, _safe_setattr_tensor_or_param),
    (_unsafe_setattr_tensor, _unsafe_setattr_param),
)
