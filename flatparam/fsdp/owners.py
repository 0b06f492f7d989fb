"""Which unit has a parameter, or a module's own parameters; what is said of a shard that is taken for a parameter."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch.nn as nn
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import _C

if TYPE_CHECKING:
    from .segment import Segment
    from .unit import Unit

FREED = (
    "flatparam: a parameter of {unit} was used while it is sharded: {names}. It has its full data during the forward "
    "and backward of {unit}; outside of them use summon_full_params(), and call the wrapped module instead of one of "
    "its parts."
)

_units: weakref.WeakSet[Unit] = weakref.WeakSet()
_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Unit]] = weakref.WeakKeyDictionary()
_of_params: Any = WeakIdKeyDictionary()  # parameter -> (weak reference to its unit, its name there, its segment)


def own(unit: Unit) -> None:
    """From now on ``unit`` has its parameters, flat and original, and its modules."""
    _units.add(unit)
    owner = weakref.ref(unit)
    for k, (name, segment) in enumerate(zip(unit.flat_names(), unit.segments, strict=True)):
        _of_params[segment.flat] = owner, name, k
        for original in segment.originals:
            _of_params[original.param] = owner, original.fqn, k
    for module in {module for module, _ in unit.places}:
        _owners[module] = owner


def replace_param(unit: Unit, k: int, fqn: str, old: nn.Parameter, new: nn.Parameter) -> None:
    """``new`` is the parameter ``fqn`` in the k-th segment of ``unit``, in place of ``old``."""
    _of_params.pop(old, None)
    _of_params[new] = weakref.ref(unit), fqn, k


def all_units() -> list[Unit]:
    """The units of this process."""
    return list(_units)


def owner_of_param(param: Tensor) -> tuple[Unit, str] | None:
    """The unit that has ``param``, an original or a flat one, wherever that is, and the name it has there."""
    owner, fqn, _ = _of_params.get(param, (None, "", 0))
    unit = None if owner is None else owner()
    return None if unit is None else (unit, fqn)


def segment_of(param: Tensor) -> Segment | None:
    """The segment that ``param``, an original or a flat one, is in."""
    owner, _, index = _of_params.get(param, (None, "", 0))
    unit = None if owner is None else owner()
    return None if unit is None else unit.segments[index]


def owner_of(module: nn.Module) -> Unit | None:
    """The unit that has ``module``'s own parameters."""
    owner = _owners.get(module)
    return None if owner is None else owner()


def _why_sharded(tensor: Tensor) -> str | None:
    """What is said of a shard that is taken for a whole parameter, by whatever name."""
    owner = owner_of_param(tensor)
    if owner is not None:
        return FREED.format(unit=owner[0].name, names=f"`{owner[1]}`")
    storage, at = tensor.untyped_storage()._cdata, tensor.storage_offset()  # of a view of one
    for unit in _units:
        for here in (here for segment in unit.segments for here in segment.here()):
            piece = here.original.param
            begin = piece.storage_offset()
            if piece.untyped_storage()._cdata == storage and begin <= at < begin + max(1, piece.numel()):
                return FREED.format(unit=unit.name, names=f"`{here.original.fqn}`")
    return None


_C.explain_shards(_why_sharded)
