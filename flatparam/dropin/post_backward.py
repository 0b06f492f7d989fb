"""The hook with which torch's runtime reduces a unit's gradient: on which forward's node it is, and for how long.

The runtime puts its hook on the node that accumulates the flat gradient, in the first forward after a backward, and
takes it away when the next backward ends. Another backward, through a graph that was kept or of another forward, would
find nothing gathered, and not be reduced.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..common import optimizers

task_of_autograd = torch._C._current_graph_task_id  # -1 outside of backward

_MOST_FORWARDS = 64  # remembered until a backward comes
_MOST_BACKWARDS = 4  # whose forwards are remembered although their graph is not kept: another part of it may be left


class PostBackward:
    """The part of FlatParamHandle that keeps this hook in its place."""

    # Where each forward has its own: the nodes that accumulate the flat gradient, in the order of the forwards, and
    # whether a backward that does not keep its graph has come to them
    _accumulators: dict[Any, bool] | None = None
    _runtimes_hook: Callable[..., Any] | None = None  # as the last forward has left it
    _kept_hook: tuple[Any, Callable[..., Any]] | None = None  # in a backward that does not come to the parameters

    def _note_accumulator(self: Any) -> None:
        """Remember the node that will accumulate this forward's gradient, unless the runtime puts its hook on it.

        Where forwards have nodes of their own, the runtime puts its hook on the first one's, which runs last if all of
        the forwards are in one backward.
        """
        flat_param = self.flat_param
        if not self._forwards_have_nodes_of_their_own():
            return
        state: Any = getattr(flat_param, "_post_backward_hook_state", ())
        if len(state) == 2 and flat_param.requires_grad and torch.is_grad_enabled():
            nodes = self._known_accumulators()
            for node in (state[0], _accumulator_of(flat_param)):
                nodes.setdefault(node, False)
            if len(nodes) > _MOST_FORWARDS:
                del nodes[next(iter(nodes))]

    def _forwards_have_nodes_of_their_own(self: Any) -> bool:
        """Whether the flat parameter changes its dtype or device for a forward: autograd's node goes with that."""
        return bool(self._uses_param_mixed_precision or self._offload_params)

    def _known_accumulators(self) -> dict[Any, bool]:
        if self._accumulators is None:
            self._accumulators = {}
        return self._accumulators

    def _hook_this_backward(self: Any) -> None:
        """Move the runtime's hook to the first forward that this backward is of.

        torch leaves it at a forward that no backward followed: no gradient is reduced any more. A backward for other
        gradients than the parameters' keeps the hook for the next one: else gradients that come in that, of the same
        forward (gradient penalties), would not be reduced, and with ``use_orig_params`` not be shown.
        """
        self._kept_hook = None
        state: Any = getattr(self.flat_param, "_post_backward_hook_state", ())
        if len(state) != 2 or task_of_autograd() == -1:
            return
        accumulator, hook_handle = state
        nodes = self._known_accumulators() if self._forwards_have_nodes_of_their_own() else {}
        nodes.setdefault(accumulator, False)
        of_this = [node for node in nodes if torch._C._will_engine_execute_node(node)]
        if of_this != [accumulator]:
            hook = hook_handle.hooks_dict_ref()[hook_handle.id]
            if not of_this:
                self._kept_hook = (accumulator, hook if isinstance(hook, _LateHook) else _LateHook(self, hook))
            elif of_this[0] is not accumulator:
                hook_handle.remove()
                self.flat_param._post_backward_hook_state = (of_this[0], of_this[0].register_hook(hook))
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            nodes.update(dict.fromkeys(of_this, True))
            for node in [node for node, was_run in nodes.items() if was_run][:-_MOST_BACKWARDS]:
                del nodes[node]

    def _begin_later_backward(self: Any) -> None:
        """Let the runtime gather and reduce in a backward that is not the first one since a forward, as in that.

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
        nodes = filter(torch._C._will_engine_execute_node, self._known_accumulators())
        node = next(nodes, None) or _accumulator_of(flat_param)
        flat_param._post_backward_hook_state = (node, node.register_hook(self._runtimes_hook))

    def _hook_next_backward(self: Any) -> None:
        (accumulator, hook), self._kept_hook = self._kept_hook, None
        if self.flat_param._post_backward_called:
            return  # in a backward inside of this one, as reentrant checkpointing makes
        if not hasattr(self.flat_param, "_post_backward_hook_state"):
            self.flat_param._post_backward_hook_state = (accumulator, accumulator.register_hook(hook))
        if self._use_orig_params and not self.uses_sharded_strategy:
            self._use_sharded_views()  # else the modules would go on without parameters

    def _let_model_go_without_backward(self: Any) -> None:
        """Make the runtime's post-backward hook refer weakly to the model.

        It hangs on the node that accumulates the flat gradient, which forward's views keep, which the flat parameter
        keeps: a model deleted after a forward that no backward follows would stay for good (pytorch PR 183211).
        """
        state = getattr(self.flat_param, "_post_backward_hook_state", None)
        hook_handle: Any = state[-1] if isinstance(state, tuple) and state else None
        hooks_of = getattr(hook_handle, "hooks_dict_ref", None)
        if hooks_of is None:
            return  # of a frozen unit the hooks are on the inputs, which are not kept
        hooks: Any = hooks_of()
        hook = hooks.get(hook_handle.id) if hooks else None
        if isinstance(hook, functools.partial) and hook.func is not _call_if_alive:
            hook = functools.partial(_call_if_alive, hook.func, *map(weakref.ref, hook.args))
            self._runtimes_hook = hooks[hook_handle.id] = hook


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


def _call_if_alive(hook: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``hook``, of whose arguments the first ones are weak references; nothing once one of them is gone."""
    strong = [argument() if isinstance(argument, weakref.ref) else argument for argument in arguments]
    if not any(argument is None and given is not None for argument, given in zip(strong, arguments, strict=True)):
        return hook(*strong)
    return None
