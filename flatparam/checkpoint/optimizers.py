"""Optimizers by the FQNs of their parameters: labels, groups, states, and the elements of states on this rank.

Saves and loads share this view. It reads optimizers; only ``set_state`` changes one. No collective calls.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.tensors import refuse_freed
from ..common.torch_private import is_traceable_wrapper_subclass
from ..fsdp.sharding.parameters import in_order
from ..fsdp.states.optimizer_classes import class_of
from ..fsdp.states.table import SteppedParam, stepped_of
from ..fsdp.states.values import keys_of_one_shape
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


@dataclass(eq=False)
class Group:
    """One group of parameters. ``number``: over all optimizers; ``label``, ``optimizer``: its optimizer's."""

    number: int
    label: str
    optimizer: Any
    group: dict[str, Any]
    stepped: list[SteppedParam] = field(default_factory=list)

    @property
    def params(self) -> list[LocalParam]:
        return [param for one in self.stepped for param in one.params]

    @property
    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in self.group.items() if key not in ("params", "param_names")}


class Named:
    """Optimizers whose parameters are in ``held``: their ``groups``, in order, and ``stepped``: id of a tensor -> it.

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
        self.classes = {label: class_of(one) for label, one in optimizers.items()}
        self.stepped = stepped_of(held)
        self.group_of: dict[int, Group] = {}  # id of a stepped tensor -> its group
        groups = [(label, one, group) for label, one in optimizers.items() for group in one.param_groups]
        self.groups = [Group(i, *given) for i, given in enumerate(groups)]
        for group in self.groups:
            for j, param in enumerate(group.group["params"]):
                if id(param) not in self.stepped:
                    raise CheckpointError(
                        f"the optimizer's parameter {j} of group {group.number}, of shape {tuple(param.shape)}, is not "
                        "in the model: make the optimizer after wrapping, of the model's parameters()"
                    )
                mine, before = self.stepped[id(param)], self.group_of.get(id(param))
                if before is None:  # else torch has warned: the group has the parameter twice
                    self.group_of[id(param)] = group
                    group.stepped.append(mine)
                elif before.label != group.label:
                    raise CheckpointError(
                        f"parameter `{mine.name}` is in two optimizers, `{before.label}` and `{group.label}`: a "
                        "checkpoint takes a parameter in one optimizer only"
                    )
        stepped = (one.tensor for one in self.all_stepped())
        self.unlike = keys_of_one_shape((tuple(tensor.shape), self.state_of(tensor)) for tensor in stepped)

    def all_stepped(self) -> list[SteppedParam]:
        """Return the tensors of all groups, and parameters that no optimizer steps: they may have gradients too."""
        return [one for one in self.stepped.values() if id(one.tensor) in self.group_of or not one.params[0].is_buffer]

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
                        mine = self.stepped.get(id(param))
                        names = [] if mine is None else [held.name for held in mine.params]
                        raise CheckpointError(
                            f"the optimizer's state of `{', '.join(names)}` has the key {key!r}: expected a str other "
                            f"than {GRADIENT!r}"
                        )

    def state_of(self, param: Tensor) -> Any:
        """Return the state of ``param`` in its optimizer; empty if there is none."""
        group = self.group_of.get(id(param))
        return {} if group is None else group.optimizer.state.get(param, {})

    def set_state(self, param: Tensor, values: dict[str, Any]) -> None:
        """Replace the state of ``param`` in its optimizer. Empty ``values`` remove it."""
        state = self.group_of[id(param)].optimizer.state
        if values:
            state[param] = values
        else:
            state.pop(param, None)


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
    for one in named.all_stepped():
        for key, value in (*named.state_of(one.tensor).items(), *_gradient(one)):
            for param in one.here:
                kind, found = _kind(named, one.tensor, param, key, value)
                yield State(param, key, kind, found, kind != "box" and not one.lies_whole(param))


def _gradient(one: SteppedParam) -> Iterator[tuple[str, Tensor]]:
    """Yield ``.grad`` as a state, if there is one. Raises: CheckpointError if it cannot be saved."""
    grad = one.tensor.grad
    if grad is None:
        return
    why = None
    if isinstance(one.params[0], InHandle):
        why = "belongs to a handle that is driven by hand"
    elif grad.layout != torch.strided or grad.shape != one.tensor.shape:
        why = f"is {grad.layout} of shape {tuple(grad.shape)}"
    if why is not None:
        raise CheckpointError(
            f"the gradient of `{one.name}` {why}, and cannot be saved: save after the optimizer's step and zero_grad()"
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
        return "box", in_order(value.detach(), param.stride()).narrow(0, held.offset, held.numel)
    return "one", value
