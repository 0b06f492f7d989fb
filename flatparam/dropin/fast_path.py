"""Unsharding and resharding in a step by as few calls as they need, in the usual case: nothing was replaced.

The methods here do what those of the same name without ``_fused`` do, or nothing; they return whether they did.
"""

import os
from typing import Any

import torch

from .. import _C
from ..common.storage import allocate, free, has_memory, is_allocated
from ..common.torch_private import (
    NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES,
    HandleShardingStrategy,
    HandleTrainingState,
)
from .gradients import Gradients
from .overrides import RESHARD, UNSHARD
from .views import SETATTR_IN_C

enabled = os.environ.get("FLATPARAM_FUSED", "1") != "0"  # off: step by step, so that tests can hold the two together

_NO_SHARD = HandleShardingStrategy.NO_SHARD
_FORWARD, _BACKWARD_PRE = HandleTrainingState.FORWARD, HandleTrainingState.BACKWARD_PRE
_BACKWARD_POST = HandleTrainingState.BACKWARD_POST


class Fused(Gradients):
    """The part of FlatParamHandle that a step goes through."""

    def _is_usual(self, path: str) -> bool:
        """Whether the unit is sharded, stays on its device and in its precision, and is as flatparam defines it."""
        return (
            bool(enabled)
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
                return False  # is an error
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
            if self._fwd_bwd_param_dtype != self._orig_param_dtype:
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
            return False  # needs streams, or is an error
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
        """Let the flat parameter be its shard and the original parameters and gradients pieces of it."""
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
