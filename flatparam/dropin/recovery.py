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
| ``_is_compared`` | the first gather of a handle, see comparing.py |
| gradients that are None, in ``unshard_grad()`` | an all-reduce |

These are no inputs, as they may differ between ranks: versions, values and addresses of tensors, ``no_grad`` and
``train()``, steps of other optimizers, other models, garbage collection. So a write outside of a step, while units stay
gathered, does not cause a gather: a warning says so.
"""

import threading
import warnings
from typing import Any

import torch
import torch.nn as nn

from .. import _C
from ..common import optimizers
from ..common.tensors import is_allocated, same_storage
from ..common.torch_private import HandleTrainingState, in_transform
from .post_backward import PostBackward, task_of_autograd

_FORWARD, _IDLE = HandleTrainingState.FORWARD, HandleTrainingState.IDLE  # looked up once: the state is set often
_SUMMONED = HandleTrainingState.SUMMON_FULL_PARAMS
_AT_REST = (_IDLE, _SUMMONED)
_BACKWARD_PRE = HandleTrainingState.BACKWARD_PRE
_IN_BACKWARD = (_BACKWARD_PRE, HandleTrainingState.BACKWARD_POST)

_GATHERED = ("_full_param_padded", "_full_prec_full_param_padded")
_DIFFERENTIATING = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


class Driven:
    """Attributes that torch's runtime sets on a handle: its places in orders of handles, and flags of prefetching."""

    _handle_index: int | None = None
    _pre_forward_order_index: int | None = None
    _post_forward_index: int | None = None
    _needs_pre_forward_unshard = False
    _needs_pre_backward_unshard = False
    _prefetched = False


_uncounted = [0]  # the count for handles that no runtime has numbered


class _Numbered(threading.local):
    steps = _uncounted  # the count of the root whose handles this thread numbers now


_numbered = _Numbered()


class Interruptible(PostBackward, Driven):
    """The part of FlatParamHandle with the state that the runtime sets, and the recovery from a state left behind."""

    _state = _IDLE
    steps = _uncounted  # [number of steps of optimizers that hold a parameter of the model]
    _is_of_backward = False  # whether `_state` was set while autograd ran
    _steps_seen = 0  # `steps` when the last forward began
    _left_versions: int | None = None  # sum of the parameters' versions when a forward left them gathered
    _left_values: tuple[torch.Tensor, int] | None = None  # (sample of the shard then, forwards since)

    @property
    def _handle_index(self) -> int | None:
        return vars(self).get("_handle_index")

    @_handle_index.setter
    def _handle_index(self: Any, index: int | None) -> None:
        """Store the index. All handles of a root, which the runtime numbers in a row, share one count of steps.

        A count for each handle could differ between ranks: a rank without elements of a unit may leave its parameters
        out of the optimizer.
        """
        if index == 0:
            _numbered.steps = [0]
            optimizers.note_change()
        vars(self)["_handle_index"], self.steps = index, _numbered.steps

    @property
    def _training_state(self) -> HandleTrainingState:
        """The state that was set last; IDLE if it was set in a backward that an exception has ended."""
        if self._is_of_backward and task_of_autograd() == -1:
            return _IDLE
        return self._state

    @_training_state.setter
    def _training_state(self: Any, state: HandleTrainingState) -> None:
        in_backward = task_of_autograd() != -1
        # A forward of torch's runtime begins: not a user who sets the state, nor a forward that activation
        # checkpointing runs again
        if state is _FORWARD and not in_backward and self._handle_index is not None:
            if in_transform():
                self._refuse_to_be_differentiated()
            interrupted = self._state not in _AT_REST or (self._prefetched and self._is_of_backward)
            if interrupted or self._is_out_of_date():
                self._recover()
            elif self._left_versions is not None:
                self._tell_of_old_values()
            self._steps_seen = self.steps[0]
        elif state is _BACKWARD_PRE and in_backward and not self._needs_pre_backward_unshard:
            self._begin_later_backward()
        elif state is _IDLE and self._put_aside and not getattr(self, "_ran_pre_backward_hook", True):
            self._give_back_unused_grad()  # the runtime resets the flag at the end of a backward
        self._is_of_backward = in_backward
        self._state = state

    def _refuse_to_be_differentiated(self: Any) -> None:
        """Raises: RuntimeError in a transform that differentiates. Under ``vmap`` alone a forward is right.

        torch's runtime registers its hooks on tensors of the transform, which are gone before their backward.
        """
        if any(transform.key() in _DIFFERENTIATING for transform in torch._C._functorch.get_interpreter_stack()):
            raise RuntimeError(
                f"torch.func.grad, vjp, jvp, jacrev, jacfwd and hessian do not work through torch's "
                f"FullyShardedDataParallel, which does without hooks in them: {self._names()} would be freed when its "
                "backward comes. Use torch.autograd.grad, torch.autograd.functional or flatparam's own "
                "FullyShardedDataParallel, or differentiate inside summon_full_params()"
            )

    def _is_out_of_date(self: Any) -> bool:
        """Whether the parameters are still gathered, and an optimizer has stepped since the last forward."""
        return bool(self._steps_seen != self.steps[0] and self._is_gathered())

    def _is_gathered(self: Any) -> bool:
        if not self.uses_sharded_strategy:
            return False
        tensors = (getattr(self.flat_param, name, None) for name in _GATHERED)
        return any(tensor is not None and is_allocated(tensor) for tensor in tensors)

    def _note_left_gathered(self: Any) -> None:
        """After a forward that leaves the parameters gathered: note versions and a sample, to detect writes later.

        Versions count writes in place. Programs that evaluate with averaged weights exchange them by ``.data``, which
        changes no version: the sample of values shows that.
        """
        self._left_versions = self._sum_of_versions()
        if self._left_values is None and self.uses_sharded_strategy and not torch.is_grad_enabled():
            self._left_values = _some_of(self.flat_param._local_shard).clone(), 1

    def _tell_of_old_values(self: Any) -> None:
        """Before a forward with parameters that an earlier one left gathered: warn if the user has written since.

        The sample is compared in forwards 1, 2, 4, 8 and so on, to save time. No warning if the user has replaced
        ``_use_sharded_views``: that may write the shard.
        """
        written = self._left_versions != self._sum_of_versions()
        if self._left_values is not None:
            before, uses = self._left_values
            self._left_values = before, uses + 1
            looks = uses & (uses - 1) == 0
            written = written or (looks and not _same_values(before, _some_of(self.flat_param._local_shard)))
        if written and self._is_gathered() and not self._is_replaced("_use_sharded_views"):
            _warn_of_old_values(self._names())

    def _sum_of_versions(self: Any) -> int | None:
        found = _C.versions(self.flat_param._params if self._use_orig_params else (self.flat_param,))
        return None if found is None else found[0]

    def _free_gathered(self: Any, *others: str) -> None:
        for name in (*_GATHERED, *others):
            tensor = getattr(self.flat_param, name, None)
            if tensor is not None:
                self._free(tensor)

    @torch.no_grad()
    def _leave_memory(self: Any, *tensors: torch.Tensor) -> None:
        """After an interrupted gather, leave ``tensors`` to it: it still reads and writes them.

        If an attribute of the handle has the memory of one of them, it gets a new tensor, without memory.
        """
        for name in (*_GATHERED, "_mp_shard"):
            ours = getattr(self.flat_param, name, None)
            if ours is not None and is_allocated(ours) and any(same_storage(ours, tensor) for tensor in tensors):
                fresh = torch.empty_like(ours)
                self._free(fresh)
                setattr(self.flat_param, name, fresh)

    @torch.no_grad()
    def _recover(self: Any) -> None:
        """Switch to the sharded flat parameter, free what is gathered, and go to IDLE. No collective call.

        Parameters that the user has replaced are written back. Gradients of earlier backwards stay, with
        use_orig_params; gradients of an interrupted backward are dropped.
        """
        flat_param = self.flat_param
        if not hasattr(flat_param, "_local_shard"):
            return  # never used yet
        if self._state in _AT_REST:
            self._keep_moved_shard()
        flat_param.data = flat_param._local_shard
        self._write_back_replaced()
        if self._state in _IN_BACKWARD:
            flat_param._post_backward_called = False
            if hasattr(flat_param, "_saved_grad_shard"):
                if self._use_orig_params:
                    flat_param.grad = flat_param._saved_grad_shard
                del flat_param._saved_grad_shard
        self._state = _FORWARD  # if this is interrupted too, the next forward recovers again
        self._is_of_backward = False
        self._use_sharded_flat_param()
        self._free_gathered("_mp_shard")
        if self._use_orig_params:
            flat_param._tensors[:] = [None] * len(flat_param._tensors)
        self._prefetched = self._needs_pre_backward_unshard = self._ran_pre_backward_hook = self._put_aside = False
        self._post_forward_index = None
        self._state = _IDLE

    def _write_back_replaced(self: Any) -> None:
        """Copy parameters that the user has put in place of original ones into the shard. Our own views are ignored."""
        flat_param = self.flat_param
        if not self._use_orig_params or self._skip_writeback_check:
            return
        for i, (info, piece) in enumerate(zip(flat_param._param_infos, flat_param._shard_param_infos, strict=True)):
            current = getattr(info.module, info.param_name, None)
            if current is not None and current is flat_param._tensors[i]:
                current = flat_param._params[i]  # a view of the interrupted forward is in its place
            if not isinstance(current, nn.Parameter) or not piece.in_shard:
                continue
            moved = self._state is not _SUMMONED and not same_storage(current, flat_param)
            if current is not flat_param._params[i] or moved:
                self._writeback_one(i, flat_param)

    def _leave_summon(self: Any) -> None:
        """After an exception in SUMMON_FULL_PARAMS go to IDLE: else the runtime would think it unsharded forever."""
        if self._state is _SUMMONED:
            try:
                self._recover()
            finally:
                self._state = _IDLE


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
        warnings.warn(
            f"parameters in {names} were written between two forwards, and the first forward left them gathered: as "
            "with torch's handle, the second forward computes with the old values. After writing, on every "
            "rank, call `handle.reshard(True)` for all handles of model._all_handles, or use "
            "flatparam.install(runtime=True), which gathers in every forward",
            stacklevel=2,
        )
