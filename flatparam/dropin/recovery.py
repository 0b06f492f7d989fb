"""Recover a handle, at the beginning of the next step, from an exception in the middle of a step.

torch's runtime sets the handle's state before each part of a step, and resets it after the part. An exception (in the
model's forward, a hook, a collective; KeyboardInterrupt) skips the reset. The next forward of torch's handle then uses
the leftovers: it computes with weights of earlier steps, or loses gradients. Old weights are also used without an
exception, if an optimizer steps between a forward and its backward, or after a forward without a backward.

A gather is a collective, so all ranks of the group must decide it alike. Beside the calls of torch's runtime, which
follow control flow, the handle decides by these inputs:

| input | why all ranks have it alike |
|---|---|
| whether the unsharded flat parameter has memory | control flow, as with torch's handle: forward, backward, no_sync() |
| ``steps`` | the program steps the optimizers: those that hold a parameter of some unit of the model |
| ``SUMMON_FULL_PARAMS`` begins | control flow: gathered parameters are gathered again, whatever their values |
| ``_state`` not at rest when a forward begins | an exception has ended a step; on one rank alone: a time-out |
| ``_is_compared`` | the first gather of a model over this group, see comparing.py |
| gradients that are None, in ``unshard_grad()`` | an all-reduce |

These are no inputs, as they may differ between ranks: versions, values and addresses of tensors, ``no_grad`` and
``train()``, steps of other optimizers, other models, garbage collection. So a write outside of a step, while units stay
gathered, does not cause a gather: a warning says so.
"""

import torch
import torch.distributed as dist
from torch import nn

from .. import _C
from ..common.tensors import is_allocated, same_storage
from ..common.torch_private import HandleTrainingState, in_transform
from ..common.warned import warn_here
from .base import Handle
from .post_backward import begin_later_backward, task_of_autograd
from .writeback import give_back_unused_grad, writeback_one

_FORWARD, _IDLE = HandleTrainingState.FORWARD, HandleTrainingState.IDLE  # looked up once: the state is set often
_SUMMONED = HandleTrainingState.SUMMON_FULL_PARAMS
_AT_REST = (_IDLE, _SUMMONED)
_BACKWARD_PRE = HandleTrainingState.BACKWARD_PRE
_IN_BACKWARD = (_BACKWARD_PRE, HandleTrainingState.BACKWARD_POST)

_GATHERED = ("_full_param_padded", "_full_prec_full_param_padded")
_DIFFERENTIATING = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


def training_state(handle: Handle) -> HandleTrainingState:
    """The state that was set last; IDLE if it was set in a backward that an exception has ended."""
    return _IDLE if handle._is_of_backward and task_of_autograd() == -1 else handle._state


def set_training_state(handle: Handle, state: HandleTrainingState) -> None:
    in_backward = task_of_autograd() != -1
    # A forward of torch's runtime begins: not a user who sets the state, nor a forward that activation
    # checkpointing runs again
    if state is _FORWARD and not in_backward and handle._handle_index is not None:
        if in_transform():
            _refuse_to_be_differentiated(handle)
        interrupted = handle._state not in _AT_REST or (handle._prefetched and handle._is_of_backward)
        # Or the parameters are still gathered, and an optimizer has stepped since the last forward
        if interrupted or (handle._steps_seen != handle.steps[0] and _is_gathered(handle)):
            recover(handle)
        elif handle._left_versions is not None:
            _tell_of_old_values(handle)
        handle._steps_seen = handle.steps[0]
    elif state is _BACKWARD_PRE and in_backward and not handle._needs_pre_backward_unshard:
        begin_later_backward(handle)
    elif state is _IDLE and handle._put_aside and not getattr(handle, "_ran_pre_backward_hook", True):
        give_back_unused_grad(handle)  # the runtime resets the flag at the end of a backward
    handle._is_of_backward = in_backward
    handle._state = state


def _refuse_to_be_differentiated(handle: Handle) -> None:
    """Raises: RuntimeError in a transform that differentiates. Under ``vmap`` alone a forward is right.

    torch's runtime registers its hooks on tensors of the transform, which are gone before their backward.
    """
    if any(transform.key() in _DIFFERENTIATING for transform in torch._C._functorch.get_interpreter_stack()):
        raise RuntimeError(
            f"torch.func.grad, vjp, jvp, jacrev, jacfwd and hessian do not work through torch's "
            f"FullyShardedDataParallel, which does without hooks in them: {handle._names()} would be freed when its "
            "backward comes. Use torch.autograd.grad, torch.autograd.functional or flatparam's own "
            "FullyShardedDataParallel, or differentiate inside summon_full_params()"
        )


def _is_gathered(handle: Handle) -> bool:
    if not handle.uses_sharded_strategy:
        return False
    tensors = (getattr(handle.flat_param, name, None) for name in _GATHERED)
    return any(tensor is not None and is_allocated(tensor) for tensor in tensors)


def note_left_gathered(handle: Handle) -> None:
    """After a forward that leaves the parameters gathered: note versions and a sample, to detect writes later.

    Versions count writes in place. Programs that evaluate with averaged weights exchange them by ``.data``, which
    changes no version: the sample of values shows that.
    """
    handle._left_versions = _sum_of_versions(handle)
    if handle._left_values is None and handle.uses_sharded_strategy and not torch.is_grad_enabled():
        handle._left_values = _some_of(handle.flat_param._local_shard).clone(), 1


def _tell_of_old_values(handle: Handle) -> None:
    """Before a forward with parameters that an earlier one left gathered: warn if the user has written since.

    The sample is compared in forwards 1, 2, 4, 8 and so on, to save time. No warning if the user has replaced
    ``_use_sharded_views``: that may write the shard.
    """
    written = handle._left_versions != _sum_of_versions(handle)
    if handle._left_values is not None:
        before, uses = handle._left_values
        handle._left_values = before, uses + 1
        looks = uses & (uses - 1) == 0
        written = written or (looks and not _same_values(before, _some_of(handle.flat_param._local_shard)))
    if written and _is_gathered(handle) and not handle._is_replaced("_use_sharded_views"):
        _warn_of_old_values(handle._names())


def _sum_of_versions(handle: Handle) -> int | None:
    return _C.versions(handle.flat_param._params if handle._use_orig_params else (handle.flat_param,))


def _free_gathered(handle: Handle, *others: str) -> None:
    for name in (*_GATHERED, *others):
        tensor = getattr(handle.flat_param, name, None)
        if tensor is not None:
            handle._free(tensor)


@torch.no_grad()
def leave_memory(handle: Handle, *tensors: torch.Tensor) -> None:
    """After an interrupted gather, leave ``tensors`` to it: it still reads and writes them.

    If an attribute of the handle has the memory of one of them, it gets a new tensor, without memory.
    """
    for name in (*_GATHERED, "_mp_shard"):
        ours = getattr(handle.flat_param, name, None)
        if ours is not None and is_allocated(ours) and any(same_storage(ours, tensor) for tensor in tensors):
            fresh = torch.empty_like(ours)
            handle._free(fresh)
            setattr(handle.flat_param, name, fresh)


@torch.no_grad()
def recover(handle: Handle) -> None:
    """Switch to the sharded flat parameter, free what is gathered, and go to IDLE. No collective call.

    Parameters that the user has replaced are written back. Gradients of earlier backwards stay, with
    use_orig_params; gradients of an interrupted backward are dropped.
    """
    flat_param = handle.flat_param
    if not hasattr(flat_param, "_local_shard"):
        return  # never used yet
    if handle._state in _AT_REST:
        handle._keep_moved_shard()
    flat_param.data = flat_param._local_shard
    _write_back_replaced(handle)
    if handle._state in _IN_BACKWARD:
        flat_param._post_backward_called = False
        if hasattr(flat_param, "_saved_grad_shard"):
            if handle._use_orig_params:
                flat_param.grad = flat_param._saved_grad_shard
            del flat_param._saved_grad_shard
    handle._state = _FORWARD  # if this is interrupted too, the next forward recovers again
    handle._is_of_backward = False
    handle._use_sharded_flat_param()
    _free_gathered(handle, "_mp_shard")
    if handle._use_orig_params:
        flat_param._tensors[:] = [None] * len(flat_param._tensors)
    handle._prefetched = handle._needs_pre_backward_unshard = handle._ran_pre_backward_hook = handle._put_aside = False
    handle._post_forward_index = None
    handle._state = _IDLE


def _write_back_replaced(handle: Handle) -> None:
    """Copy parameters that the user has put in place of original ones into the shard. Our own views are ignored."""
    flat_param = handle.flat_param
    if not handle._use_orig_params or handle._skip_writeback_check:
        return
    for i, (info, piece) in enumerate(zip(flat_param._param_infos, flat_param._shard_param_infos, strict=True)):
        current = getattr(info.module, info.param_name, None)
        if current is not None and current is flat_param._tensors[i]:
            current = flat_param._params[i]  # a view of the interrupted forward is in its place
        if not isinstance(current, nn.Parameter) or not piece.in_shard:
            continue
        moved = handle._state is not _SUMMONED and not same_storage(current, flat_param)
        if current is not flat_param._params[i] or moved:
            writeback_one(handle, i, flat_param)


def leave_summon(handle: Handle) -> None:
    """After an exception in SUMMON_FULL_PARAMS go to IDLE: else the runtime would think it unsharded forever."""
    if handle._state is _SUMMONED:
        try:
            recover(handle)
        finally:
            handle._state = _IDLE


_LOOKED_AT = 256  # about so many elements of a shard are compared


def _some_of(shard: torch.Tensor) -> torch.Tensor:
    return shard.detach()[:: max(1, shard.numel() // _LOOKED_AT)]


def _same_values(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether both are equal bit for bit; True if shape, dtype or device differ, as they cannot be compared."""
    if (before.shape, before.dtype, before.device) != (now.shape, now.dtype, now.device):
        return True
    return torch.equal(before.view(torch.uint8), now.contiguous().view(torch.uint8))


_told_of_old_values: list[str] = []  # the first unit that was warned of: one warning is enough


def _warn_of_old_values(names: str) -> None:
    if not _told_of_old_values:
        _told_of_old_values.append(names)
        warn_here(
            f"rank {dist.get_rank()}: parameters in {names} were written between two forwards, and the first forward "
            "left them gathered: as with torch's handle, the second forward computes with the old values. After "
            "writing, on every rank, call `handle.reshard(True)` for all handles of model._all_handles, or use "
            "flatparam.install(runtime=True), which gathers in every forward"
        )
