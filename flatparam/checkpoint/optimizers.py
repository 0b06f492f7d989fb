"""An optimizer's state by the names of parameters: which tensors are like a parameter, and what of them is here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fsdp.originals import in_order
from .errors import CheckpointError
from .pieces import Held


class Named:
    """An optimizer whose parameters are those that ``held`` tells of.

    Raises: CheckpointError for a parameter that is not among them.
    """

    def __init__(self, optimizer: Any, held: Iterable[Held]):
        self.optimizer = optimizer
        self.held: dict[int, list[Held]] = {}
        for one in held:
            self.held.setdefault(id(one.owner), []).append(one)
        self.groups: list[tuple[dict[str, Any], list[Held]]] = []
        self.group_of: dict[int, dict[str, Any]] = {
            id(p): group for group in optimizer.param_groups for p in group["params"]
        }
        for i, group in enumerate(optimizer.param_groups):
            mine: list[Held] = []
            for j, param in enumerate(group["params"]):
                if id(param) not in self.held:
                    raise CheckpointError(
                        f"the optimizer's parameter {j} of group {i}, of shape {tuple(param.shape)}, is not in the "
                        "model: make the optimizer after wrapping, of the model's parameters()"
                    )
                mine += self.held[id(param)]
            self.groups.append(({key: value for key, value in group.items() if key != "params"}, mine))

    def params(self) -> Iterator[tuple[Tensor, list[Held]]]:
        """Each parameter that it steps, and what lies in it."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                yield param, self.held[id(param)]


class State(NamedTuple):
    """One value of a parameter's state. ``kind``: "box": ``value`` is the 1-D tensor of the elements here; "one": a
    tensor that has no element for each of the parameter; "value": no tensor."""

    held: Held
    key: str
    kind: str
    value: Any


def states_of(named: Named) -> Iterator[State]:
    """The state of each parameter that this rank has elements of.

    Raises: CheckpointError for a tensor of another shape than the piece here, of a parameter that is sharded.
    """
    for param, held in named.params():
        for key, value in named.optimizer.state.get(param, {}).items():
            for one in held:
                if one.numel:
                    yield State(one, key, *_kind(param, one, key, value))


def _kind(param: Tensor, held: Held, key: str, value: Any) -> tuple[str, Any]:
    if not isinstance(value, Tensor):
        return "value", value
    if value.shape == param.shape and (value.dim() > 0 or key != "step"):
        return "box", in_owners_order(value, param).narrow(0, held.offset, held.numel)
    if value.dim() > 0 and held.sharded:
        raise CheckpointError(
            f"the optimizer's `{key}` of `{held.name}` has shape {tuple(value.shape)}, on a rank that holds "
            f"{tuple(param.shape)} of it: it belongs to this piece alone, and fits no other number of ranks"
        )
    return "one", value


def in_owners_order(value: Tensor, owner: Tensor) -> Tensor:
    """The elements of ``value``, of ``owner``'s shape, 1-D, in the order of ``owner``'s memory; a view if it can be."""
    value = value.detach()
    if value.stride() == owner.stride() or (value.is_contiguous() and owner.is_contiguous()):
        return value.as_strided((value.numel(),), (1,))
    return in_order(value, tuple(owner.stride()))


def like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """A new state tensor of ``param``'s shape and strides, zero where no parameter is."""
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
