"""Find the unit of a parameter or module, and explain the use of a shard as a whole parameter.

Owns the tables parameter -> unit and module -> unit, and the set of all units of the process. All references are weak.
A unit is known by the protocol ``Owner``, so ``unit.py`` can import this file. The C core calls ``_why_sharded``.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ... import _C
from ...common import optimizers
from ...common.patches import FOR_GOOD, Lifetime, flat_params_live, note
from ..names import printable
from ..sharding.flat_param import FlatParam
from ..sharding.parameters import Options

FREED = (
    "flatparam: a parameter of {unit} was used while it is sharded: {names}. It has its full data during the forward "
    "and backward of {unit}; outside of them use summon_full_params(), and call the wrapped module instead of one of "
    "its parts."
)


class Owner(Protocol):
    """The attributes of a unit that callers of this file use."""

    name: str
    options: Options
    flat_params: list[FlatParam]
    core: _C.Unit
    summoned: Any
    is_away: bool

    @property
    def places(self) -> set[tuple[nn.Module, str]]:
        """The places, (module, name), of the original parameters."""

    def parameters(self) -> Iterator[tuple[FlatParam, nn.Parameter]]:
        """The parameters that an optimizer steps."""

    def flat_names(self) -> list[str]:
        """The names of its flat parameters."""


units_live = Lifetime("from the first model wrapped by flatparam's class to the last")
_units: weakref.WeakSet[Owner] = weakref.WeakSet()
_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Owner]] = weakref.WeakKeyDictionary()
_of_params: Any = WeakIdKeyDictionary()  # parameter -> (weak unit, its name there, index of its flat parameter)


def own(unit: Owner) -> None:
    """Map the parameters of ``unit``, flat and original, and its modules to ``unit``."""
    _units.add(unit)
    hold_changes(unit)
    optimizers.note_change()
    owner = weakref.ref(unit)
    for k, (name, flat_param) in enumerate(zip(unit.flat_names(), unit.flat_params, strict=True)):
        _of_params[flat_param.flat] = owner, name, k
        for original in flat_param.originals:
            _of_params[original.param] = owner, original.fqn, k
    for module in {module for module, _ in unit.places}:
        _owners[module] = owner


def hold_changes(owner: Any) -> None:
    """Keep our changes of torch in force as long as ``owner`` lives: a unit, or a wrapper that is being made."""
    flat_params_live.hold(owner)
    units_live.hold(owner)


def replace_param(unit: Owner, k: int, fqn: str, old: nn.Parameter, new: nn.Parameter) -> None:
    """Map ``new`` to ``unit`` if ``old`` is: it is now the parameter ``fqn`` of the k-th flat parameter."""
    optimizers.note_change()
    if _of_params.pop(old, None) is not None:
        _of_params[new] = weakref.ref(unit), fqn, k


def all_units() -> list[Owner]:
    """All living units of this process."""
    return list(_units)


class Owned(NamedTuple):
    """A parameter of a unit, original or flat: its unit, its name there, its flat parameter."""

    unit: Owner
    name: str
    flat_param: FlatParam


def owner_of_param(param: Tensor) -> Owned | None:
    """The owner of ``param``, original or flat; None: it belongs to no unit."""
    owner, fqn, index = _of_params.get(param, (None, "", 0))
    unit = None if owner is None else owner()
    return None if unit is None else Owned(unit, fqn, unit.flat_params[index])


def owner_of(module: nn.Module) -> Owner | None:
    """The unit of the parameters that ``module`` itself registers; None: it has none in a unit."""
    owner = _owners.get(module)
    return None if owner is None else owner()


def owners_of(params: Iterable[Tensor]) -> dict[Owner, None]:
    """The units of ``params``, each once, in order."""
    return {owner.unit: None for owner in map(owner_of_param, params) if owner is not None}


optimizers.finders["units"] = owners_of


def flat_param_of(param: Tensor) -> FlatParam | None:
    """The flat parameter of ``param``, original or flat; None: it belongs to no unit."""
    owner = owner_of_param(param)
    return None if owner is None else owner.flat_param


def sharded_now(params: Iterable[Tensor]) -> list[tuple[Owner, FlatParam]]:
    """(unit, flat parameter) for each of ``params`` that is sharded and not summoned now."""
    owners = filter(None, map(owner_of_param, params))
    return [(one.unit, one.flat_param) for one in owners if one.flat_param.is_sharded and one.unit.summoned is None]


def _why_sharded(tensor: Tensor) -> str | None:
    """The error text for ``tensor``, a shard or a view of one, used as a whole parameter; None: it is neither."""
    owner = owner_of_param(tensor)
    if owner is not None:
        return printable(FREED.format(unit=owner.unit.name, names=f"`{owner.name}`"))
    storage, at = tensor.untyped_storage()._cdata, tensor.storage_offset()  # it may be a view of a piece
    for unit in _units:
        for here in (here for flat_param in unit.flat_params for here in flat_param.shard_slices()):
            piece = here.original.param
            begin = piece.storage_offset()
            if piece.untyped_storage()._cdata == storage and begin <= at < begin + max(1, piece.numel()):
                return printable(FREED.format(unit=unit.name, names=f"`{here.original.fqn}`"))
    return None


_C.explain_shards(_why_sharded)
note(
    FOR_GOOD,
    ["torch.library:Library.impl"],
    "Refuse operations on a shard that need the whole parameter: kernels for the dispatch key DeferredInit, which no "
    "tensor but a shard has.",
    "tests/fsdp/wrapper/test_fsdp_parts_called_alone.py",
    "torch has none: kernels stay as long as the extension is loaded.",
)
