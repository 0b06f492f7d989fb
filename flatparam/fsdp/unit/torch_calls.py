"""Replace three functions of torch, so that a unit knows about calls around its forward.

Owns, for each thread, the stack of forwards and checkpoints that run.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn

from ... import _C
from .registry import all_units, units_live


class _UnderWay(threading.local):
    """The forwards of units and the checkpoints that run in this thread, the innermost last.

    Items are ("unit", whether it records gradients) and ("checkpoint", whether backward recomputes it).
    """

    def __init__(self) -> None:
        self.stack: list[tuple[str, bool]] = []


_here = _UnderWay()


def enter_forward(records: bool) -> list[tuple[str, bool]]:
    """Note that a forward of a unit begins. Return the stack; the caller pops its last item when the forward ends.

    ``records``: whether the forward records gradients.
    """
    stack = _here.stack
    stack.append(("unit", records))
    return stack


def leave_forwards() -> None:
    """Forget all forwards and checkpoints of this thread, whose ends were lost."""
    _here.stack.clear()


def is_never_recomputed(by_default: bool) -> bool:
    """Whether this thread runs in a checkpoint that backward will not recompute, although a backward is expected.

    A backward is expected if the unit around the checkpoint records gradients; without such a unit, ``by_default``.
    """
    found = False
    for kind, answer in reversed(_here.stack):
        if kind == "unit":
            return found and answer
        if answer:
            return False
        found = True
    return found and by_default


@units_live.around(
    "torch.utils.checkpoint:CheckpointFunction.forward", test="tests/fsdp/unit/test_fsdp_frozen_inputs.py"
)
def _noted(forward: Any, ctx: Any, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
    """Note reentrant checkpoints. Backward recomputes one only if an input requires grad; else its units would not be
    trained, in silence.
    """
    stack = _here.stack
    stack.append(("checkpoint", any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)))
    try:
        return forward(ctx, run_function, preserve_rng_state, *args)
    finally:
        stack.pop()


# An attribute of a module while functional_call has exchanged some of its tensors. It maps each name to (the tensor
# from before, the view of the unit's forward that stood in its place or None).
_EXCHANGED = "_exchanged_by_functional_call"


def is_exchanged(module: nn.Module, name: str) -> bool:
    """Whether ``functional_call`` has exchanged the tensor ``name`` of ``module``."""
    return name in vars(module).get(_EXCHANGED, ())


@units_live.replace("torch.nn.utils._named_member_accessor:swap_tensor", test="tests/fsdp/unit/test_fsdp_training.py")
def _swapping(swap: Any) -> Any:
    """Note the tensors that ``torch.func.functional_call`` puts in the place of parameters: they are not the shard's.

    Exchange views too: Python reads a view in ``__dict__`` before ``_parameters``.
    """

    def swapping(module: nn.Module, name: str, tensor: Tensor, allow_missing: bool = False) -> Tensor:
        own = module.__dict__
        has_view = name in own and module._parameters.get(name) is not None
        before: Tensor = swap(module, name, tensor, allow_missing)
        exchanged = own.get(_EXCHANGED, {})
        if name in exchanged:
            if exchanged[name][0] is tensor:
                view = exchanged.pop(name)[1]
                if view is not None:
                    own[name] = view
                if not exchanged:
                    del own[_EXCHANGED]
        elif has_view or not torch.compiler.is_compiling():
            own[_EXCHANGED] = exchanged | {name: (before, own.pop(name) if has_view else None)}
        return before

    return seen_as(swapping, swap)


@units_live.around("torch:Tensor.requires_grad_", test="tests/fsdp/unit/test_fsdp_unfreezing.py")
def _freezing(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let ``requires_grad_()`` of a view, which stands in a parameter's place during a forward, act on the parameter.

    A view has a history, so torch refuses to freeze it. An instance attribute ``requires_grad_`` on the view would be
    saved and copied with it, so the method of the class is replaced.
    """
    owners = () if _C.is_leaf(self) else (unit.core.owner_of(self) for unit in all_units())
    return original(next((owner for owner in owners if owner is not None), self), *args, **kwargs)


def seen_as(ours: Any, function: Any) -> Any:
    """Let Dynamo trace ``ours`` as it traces torch's ``function``: it skips our files. Returns: ``ours``."""
    ours.__code__ = ours.__code__.replace(co_filename=function.__code__.co_filename)
    return ours
