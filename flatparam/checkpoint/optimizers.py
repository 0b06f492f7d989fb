"""Optimizers by the FQNs of their parameters: labels, groups, states, and the elements of states on this rank.

Saves and loads share this view. It reads optimizers; only ``set_state`` changes one. No collective calls.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.tensors import refuse_freed
from ..common.torch_private import is_traceable_wrapper_subclass
from ..fsdp.sharding.parameters import in_order
from ..fsdp.states.optimizer_classes import class_of
from ..fsdp.states.values import keys_of_one_shape, shapes_of
from ..fsdp.unit.local_params import LocalParam
from .errors import CheckpointError
from .pieces import InHandle


def labelled(given: Any) -> dict[str, Any]:
    """Map labels to optimizers. ``given``: one (label ""), a list (labels "0", "1", ...) or a dict.

    Raises: CheckpointError if two labels are the same text.
    """
    if isinstance(given, Mapping):
        found = {str(label): one for label, one in given.items()}
        if len(found) != len(given):
            raise CheckpointError(f"the optimizers' labels {list(given)} are not all different as text")
        return found
    return {str(i): one for i, one in enumerate(given)} if isinstance(given, list | tuple) else {"": given}


class Named:
    """Optimizers whose parameters are in ``held``.

    ``groups``: (settings, parameters) for each group of all optimizers, in order; ``labels``: of each group's
    optimizer; ``held``: id of a stepped tensor -> the parameters in it.
    Raises: CheckpointError for a parameter that is not in ``held``, or in two optimizers.
    """

    def __init__(self, given: Any, held: Iterable[LocalParam]):
        self.optimizers = optimizers = labelled(given)
        for label, one in optimizers.items():
            if not (hasattr(one, "param_groups") and hasattr(one, "state")):
                which = f"optimizer `{label}`" if isinstance(given, dict | list | tuple) else "optimizer="
                raise CheckpointError(f"expected {which} to be an optimizer, got a {type(one).__name__}")
        if not optimizers:
            raise CheckpointError("the list of optimizers is empty: pass None to save or load no optimizer")
        self.param_groups = [group for one in optimizers.values() for group in one.param_groups]
        self.labels = [label for label, one in optimizers.items() for _ in one.param_groups]
        self.classes = {label: class_of(one) for label, one in optimizers.items()}
        self.held: dict[int, list[LocalParam]] = {}
        for one in held:
            self.held.setdefault(id(one.owner), []).append(one)
        self.groups: list[tuple[dict[str, Any], list[LocalParam]]] = []
        self.group_of: dict[int, dict[str, Any]] = {}
        self._optimizer_of: dict[int, tuple[str, Any]] = {}
        for i, (label, group) in enumerate(zip(self.labels, self.param_groups, strict=True)):
            mine: list[LocalParam] = []
            for j, param in enumerate(group["params"]):
                if id(param) not in self.held:
                    raise CheckpointError(
                        f"the optimizer's parameter {j} of group {i}, of shape {tuple(param.shape)}, is not in the "
                        "model: make the optimizer after wrapping, of the model's parameters()"
                    )
                name = self.held[id(param)][0].name
                before, _ = self._optimizer_of.setdefault(id(param), (label, optimizers[label]))
                if before != label:
                    raise CheckpointError(
                        f"parameter `{name}` is in two optimizers, `{before}` and `{label}`: a checkpoint takes a "
                        "parameter in one optimizer only"
                    )
                self.group_of[id(param)] = group
                mine += self.held[id(param)]
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            self.groups.append((settings, mine))
        states = ((tuple(param.shape), shapes_of(self.state_of(param))) for param, _ in self.params())
        self.unlike = keys_of_one_shape(states)

    def params(self) -> Iterator[tuple[Tensor, list[LocalParam]]]:
        """Yield ``(stepped tensor, the parameters in it)``, each tensor once."""
        seen = set()
        for group in self.param_groups:
            for param in group["params"]:
                if id(param) not in seen:
                    seen.add(id(param))
                    yield param, self.held[id(param)]

    def others(self) -> Iterator[tuple[Tensor, list[LocalParam]]]:
        """Yield the same for parameters that no optimizer steps. They may have gradients too."""
        for held in self.held.values():
            if id(held[0].owner) not in self.group_of and not held[0].is_buffer:
                yield held[0].owner, held

    def check_keys(self) -> None:
        """Raises: CheckpointError for state that belongs to no parameter, or whose key is no str or is ".grad"."""
        for label, one in self.optimizers.items():
            for param, state in one.state.items():
                if not isinstance(param, Tensor):
                    raise CheckpointError(
                        f"optimizer `{label}` keeps state under {param!r}, which is of no parameter: give it in `extra`"
                    )
                for key in state:
                    if type(key) is not str or key == GRADIENT:
                        names = [one.name for one in self.held.get(id(param), [])]
                        raise CheckpointError(
                            f"the optimizer's state of `{', '.join(names)}` has the key {key!r}: expected a str other "
                            f"than {GRADIENT!r}"
                        )

    def state_of(self, param: Tensor) -> Any:
        """Return the state of ``param`` in its optimizer; empty if there is none."""
        return self._optimizer_of[id(param)][1].state.get(param, {})

    def set_state(self, param: Tensor, values: dict[str, Any]) -> None:
        """Replace the state of ``param`` in its optimizer. Empty ``values`` remove it."""
        state = self._optimizer_of[id(param)][1].state
        if values:
            state[param] = values
        else:
            state.pop(param, None)

    def lies_whole(self, held: LocalParam) -> bool:
        """Whether the optimizer on this rank steps all of ``held`` and nothing else, in its own shape."""
        if not held.is_sharded and len(self.held[id(held.owner)]) == 1:
            return True
        return tuple(held.owner.shape) == held.shape and held.numel == math.prod(held.shape)

    def layout_of(self, param: Tensor) -> str:
        """Return a digest of the shape of ``param`` and of the elements in it. Equal for pieces cut in the same way."""
        held = [(one.name, one.start, one.numel) for one in self.held[id(param)] if one.numel]
        return hashlib.sha256(repr((tuple(param.shape), held)).encode()).hexdigest()[:16]


GRADIENT = ".grad"  # a gradient is saved as a state with this key


class State(NamedTuple):
    """One value of a parameter's state.

    | ``kind`` | ``value`` |
    |---|---|
    | ``"box"`` | the elements on this rank of a tensor like the parameter, 1-D |
    | ``"one"`` | another tensor |
    | ``"value"`` | no tensor |

    ``of_piece``: the value may describe only the elements on this rank; ranks with other elements may have another one.
    """

    held: LocalParam
    key: str
    kind: str
    value: Any
    of_piece: bool


def states_of(named: Named) -> Iterator[State]:
    """Yield the states and gradients of all parameters with elements on this rank. Raises: CheckpointError."""
    named.check_keys()
    stepped = ((param, held, named.state_of(param).items()) for param, held in named.params())
    for param, held, state in itertools.chain(stepped, ((param, held, ()) for param, held in named.others())):
        for key, value in (*state, *_gradient(param, held)):
            for one in held:
                if one.numel:
                    kind, found = _kind(named, param, one, key, value)
                    yield State(one, key, kind, found, kind != "box" and not named.lies_whole(one))


def _gradient(param: Tensor, held: list[LocalParam]) -> Iterator[tuple[str, Tensor]]:
    """Yield ``.grad`` as a state, if there is one. Raises: CheckpointError if it cannot be saved."""
    grad = param.grad
    if grad is None:
        return
    why = None
    if isinstance(held[0], InHandle):
        why = "belongs to a handle that is driven by hand"
    elif grad.layout != torch.strided or grad.shape != param.shape:
        why = f"is {grad.layout} of shape {tuple(grad.shape)}"
    if why is not None:
        raise CheckpointError(
            f"the gradient of `{held[0].name}` {why}, and cannot be saved: save after the optimizer's step and "
            "zero_grad()"
        )
    yield GRADIENT, grad


def _kind(named: Named, param: Tensor, held: LocalParam, key: str, value: Any) -> tuple[str, Any]:
    if not isinstance(value, Tensor):
        return "value", value
    refuse_freed(value, f"the optimizer's `{key}` of `{held.name}`")
    if is_traceable_wrapper_subclass(value):
        raise CheckpointError(
            f"the optimizer's `{key}` of `{held.name}` is a {type(value).__name__}, whose parts have no place in a "
            "checkpoint: save the model here, and with torch.save() each rank's optimizer.state_dict(), which the same "
            "rank loads"
        )
    if value.shape == param.shape and key not in named.unlike and (value.dim() > 0 or key != "step"):
        return "box", in_owners_order(value, param).narrow(0, held.offset, held.numel)
    return "one", value


def in_owners_order(value: Tensor, owner: Tensor) -> Tensor:
    """Return ``value``, of ``owner``'s shape, 1-D in ``owner``'s memory order: a view if the strides allow it."""
    value = value.detach()
    if value.stride() == owner.stride() or (value.is_contiguous() and owner.is_contiguous()):
        return value.as_strided((value.numel(),), (1,))
    return in_order(value, tuple(owner.stride()))


def like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a new state tensor of ``param``'s shape and strides. Zeros: padding belongs to no parameter."""
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
