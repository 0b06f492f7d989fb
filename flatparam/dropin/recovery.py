"""Getting rid of what an exception in the middle of a step left behind, when the next step begins.

torch's runtime sets the handle's state before each part of a step and sets it back at the end of the part. An
exception (in the model's forward, a hook, a collective; KeyboardInterrupt) skips the end, and torch's next forward then
takes what was left for its own: it computes with weights of earlier steps, or loses gradients. The former also happens
without an exception, if an optimizer steps between a forward and its backward, or after a forward that has none, or if
the user writes the parameters there.
"""

import warnings
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
import torch.nn as nn

from .. import _C
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
    """What the runtime keeps on a handle: places in its orders of handles, and what prefetching did."""

    _handle_index: int | None = None
    _pre_forward_order_index: int | None = None
    _post_forward_index: int | None = None
    _needs_pre_forward_unshard = False
    _needs_pre_backward_unshard = False
    _prefetched = False


class Interruptible(PostBackward, Driven):
    """The state that the runtime sets, and the way back from one that it was left in."""

    _state = _IDLE
    _is_of_backward = False  # whether `_state` was set while autograd ran
    _steps_seen = 0  # by optimizers, when the last forward began
    _ranks_with_trainable: tuple[tuple[bool, ...], int] = ((), 0)  # for which parameters require gradients
    # The sum of the parameters' versions and the modes when a forward left the parameters gathered
    _left_gathered: tuple[int | None, tuple[bool, bool]] | None = None
    _left_values: tuple[torch.Tensor, int] | None = None  # some of the shard then, and how many forwards used it since

    @property
    def _training_state(self) -> HandleTrainingState:
        """The state that was set last; IDLE if that was in a backward that has ended, by an exception then."""
        if self._is_of_backward and task_of_autograd() == -1:
            return _IDLE
        return self._state

    @_training_state.setter
    def _training_state(self: Any, state: HandleTrainingState) -> None:
        in_backward = task_of_autograd() != -1
        # A forward begins, of torch's runtime (else the user sets the state as suits him), not one that activation
        # checkpointing runs again
        if state is _FORWARD and not in_backward and self._handle_index is not None:
            if in_transform():
                self._refuse_to_be_differentiated()
            interrupted = self._state not in _AT_REST or (self._prefetched and self._is_of_backward)
            if interrupted or self._is_out_of_date():
                self._recover()
            elif self._left_gathered is not None and not self._left_gathered[1][0]:
                self._follow_evaluation()
            self._steps_seen = self._steps_taken()
        elif state is _SUMMONED and self._handle_index is not None:
            if self._is_out_of_date() or (self._left_gathered is not None and not self._left_gathered[1][0]):
                self._free_gathered()  # else it would be shown, and saved
        elif state is _BACKWARD_PRE and in_backward and not self._needs_pre_backward_unshard:
            self._begin_later_backward()
        elif state is _IDLE and self._put_aside and not getattr(self, "_ran_pre_backward_hook", True):
            self._give_back_unused_grad()  # the runtime has reset that flag: it is the end of a backward
        self._is_of_backward = in_backward
        self._state = state

    def _refuse_to_be_differentiated(self: Any) -> None:
        """torch's runtime hangs its hooks on tensors of the transform, which are gone when it comes to their backward.

        Raises: RuntimeError. Under ``vmap`` alone a forward is right.
        """
        if any(transform.key() in _DIFFERENTIATING for transform in torch._C._functorch.get_interpreter_stack()):
            raise RuntimeError(
                f"torch.func.grad, vjp, jvp, jacrev, jacfwd and hessian do not work through torch's "
                f"FullyShardedDataParallel, which does without hooks in them: {self._names()} would be freed when its "
                "backward comes. Use torch.autograd.grad, torch.autograd.functional or flatparam's own "
                "FullyShardedDataParallel, or differentiate inside summon_full_params()"
            )

    def _is_out_of_date(self: Any) -> bool:
        """Whether something is still gathered that an optimizer or the user has changed since."""
        if not self.uses_sharded_strategy:
            return False
        tensors = (getattr(self.flat_param, name, None) for name in _GATHERED)
        if not any(tensor is not None and is_allocated(tensor) for tensor in tensors):
            return False
        return bool(self._steps_seen != self._steps_taken() or self._was_written())

    def _was_written(self: Any) -> bool:
        """Whether the user may have written parameters in place since a forward has left them gathered.

        All ranks must answer alike. Where each of them has a trainable parameter in its shard, all can see the write
        that an optimizer makes outside of its step: versions of tensors count it. Else a change between training and
        evaluation counts for one.
        """
        if self._left_gathered is None or self._is_replaced("_use_sharded_views"):
            return False  # a user's own way to show the shard may write it
        versions, modes = self._left_gathered
        now = self._sum_of_versions()
        if now is None or versions is None or not self._every_rank_has_trainable():
            return bool(modes != self._modes())
        return bool(versions != now)

    def _follow_evaluation(self: Any) -> None:
        """A forward follows one without gradients, which has left parameters gathered.

        Programs exchange weights around an evaluation by ``.data`` (averages of weights), which no version counts. So a
        change of modes, which all ranks see, has them gathered anew. Within one mode ranks could not agree on it, and
        a warning says so, of some of the values, looked at ever more seldom.
        """
        if self._left_gathered[1] != self._modes():
            self._left_gathered = None  # done: the runtime sets the state again, after it has prefetched
            if self._prefetched:
                self._recover()  # else it would not gather once more
            elif self.uses_sharded_strategy:
                self._free_gathered()
        elif self._left_values is not None and is_allocated(self.flat_param._full_param_padded):
            before, uses = self._left_values
            self._left_values = before, uses + 1
            if uses & (uses - 1) == 0 and not _same_values(before, _some_of(self.flat_param._local_shard)):
                _warn_of_old_values(self._names())

    def _note_left_values(self: Any) -> None:
        """After a forward without gradients: what is gathered has the values of now, if that was for this forward."""
        if self._left_values is None and self.uses_sharded_strategy:
            self._left_values = _some_of(self.flat_param._local_shard).clone(), 1

    def _sum_of_versions(self: Any) -> int | None:
        found = _C.versions(self.flat_param._params if self._use_orig_params else (self.flat_param,))
        return None if found is None else found[0]

    def _modes(self: Any) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), self._fully_sharded_module.training

    def _every_rank_has_trainable(self: Any) -> bool:
        flat_param = self.flat_param
        if not self._use_orig_params:
            return True
        if self._padded_to is None:
            return False
        trainable = tuple(map(attrgetter("requires_grad"), flat_param._params))
        if trainable != self._ranks_with_trainable[0]:
            per_rank, layout = flat_param._sharded_size.numel(), self._layout
            spans = compress(zip(layout.offsets, layout.numels, strict=True), trainable)
            ranks = {
                rank
                for start, numel in spans
                for rank in range(start // per_rank, (start + numel - 1) // per_rank + 1)
                if numel > 0
            }
            self._ranks_with_trainable = (trainable, len(ranks))
        return bool(self._ranks_with_trainable[1] == self.world_size)

    def _free_gathered(self: Any, *others: str) -> None:
        for name in (*_GATHERED, *others):
            tensor = getattr(self.flat_param, name, None)
            if tensor is not None:
                self._free(tensor)

    @torch.no_grad()
    def _leave_memory(self: Any, *tensors: torch.Tensor) -> None:
        """Let ``tensors`` go on to exist for a gather that was given up (Ctrl-C): it still reads and writes them.

        Where one of them is this handle's to free and to allocate, there is another instead from now on.
        """
        for name in (*_GATHERED, "_mp_shard"):
            ours = getattr(self.flat_param, name, None)
            if ours is not None and is_allocated(ours) and any(same_storage(ours, tensor) for tensor in tensors):
                fresh = torch.empty_like(ours)
                self._free(fresh)
                setattr(self.flat_param, name, fresh)

    @torch.no_grad()
    def _recover(self: Any) -> None:
        """Shard the flat parameter, whatever of it is unsharded, and point modules and parameters to it.

        What the user has put in place of parameters meanwhile is kept. Gradients of earlier backwards are too, if they
        are still those of the original parameters; else only an interrupted backward can have left some, which go.
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
        self._state = _FORWARD  # stays so if this is interrupted too
        self._is_of_backward = False
        self._use_sharded_flat_param()
        self._free_gathered("_mp_shard")
        if self._use_orig_params:
            flat_param._tensors[:] = [None] * len(flat_param._tensors)
        self._prefetched = self._needs_pre_backward_unshard = self._ran_pre_backward_hook = self._put_aside = False
        self._post_forward_index = None
        self._state = _IDLE

    def _write_back_replaced(self: Any) -> None:
        """Copy into the shard what the user has put in place of original parameters; views made by us are no such."""
        flat_param = self.flat_param
        if not self._use_orig_params or self._skip_writeback_check:
            return
        for i, (info, piece) in enumerate(zip(flat_param._param_infos, flat_param._shard_param_infos, strict=True)):
            current = getattr(info.module, info.param_name, None)
            if current is not None and current is flat_param._tensors[i]:
                current = flat_param._params[i]  # the view of a forward that an exception has ended stands in its place
            if not isinstance(current, nn.Parameter) or not piece.in_shard:
                continue
            moved = self._state is not _SUMMONED and not same_storage(current, flat_param)
            if current is not flat_param._params[i] or moved:
                self._writeback_one(i, flat_param)

    def _leave_summon(self: Any) -> None:
        """Where ``summon_full_params`` raises, go back to IDLE: the runtime would take it for unsharded for good."""
        if self._state is _SUMMONED:
            try:
                self._recover()
            finally:
                self._state = _IDLE


_LOOKED_AT = 256  # elements of a shard


def _some_of(shard: torch.Tensor) -> torch.Tensor:
    return shard.detach()[:: max(1, shard.numel() // _LOOKED_AT)]


def _same_values(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Bit for bit; also where they cannot be compared."""
    if (before.shape, before.dtype, before.device) != (now.shape, now.dtype, now.device):
        return True
    return torch.equal(before.view(torch.uint8), now.contiguous().view(torch.uint8))


_told_of_old_values: list[str] = []  # in which unit first: the others of a model are no news


def _warn_of_old_values(names: str) -> None:
    if not _told_of_old_values:
        _told_of_old_values.append(names)
        warnings.warn(
            f"parameters in {names} were written by `.data` between two evaluations, which nothing counts: with "
            "torch's FullyShardedDataParallel the second one computes with what the first one has gathered. Call "
            "`handle.reshard(True)` for all handles of model._all_handles after writing, on every rank, or use "
            "flatparam.install(runtime=True), which gathers in every forward",
            stacklevel=2,
        )
