"""Getting rid of what an exception in the middle of a step left behind, when the next step begins.

torch's runtime sets the handle's state before each part of a step and sets it back at the end of the part. An
exception (in the model's forward, a hook, a collective; KeyboardInterrupt) skips the end, and torch's next forward then
takes what was left for its own: it computes with weights of earlier steps, or loses gradients. The former also happens
without an exception, if an optimizer steps between a forward and its backward, or after a forward that has none, or if
the user writes the parameters there.
"""

import weakref
from collections.abc import Callable
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
import torch.nn as nn

from .. import _C
from ..common import optimizers
from ..common.tensors import is_allocated, same_storage
from ..common.torch_private import HandleTrainingState

_task_of_autograd = torch._C._current_graph_task_id  # -1 outside of backward
_FORWARD, _IDLE = HandleTrainingState.FORWARD, HandleTrainingState.IDLE  # looked up once: the state is set often
_SUMMONED = HandleTrainingState.SUMMON_FULL_PARAMS
_AT_REST = (_IDLE, _SUMMONED)
_BACKWARD_PRE = HandleTrainingState.BACKWARD_PRE
_IN_BACKWARD = (_BACKWARD_PRE, HandleTrainingState.BACKWARD_POST)

_GATHERED = ("_full_param_padded", "_full_prec_full_param_padded")
_MOST_FORWARDS = 64  # remembered until a backward comes
_MOST_BACKWARDS = 4  # whose forwards are remembered for further backwards
_transform_in_force = torch._C._functorch.peek_interpreter_stack  # of torch.func: the innermost one, or None
_DIFFERENTIATING = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


class Driven:
    """What the runtime keeps on a handle: places in its orders of handles, and what prefetching did."""

    _handle_index: int | None = None
    _pre_forward_order_index: int | None = None
    _post_forward_index: int | None = None
    _needs_pre_forward_unshard = False
    _needs_pre_backward_unshard = False
    _prefetched = False


class Interruptible(Driven):
    """The state that the runtime sets, and the way back from one that it was left in."""

    _state = _IDLE
    # Nodes that accumulate the flat gradient, in the order of their forwards (in mixed precision each has its own), and
    # whether a backward has come to them
    _accumulators: dict[Any, bool] | None = None
    _runtimes_hook: Callable[..., Any] | None = None  # after backward, as the last forward has left it
    _is_of_backward = False  # whether `_state` was set while autograd ran
    _kept_hook: tuple[Any, Callable[..., Any]] | None = None  # in a backward that does not come to the parameters
    _steps_seen = 0  # by optimizers, when the last forward began
    _ranks_with_trainable: tuple[tuple[bool, ...], int] = ((), 0)  # for which parameters require gradients
    # The sum of the parameters' versions and the modes when a forward left the parameters gathered
    _left_gathered: tuple[int | None, tuple[bool, bool]] | None = None

    @property
    def _training_state(self) -> HandleTrainingState:
        """The state that was set last; IDLE if that was in a backward that has ended, by an exception then."""
        if self._is_of_backward and _task_of_autograd() == -1:
            return _IDLE
        return self._state

    @_training_state.setter
    def _training_state(self: Any, state: HandleTrainingState) -> None:
        in_backward = _task_of_autograd() != -1
        # A forward begins, of torch's runtime (else the user sets the state as suits him), not one that activation
        # checkpointing runs again
        if state is _FORWARD and not in_backward and self._handle_index is not None:
            if _transform_in_force() is not None:
                self._refuse_to_be_differentiated()
            interrupted = self._state not in _AT_REST or (self._prefetched and self._is_of_backward)
            if interrupted or self._is_out_of_date():
                self._recover()
            self._steps_seen = optimizers.taken
        elif state is _SUMMONED and self._handle_index is not None and self._is_out_of_date():
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
        return bool(self._steps_seen != optimizers.taken or self._was_written())

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

    # The runtime's post-backward hook

    def _note_accumulator(self: Any) -> None:
        """Remember the node that will accumulate this forward's gradient, unless the runtime puts its hook on it.

        In mixed precision each forward has a node of its own, and the runtime puts its hook on the first one's, which
        runs last if all of the forwards are in one backward.
        """
        flat_param = self.flat_param
        state: Any = getattr(flat_param, "_post_backward_hook_state", ())
        if len(state) == 2 and flat_param.requires_grad and torch.is_grad_enabled():
            nodes = self._known_accumulators()
            for node in (state[0], _accumulator_of(flat_param)):
                nodes.setdefault(node, False)
            if len(nodes) > _MOST_FORWARDS:
                del nodes[next(iter(nodes))]

    def _known_accumulators(self) -> dict[Any, bool]:
        if self._accumulators is None:
            self._accumulators = {}
        return self._accumulators

    def _hook_this_backward(self: Any) -> None:
        """Move the runtime's hook to the first forward that this backward is of.

        torch leaves it at a forward that no backward followed: no gradient is reduced any more. If this backward is for
        other gradients than the parameters', the hook is remembered. The runtime takes it away when the backward ends:
        gradients that come in a later one of the same forward (gradient penalties) would not be reduced, and with
        ``use_orig_params`` not be shown.
        """
        self._kept_hook = None
        state: Any = getattr(self.flat_param, "_post_backward_hook_state", ())
        if len(state) != 2 or _task_of_autograd() == -1:
            return
        accumulator, hook_handle = state
        nodes = self._known_accumulators()
        nodes.setdefault(accumulator, False)
        of_this = [node for node in nodes if torch._C._will_engine_execute_node(node)]
        if of_this and of_this[0] is accumulator and len(nodes) == 1:
            nodes[accumulator] = True
            return
        hook = hook_handle.hooks_dict_ref()[hook_handle.id]
        if not of_this:
            self._kept_hook = (accumulator, hook if isinstance(hook, _LateHook) else _LateHook(self, hook))
            return
        if of_this[0] is not accumulator:
            hook_handle.remove()
            self.flat_param._post_backward_hook_state = (of_this[0], of_this[0].register_hook(hook))
        nodes.update(dict.fromkeys(of_this, True))
        for node in [node for node, was_run in nodes.items() if was_run][:-_MOST_BACKWARDS]:
            del nodes[node]

    def _begin_later_backward(self: Any) -> None:
        """Let the runtime gather and reduce in a backward that is not the first one since a forward, as in that.

        Its graph was kept, or is of an earlier forward. torch's runtime frees the unit, and takes its hook away, when
        the first backward ends: in another one it would neither gather nor reduce.

        Raises: RuntimeError if the weights have changed since the forward.
        """
        flat_param = self.flat_param
        self._needs_pre_backward_unshard = True
        hooked = hasattr(flat_param, "_post_backward_hook_state")
        if hooked or not flat_param.requires_grad or self._runtimes_hook is None:
            return
        if self._steps_seen != optimizers.taken:
            raise RuntimeError(
                f"a second backward came to {self._names()} after an optimizer has stepped: the weights of its forward "
                "are gone. Call optimizer.step() after all backwards of a forward, or run the forward again"
            )
        nodes = self._known_accumulators()
        node = next(filter(torch._C._will_engine_execute_node, nodes), None) or _accumulator_of(flat_param)
        flat_param._post_backward_hook_state = (node, node.register_hook(self._runtimes_hook))

    def _hook_next_backward(self: Any) -> None:
        (accumulator, hook), self._kept_hook = self._kept_hook, None
        if self.flat_param._post_backward_called:
            return  # in a backward inside of this one, as reentrant checkpointing makes
        if not hasattr(self.flat_param, "_post_backward_hook_state"):
            self.flat_param._post_backward_hook_state = (accumulator, accumulator.register_hook(hook))
        if self._use_orig_params and not self.uses_sharded_strategy:
            self._use_sharded_views()  # else the modules would go on without parameters

    def _leave_summon(self: Any) -> None:
        """Where ``summon_full_params`` raises, go back to IDLE: the runtime would take it for unsharded for good."""
        if self._state is _SUMMONED:
            try:
                self._recover()
            finally:
                self._state = _IDLE


@torch.enable_grad()
def _accumulator_of(flat_param: Any) -> Any:
    return flat_param.expand_as(flat_param).grad_fn.next_functions[0][0]


class _LateHook:
    """The runtime's post-backward hook of a unit, after a backward that has passed by."""

    def __init__(self, handle: Any, hook: Callable[..., Any]) -> None:
        self._handle, self._hook = weakref.ref(handle), hook

    def __call__(self, *arguments: Any) -> Any:
        """Raises: RuntimeError if the unit's output has no part in this backward: the runtime would not reduce."""
        handle = self._handle()
        if handle is None:
            return None
        if getattr(handle, "_ran_pre_backward_hook", False):
            return self._hook(*arguments)
        if handle.world_size > 1:
            raise RuntimeError(
                f"a later backward of one forward has a gradient of {handle._names(20)} that would not be reduced over "
                f"the {handle.world_size} ranks, because the output of that "
                f"{type(handle._fully_sharded_module).__name__} has none in it: add (0 * output).sum() to the loss"
            )
        return None
