"""Keep the post-backward hook, with which torch's runtime reduces a unit's gradient, on the right node.

The runtime puts its hook on the node that accumulates the flat gradient, in the first forward after a backward, and
removes it when the next backward ends. A second backward (through a kept graph, or of another forward) would find no
hook and no gathered parameters: its gradient would not be reduced. This runs in the thread of forward or autograd.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .. import _C
from .base import Handle

task_of_autograd = torch._C._current_graph_task_id  # -1 outside of backward


def note_accumulator(handle: Handle) -> None:
    """Remember the node under the current views. Forwards may have different nodes.

    In mixed precision, and with parameters on the host, each forward has its own node.
    """
    handle._accumulators = _C.note_accumulator(handle._accumulators, handle.flat_param)


def begin_later_backward(handle: Handle) -> None:
    """Make the runtime gather in a second or later backward after a forward, as in the first one.

    Raises: RuntimeError if the weights have changed since the last forward.
    """
    if handle._steps_seen != handle.steps[0]:
        raise RuntimeError(
            f"a second backward came to {handle._names()} after an optimizer has stepped: the weights of its forward "
            "are gone. Call optimizer.step() after all backwards of a forward, or run the forward again"
        )
    handle._needs_pre_backward_unshard = True


def hook_this_backward(handle: Handle) -> None:
    """Move the runtime's hook to the node of the first forward in this backward: that node runs last.

    Without this no gradient would be reduced: the runtime leaves the hook at a forward without a backward, and has
    removed it before a second backward. A backward that does not reach the parameters keeps the hook for the next
    backward of the same forward (gradient penalties): its gradients would not be reduced, nor be shown with
    ``use_orig_params``.
    """
    handle._kept_hook = None
    flat_param = handle.flat_param
    state: Any = getattr(flat_param, "_post_backward_hook_state", (None, None))
    if task_of_autograd() == -1 or len(state) != 2 or not flat_param.requires_grad:
        return  # a frozen unit has the hook on its inputs
    hooked, hook_handle = state
    nodes = _C.accumulators(handle._accumulators)
    if hooked is not None and hooked not in nodes:
        nodes.append(hooked)
    of_this = [node for node in nodes if torch._C._will_engine_execute_node(node)]
    if of_this and of_this[0] is hooked:
        return
    hook = handle._runtimes_hook if hooked is None else hook_handle.hooks_dict_ref()[hook_handle.id]
    if hook is None or not nodes:
        return
    if of_this or hooked is None:
        if hooked is not None:
            hook_handle.remove()
        node = (of_this or nodes[-1:])[0]
        flat_param._post_backward_hook_state = (node, node.register_hook(hook))
    if not of_this:
        late = hook if isinstance(hook, _LateHook) else _LateHook(handle, hook)
        handle._kept_hook = (flat_param._post_backward_hook_state[0], late, _version_of_unsharded_grad(handle))
        if not is_reduced_next(handle):  # in no_sync() the runtime ends a backward without the handle
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(hook_next_backward, handle))


def is_reduced_next(handle: Handle) -> bool:
    """Whether the runtime reduces the gradient of this backward: False in no_sync(). True if it has no hook."""
    return all(wrapper._sync_gradients for wrapper in _wrappers_in_hook(handle))


def is_reduced_by_default(handle: Handle) -> bool:
    """Whether the runtime's hook reduces this backward's gradient by torch's collectives, not by a user's function."""
    wrappers = _wrappers_in_hook(handle) if handle.flat_param.requires_grad else []
    return bool(wrappers) and all(wrapper._sync_gradients and wrapper._comm_hook is None for wrapper in wrappers)


def _wrappers_in_hook(handle: Handle) -> list[Any]:
    """Return the wrapper to which the runtime's post-backward hook refers; empty: there is no hook."""
    state: Any = getattr(handle.flat_param, "_post_backward_hook_state", (None, None))
    hook: Any = state[-1]
    hook = hook.hooks_dict_ref().get(hook.id) if hasattr(hook, "hooks_dict_ref") else None
    hook = hook._hook if isinstance(hook, _LateHook) else hook
    found = [arg() if isinstance(arg, weakref.ref) else arg for arg in getattr(hook, "args", ())]
    return [wrapper for wrapper in found if hasattr(wrapper, "_sync_gradients")]


def _version_of_unsharded_grad(handle: Handle) -> int | None:
    grad = handle.flat_param.grad
    is_unsharded = grad is not None and grad.size() == handle.flat_param._unpadded_unsharded_size
    return grad._version if is_unsharded else None


def hook_next_backward(handle: Handle) -> None:
    kept, handle._kept_hook = handle._kept_hook, None
    if kept is None:
        return
    accumulator, hook, version = kept
    if handle.flat_param._post_backward_called:
        return  # it was reduced in a nested backward (reentrant checkpointing)
    if version != _version_of_unsharded_grad(handle):
        raise RuntimeError(
            f"a gradient of {handle._names()} came in a reentrant checkpoint that has the weights of another "
            "forward, and would not be reduced over the ranks: use checkpoint(..., use_reentrant=False)"
        )
    if not hasattr(handle.flat_param, "_post_backward_hook_state"):
        handle.flat_param._post_backward_hook_state = (accumulator, accumulator.register_hook(hook))
    if handle._use_orig_params and not handle.uses_sharded_strategy:
        handle._use_sharded_views()  # else the modules would have no parameters


def let_model_go_without_backward(handle: Handle) -> None:
    """Replace the references of the runtime's hook to the model with weak ones.

    The flat parameter keeps forward's views, these keep the node, and the node keeps the hook: a strong reference
    would keep a model that is deleted after a forward without a backward, forever (pytorch PR 183211).
    """
    state = getattr(handle.flat_param, "_post_backward_hook_state", None)
    hook_handle: Any = state[-1] if isinstance(state, tuple) and state else None
    hooks_of = getattr(hook_handle, "hooks_dict_ref", None)
    if hooks_of is None:
        return  # a frozen unit has its hooks on its inputs, which nothing keeps
    hooks: Any = hooks_of()
    hook = hooks.get(hook_handle.id) if hooks else None
    if isinstance(hook, functools.partial) and hook.func is not _call_if_alive:
        hook = functools.partial(_call_if_alive, hook.func, *map(weakref.ref, hook.args))
        handle._runtimes_hook = hooks[hook_handle.id] = hook


class _LateHook:
    """The runtime's hook for a later backward, after a backward that did not reach the parameters."""

    def __init__(self, handle: Handle, hook: Callable[..., Any]) -> None:
        self._handle, self._hook = weakref.ref(handle), hook

    def __call__(self, *arguments: Any) -> Any:
        """Call the hook; in no_sync() show the gradient, which a later backward reduces.

        Raises: RuntimeError if this backward has no gradient of the unit's output: no reduction.
        """
        handle = self._handle()
        if handle is None:
            return None
        if getattr(handle, "_ran_pre_backward_hook", False):
            return self._hook(*arguments)
        if not is_reduced_next(handle):
            if handle._use_orig_params:
                handle._use_unsharded_grad_views()
            return None
        if handle.world_size > 1:
            raise RuntimeError(
                f"a later backward of one forward has a gradient of {handle._names(20)} that would not be reduced over "
                f"the {handle.world_size} ranks, because the output of that "
                f"{type(handle._fully_sharded_module).__name__} has none in it: add (0 * output).sum() to the loss"
            )
        return None


def _call_if_alive(hook: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``hook`` with the objects of weak references in ``arguments``; do nothing if one of them is gone."""
    strong = [argument() if isinstance(argument, weakref.ref) else argument for argument in arguments]
    if not any(argument is None and given is not None for argument, given in zip(strong, arguments, strict=True)):
        return hook(*strong)
    return None
