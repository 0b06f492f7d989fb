"""Tell the other ranks of an exception that ends a backward on this rank, while its process goes on.

Users' hooks and autograd functions run between the callbacks of units, so no callback sees their exceptions. The other
ranks may be waiting for this rank in a gather or a reduction. ``backward_inputs.py`` calls this around autograd's
engine; no collective call. For exceptions in forwards see ``wrapper/forward.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _C
from ..desync.checked_collectives import come_back, tell_trouble
from ..unit.registry import Owner, all_units

_RECOMPUTES = "CheckpointFunctionBackward"  # the node of a reentrant checkpoint: its graph is not recorded yet


def tell(outputs: Sequence[Any], error: Exception) -> None:
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


def go_on(outputs: Sequence[Any]) -> None:
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
