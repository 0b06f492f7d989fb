"""Which unit has a parameter, or a module's own parameters; the error for a shard that is taken for a parameter."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch.nn as nn
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ... import _C
from ...common import optimizers
from ..names import printable
from ..sharding.flat_param import FlatParam
from ..sharding.parameters import Options

FREED = (
    "flatparam: a parameter of {unit} was used while it is sharded: {names}. It has its full data during the forward "
    "and backward of {unit}; outside of them use summon_full_params(), and call the wrapped module instead of one of "
    "its parts."
)


class Owner(Protocol):
    """A unit, as far as it is found by its parameters and modules."""

    name: str
    options: Options
    flat_params: list[FlatParam]
    core: _C.Unit
    summoned: Any

    @property
    def places(self) -> set[tuple[nn.Module, str]]:
        """Where modules have original parameters, and by which names."""

    def parameters(self) -> Iterator[tuple[FlatParam, nn.Parameter]]:
        """The parameters that an optimizer steps."""

    def flat_names(self) -> list[str]:
        """The names of its flat parameters."""


_units: weakref.WeakSet[Owner] = weakref.WeakSet()
_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Owner]] = weakref.WeakKeyDictionary()
_of_params: Any = WeakIdKeyDictionary()  # parameter -> (weak reference to its unit, its name there, its flat parameter)


def own(unit: Owner) -> None:
    """From now on ``unit`` has its parameters, flat and original, and its modules."""
    _units.add(unit)
    optimizers.note_change()
    owner = weakref.ref(unit)
    for k, (name, flat_param) in enumerate(zip(unit.flat_names(), unit.flat_params, strict=True)):
        _of_params[flat_param.flat] = owner, name, k
        for original in flat_param.originals:
            _of_params[original.param] = owner, original.fqn, k
    for module in {module for module, _ in unit.places}:
        _owners[module] = owner


def replace_param(unit: Owner, k: int, fqn: str, old: nn.Parameter, new: nn.Parameter) -> None:
    """``new`` is the parameter ``fqn`` in the k-th flat parameter of ``unit``, in place of ``old``."""
    optimizers.note_change()
    _of_params.pop(old, None)
    _of_params[new] = weakref.ref(unit), fqn, k


def all_units() -> list[Owner]:
    """The units of this process."""
    return list(_units)


def owner_of_param(param: Tensor) -> tuple[Owner, str] | None:
    """The unit that has ``param``, an original or a flat one, wherever that is, and the name it has there."""
    owner, fqn, _ = _of_params.get(param, (None, "", 0))
    unit = None if owner is None else owner()
    return None if unit is None else (unit, fqn)


def owner_of(module: nn.Module) -> Owner | None:
    """The unit that has ``module``'s own parameters."""
    owner = _owners.get(module)
    return None if owner is None else owner()


def _owners_of(params: Iterable[Tensor]) -> dict[Owner, None]:
    """The units that have some of ``params``."""
    owners = map(owner_of_param, params)
    return {owner[0]: None for owner in owners if owner is not None}


optimizers.find_units(_owners_of)


def flat_param_of(param: Tensor) -> FlatParam | None:
    """The flat parameter that ``param``, an original or a flat one, is in."""
    owner, _, index = _of_params.get(param, (None, "", 0))
    unit = None if owner is None else owner()
    return None if unit is None else unit.flat_params[index]


def _why_sharded(tensor: Tensor) -> str | None:
    """What is said of a shard that is taken for a whole parameter, by whatever name."""
    owner = owner_of_param(tensor)
    if owner is not None:
        return printable(FREED.format(unit=owner[0].name, names=f"`{owner[1]}`"))
    storage, at = tensor.untyped_storage()._cdata, tensor.storage_offset()  # of a view of one
    for unit in _units:
        for here in (here for flat_param in unit.flat_params for here in flat_param.shard_slices()):
            piece = here.original.param
            begin = piece.storage_offset()
            if piece.untyped_storage()._cdata == storage and begin <= at < begin + max(1, piece.numel()):
                return printable(FREED.format(unit=unit.name, names=f"`{here.original.fqn}`"))
    return None


_C.explain_shards(_why_sharded)
