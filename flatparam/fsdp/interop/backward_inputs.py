"""Replace autograd's engine call: ``backward(inputs=...)`` with parameters of units, and backwards that fail.

A graph leads to the views of the flat buffer, not to the parameters. So autograd would find no path from the loss to a
parameter, and give no gradient, in silence. The replaced engine call adds the gradient edges of the views.

It also tells the other ranks of an exception that ends a backward here, while this process goes on. Users' hooks and
autograd functions run between the callbacks of units, so no callback sees their exceptions. The other ranks may be
waiting for this rank in a gather or a reduction. No collective call. For exceptions in forwards see
``wrapper/forward.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ... import _C
from ..desync.checked_collectives import come_back, tell_trouble, troubled
from ..unit.registry import Owner, all_units, flat_param_of, owner_of_param, owners_of, units_live


@units_live.replace(  # torch.compiler replaces both, and restores both from graph
    "torch.autograd.graph:_engine_run_backward",
    "torch.autograd:_engine_run_backward",
    test="tests/fsdp/interop/test_fsdp_backward_inputs.py",
)
def _running(run: Any) -> Any:
    """Let ``backward(inputs=[...])`` train these parameters alone, and ``autograd.grad`` refuse parameters of units.

    ``grad`` raises RuntimeError for a parameter of a unit that the loss depends on: its gradient is reduced into
    ``.grad`` and cannot be returned.
    """

    def running(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if troubled:
            _go_on(outputs)
        try:
            return with_inputs(outputs, *args, **kwargs)
        except Exception as error:
            _tell(outputs, error)
            raise

    def with_inputs(
        outputs: Any, grads: Any, keep: Any, create: Any, inputs: Any = (), *args: Any, **kwargs: Any
    ) -> Any:
        params = [param for param in map(_leaf_of, inputs) if param is not None and owner_of_param(param) is not None]
        if not params:
            return run(outputs, grads, keep, create, inputs, *args, **kwargs)
        edges = _edges(params)
        both = (*inputs, *(edge for _, edge in edges))
        if kwargs.get("accumulate_grad"):
            with _no_others(params):
                return run(outputs, grads, keep, create, both, *args, **kwargs)
        [allow_unused] = args
        found = run(outputs, grads, keep, create, both, True, **kwargs)
        asked, in_units = found[: len(inputs)], found[len(inputs) :]
        for (param, _), grad in zip(edges, in_units, strict=True):
            if grad is not None:
                raise RuntimeError(_refusal(param))
        unused = [i for i, grad in enumerate(asked) if grad is None]
        if unused and not allow_unused:
            raise RuntimeError(
                f"The differentiated Tensor at index {unused[0]} appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior."
            )
        return asked

    return running


def _leaf_of(each: Any) -> Tensor | None:
    """The leaf tensor of an item of ``inputs``, a tensor or a GradientEdge; None: the edge of no leaf."""
    return each if isinstance(each, Tensor) else getattr(getattr(each, "node", None), "variable", None)


def _edges(params: Sequence[Tensor]) -> list[tuple[Tensor, GradientEdge]]:
    """The gradient edges of the views of ``params``, each with its parameter. A view without a history has none."""
    given = {id(param) for param in params}
    found: list[tuple[Tensor, GradientEdge]] = []
    for unit in owners_of(params):
        for flat_param, views in zip(unit.flat_params, unit.core.views(), strict=True):
            for original, view in zip(flat_param.originals, views or (), strict=views is not None):
                param = flat_param.flat if id(flat_param.flat) in given else original.param
                if id(param) in given and view.grad_fn is not None:
                    found.append((param, GradientEdge(view.grad_fn, view.output_nr)))
    return found


def _no_others(params: Sequence[Tensor]) -> _C.Block:
    """A block in which all other parameters of the same flat parameters are frozen.

    A unit reduces the gradients of a flat parameter together, so the others would get gradients too.
    """
    given = {id(param) for param in params}
    others = [
        original.param
        for flat_param in dict.fromkeys(filter(None, map(flat_param_of, params)))
        for original in flat_param.originals
        if original.param.requires_grad and not given & {id(flat_param.flat), id(original.param)}
    ]
    return _C.Block(functools.partial(_require_grad, others, False), functools.partial(_require_grad, others, True))


def _require_grad(params: Sequence[Tensor], requires: bool) -> None:
    for param in params:
        param.requires_grad_(requires)


def _refusal(param: Tensor) -> str:
    owner = owner_of_param(param)
    assert owner is not None
    return (
        f"torch.autograd.grad() was asked for the gradient of `{owner.name}` of {owner.unit.name}, which is reduced "
        "over ranks into the parameter's .grad and given nowhere else: call backward(inputs=[...]) with these "
        "parameters"
    )


# Backwards that fail

_RECOMPUTES = "CheckpointFunctionBackward"  # the node of a reentrant checkpoint: its graph is not recorded yet


def _tell(outputs: Sequence[Any], error: Exception) -> None:
    """Tell the ranks that share models in the backward of ``outputs`` that ``error`` has ended it here.

    They raise it if they have waited for a while, and this rank has begun no other forward or backward of the model.
    Not from a backward inside another one, or inside a forward: code around it may catch the exception.
    """
    if torch._C._current_graph_task_id() >= 0:
        return
    for root, units in _models().items():
        # INTERRUPTED: a callback of a unit has run in it; IDLE: the exception came before the first one
        is_before = root.state == "IDLE" and _leads_to(outputs, units)
        if is_before or root.state == "INTERRUPTED":
            tell_trouble([flat_param for unit in units for flat_param in unit.flat_params], error)


def _go_on(outputs: Sequence[Any]) -> None:
    """Withdraw earlier reports if the backward of ``outputs``, which begins now, is one of a model."""
    if torch._C._current_graph_task_id() < 0 and any(_leads_to(outputs, units) for units in _models().values()):
        come_back()


def _models() -> dict[_C.Root, list[Owner]]:
    found: dict[_C.Root, list[Owner]] = {}
    for unit in all_units():
        if unit.core.root is not None:
            found.setdefault(unit.core.root, []).append(unit)
    return found


def _leads_to(outputs: Sequence[Any], units: list[Owner]) -> bool:
    """Whether the graph of ``outputs`` has the node behind the views of one of ``units``."""
    views = (view for unit in units for of_flat_param in unit.core.views() for view in of_flat_param or ())
    behind = {view.grad_fn for view in views if view.grad_fn is not None}
    return any(node in behind or node.name() == _RECOMPUTES for node in _nodes(outputs))


def _nodes(outputs: Sequence[Any]) -> Iterator[Any]:
    """The nodes of the graph of ``outputs``, tensors or gradient edges."""
    todo = [output.grad_fn if isinstance(output, Tensor) else output.node for output in outputs]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node is None:
            continue
        yield node
        further = {following for following, _ in node.next_functions} - seen
        seen |= further
        todo += further
