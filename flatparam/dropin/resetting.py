"""``reset_state`` for torch's wrapper: back to a model between two steps, if the end of a block has not run."""

from typing import Any

import torch
from torch import nn

from ..common.torch_private import HandleTrainingState, TorchsFSDP, TrainingState, _register_flat_param
from .base import Handle
from .handle import FlatParamHandle
from .recovery import recover


def reset_state(model: nn.Module) -> None:
    """End ``no_sync``, ``summon_full_params`` or a pass in a model of torch's FullyShardedDataParallel, on this rank.

    Call it if a signal or a debugger has skipped the end of such a block, and calls fail because a unit is not idle, or
    gradients are not reduced. No collective call, but all ranks must call it: it frees the gathered parameters, and the
    next forward gathers. If it is interrupted itself, call it again.

    Afterwards:

    - parameters in ``summon_full_params`` are not written back;
    - values that a state dict has loaded so far are kept;
    - gradients accumulated in ``no_sync`` are kept;
    - gradients of an interrupted backward are dropped.

    Args:
        model: the outermost wrapper, or a module that contains it.

    Raises: TypeError if no unit in ``model`` has flatparam's handle.
    """
    units = TorchsFSDP.fsdp_modules(model)
    if not any(isinstance(unit._handle, FlatParamHandle) for unit in units):
        raise TypeError(
            f"expected a model of torch's FullyShardedDataParallel on flatparam's handle, got {type(model).__name__} "
            "without one. flatparam's own FullyShardedDataParallel has model.reset_state()"
        )
    for unit in units:
        _reset(unit)


def _reset(unit: Any) -> None:
    getattr(unit, "_unshard_params_ctx", {}).clear()  # a state dict in progress ends with this
    if isinstance(unit._handle, FlatParamHandle):
        _leave_summoned(unit, unit._handle)
        recover(unit._handle)
    unit.training_state = TrainingState.IDLE
    unit._sync_gradients = True
    unit._post_backward_callback_queued = False


@torch.no_grad()
def _leave_summoned(unit: Any, handle: Handle) -> None:
    flat_param = handle.flat_param
    if handle._state is not HandleTrainingState.SUMMON_FULL_PARAMS:
        return
    if not handle._use_orig_params:
        if not handle.is_sharded(flat_param):
            handle._use_unsharded_views(as_params=False)
        _register_flat_param(unit, unit)
    if hasattr(flat_param, "_saved_grad_shard"):
        flat_param.grad = None
        flat_param.data = flat_param._local_shard
        flat_param.grad = flat_param._saved_grad_shard
        del flat_param._saved_grad_shard
