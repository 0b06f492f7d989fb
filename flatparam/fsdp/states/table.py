"""Map the parameters of a wrapped model, by FQN, to the tensors that its optimizer steps.

All functions for optimizer states start from a ``Table``. Each call makes a new one, as parameters may change.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..sharding.flat_param import FlatParam
from ..unit.local_params import LocalParam, UnitParam, local_params_of, unit_paths


@dataclass(eq=False)
class SteppedParam:
    """One tensor that an optimizer steps, and the original parameters in it.

    The tensor is a slice of one original parameter (use_orig_params), a flat parameter with all its originals, or a
    parameter that no unit manages.
    """

    tensor: Tensor
    params: list[LocalParam] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The FQN of its first parameter, which is the same on all ranks."""
        return self.params[0].name

    @property
    def unit_params(self) -> list[UnitParam]:
        """The parameters, if a unit manages them; else empty."""
        return [param for param in self.params if isinstance(param, UnitParam)]

    @property
    def flat_param(self) -> FlatParam | None:
        return self.params[0].flat_param

    @property
    def is_sharded(self) -> bool:
        return self.params[0].is_sharded

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a state tensor with one element for each element here; ``(1,)`` for a sharded scalar."""
        first = self.params[0]
        if self.is_flat or not isinstance(first, UnitParam):
            return tuple(self.tensor.shape)
        return first.shard_slice.shape if first.shard_slice.shape or not self.is_sharded else (1,)

    @property
    def is_flat(self) -> bool:
        return self.flat_param is not None and not self.flat_param.use_orig_params

    @property
    def here(self) -> list[LocalParam]:
        """The parameters of which this rank has elements. A slice may be empty, a shard may be padding only."""
        return [param for param in self.params if param.numel]

    @property
    def is_here(self) -> bool:
        """Whether this rank has elements of the parameters, or they are not sharded."""
        return not self.is_sharded or bool(self.here)

    @property
    def layout(self) -> str:
        """A digest of its shape and of the elements in it. Equal for pieces cut in the same way."""
        here = [(param.name, param.start, param.numel) for param in self.here]
        return hashlib.sha256(repr((_shape_of(self.tensor), here)).encode()).hexdigest()[:16]

    def lies_whole(self, param: LocalParam) -> bool:
        """Whether the optimizer on this rank steps all of ``param`` here and nothing else, in its own shape."""
        if not param.is_sharded and len(self.params) == 1:
            return True
        return _shape_of(self.tensor) == (param.shape or (1,)) and param.numel == math.prod(param.shape)


def _shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return its shape; ``(1,)``, which a sharded scalar has, for each scalar."""
    return tuple(tensor.shape) or (1,)


def stepped_of(params: Iterable[LocalParam]) -> dict[int, SteppedParam]:
    """Map the id of each tensor that an optimizer of ``params`` steps to the tensor with its parameters, in order."""
    found: dict[int, SteppedParam] = {}
    for param in params:
        found.setdefault(id(param.owner), SteppedParam(param.owner)).params.append(param)
    return found


class Table:
    """All parameters of ``model``: first those of its units, in the units' order, then those that no unit manages.

    The order is the same on all ranks. ``by_name``: all FQNs, so a tied parameter has several.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.params = list(local_params_of(model, buffers=False))
        self.units = list(unit_paths(model))
        self.flat_params = [flat_param for unit in self.units for flat_param in unit.flat_params]
        self._stepped = stepped_of(self.params)
        self.by_name = {name: param for param in self.params for name in param.names}

    @property
    def compared(self) -> list[Any]:
        """The groups of the model's ranks; empty without units."""
        return self.units[0].options.placement.compared if self.units else []

    def all_stepped(self) -> list[SteppedParam]:
        """Return all tensors that an optimizer of all parameters steps, in the same order on all ranks."""
        return list(self._stepped.values())

    def keys(self, groups: list[list[SteppedParam]], named: bool) -> dict[SteppedParam, Any]:
        """Map each stepped tensor to its key in the optimizer's state: a number, or with ``named`` its name."""
        stepped = [one for group in groups for one in group]
        if not named:
            return {one: number for number, one in enumerate(stepped)}
        names = {id(param): name for name, param in self.model.named_parameters()}
        return {one: names[id(one.tensor)] for one in stepped}

    def stepped(self, tensor: Tensor) -> SteppedParam:
        """Return the entry of ``tensor``. Raises: ValueError if it is no parameter of the model."""
        found = self._stepped.get(id(tensor))
        if found is None:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(tensor.shape)} that {type(self.model).__name__} has not"
            )
        return found

    def changed(
        self, state: Mapping[str, Mapping[str, Any]], change: Callable[[UnitParam, Any], Any]
    ) -> dict[str, Mapping[str, Any]]:
        """Return ``state``, by FQN, with ``change(parameter, value)`` for each value of a parameter of a unit."""
        found = ((name, self.by_name.get(name), values) for name, values in state.items())
        return {
            name: {key: change(one, value) for key, value in values.items()} if isinstance(one, UnitParam) else values
            for name, one, values in found
        }

    def groups(self, given: Any) -> list[list[SteppedParam]]:
        """Return the stepped tensors of each group of ``given``.

        ``given``: an optimizer, or its constructor's parameters or groups; None: all parameters. Raises: ValueError.
        """
        listed = list(getattr(given, "param_groups", self.model.parameters() if given is None else given))
        groups = [group["params"] for group in listed] if listed and isinstance(listed[0], dict) else [listed]
        members = ([group] if isinstance(group, Tensor) else group for group in groups)
        return [[self.stepped(tensor) for tensor in group] for group in members]


def settings_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of an optimizer's group without ``params``."""
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


def settings_of(model: nn.Module) -> Any:
    """The ``StateDictSettings`` of the first unit in ``model``. Raises: ValueError if there is none."""
    for inner in model.modules():
        if "_unit" in vars(inner) and "_settings" in vars(inner):
            return vars(inner)["_settings"]
    raise ValueError(f"{type(model).__name__} holds no FullyShardedDataParallel")
