"""The ids of units: numbers that mean the same unit on all ranks of a process group.

Building a unit is a collective call, so the count of built units is the same on all ranks. Copies and unpickled units
are made without communication: each unit has a counter for its copies and each group one for unpickled units, so a rank
that makes some alone changes no other id. The collective trace puts ids into events. The module sees a unit and a flat
parameter through two protocols, ``Numbered`` and ``Shared``, and holds both weakly.
"""

import collections
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

# The 32 bits of a number, from the top: 1 loaded, 16 unit, 10 copy, 5 flat parameter of the unit. Each count begins
# again at 0 after its last value; messages may then name an old unit.
_COPY, _UNIT = 2**5, 2**15
_UNITS = 2**16


class Shared(Protocol):
    """A flat parameter, as its collectives need it."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share it."""

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """All groups that its collectives are issued over."""

    @property
    def device(self) -> torch.device:
        """Where its collectives are issued."""

    @property
    def is_sharded(self) -> bool:
        """Whether it is gathered."""


class Numbered(Protocol):
    """A unit, as messages about its collectives need it."""

    name: str

    @property
    def flat_params(self) -> Sequence[Shared]:
        """Its flat parameters."""

    @property
    def is_in_forward(self) -> bool:
        """Whether its model is in a forward."""

    def trained(self, part: int) -> Mapping[str, bool]:
        """Whether each parameter of flat parameter ``part`` requires grad, by FQN."""


class UnitIds:
    """The units over one group. ``generation``: None until the group's ranks have compared their first unit."""

    def __init__(self) -> None:
        self.generation: str | None = None
        self._built, self._loaded = itertools.count(), itertools.count()
        self._copies: collections.Counter[int] = collections.Counter()
        self._units: weakref.WeakValueDictionary[int, Numbered] = weakref.WeakValueDictionary()

    def of_built(self) -> int:
        """Return the number of the next unit that the ranks compare. It counts even if building then fails."""
        return next(self._built) % _UNITS * _UNIT

    def of_loaded(self) -> int:
        """Return the number of the next unpickled unit."""
        return (_UNITS + next(self._loaded) % _UNITS) * _UNIT

    def of_copy(self, number: int) -> int:
        """Return the number of the next copy. ``number``: of the original or of any copy of it."""
        first = number - number % _UNIT
        self._copies[first] += 1
        return first + self._copies[first] * _COPY % _UNIT

    def assign(self, unit: Numbered, number: int) -> None:
        """Map ``number``, and the ids of its flat parameters, to ``unit``."""
        self._units[number] = unit

    def name(self, number: int) -> str:
        """Return the name for messages of the unit that has flat parameter ``number``."""
        unit = self._units.get(number - number % _COPY)
        return "a unit that is gone" if unit is None else unit.name

    def is_in_forward(self, number: int) -> bool:
        """Whether the model that has flat parameter ``number`` is in a forward."""
        unit = self._units.get(number - number % _COPY)
        return unit is not None and unit.is_in_forward

    def trained(self, number: int) -> Mapping[str, bool]:
        """Whether each parameter of flat parameter ``number`` requires grad, by FQN; empty if the unit is gone."""
        unit = self._units.get(number - number % _COPY)
        return {} if unit is None else unit.trained(number % _COPY)


_ids: weakref.WeakKeyDictionary[dist.ProcessGroup, UnitIds] = weakref.WeakKeyDictionary()
_ids_of_units: weakref.WeakKeyDictionary[Numbered, dict[UnitIds, int]] = weakref.WeakKeyDictionary()
_ids_of_flat_params: weakref.WeakKeyDictionary[Shared, int] = weakref.WeakKeyDictionary()


def ids_of(group: dist.ProcessGroup) -> UnitIds:
    """Return the ids over ``group``, made at the first call. They live as long as the group."""
    return _ids.setdefault(group, UnitIds())


def assign(unit: Numbered, numbers: dict[UnitIds, int]) -> None:
    """Give ``unit`` and its flat parameters their ids. ``numbers``: by group, from ``check_same_unit``."""
    _ids_of_units[unit] = numbers
    for ids, number in numbers.items():
        ids.assign(unit, number)
    for i, part in enumerate(unit.flat_params):
        first = None if part.group is None else numbers.get(ids_of(part.group))
        if first is not None:
            _ids_of_flat_params[part] = first + i


def assign_loaded(unit: Numbered, groups: Iterable[dist.ProcessGroup]) -> None:
    """Give an unpickled ``unit`` its ids over ``groups``. No communication."""
    all_ids = [ids_of(group) for group in groups]
    assign(unit, {ids: ids.of_loaded() for ids in all_ids})


def assign_copy(unit: Numbered, original: Numbered) -> None:
    """Give a copy of ``original`` its ids. No communication."""
    assign(unit, {ids: ids.of_copy(number) for ids, number in _ids_of_units.get(original, {}).items()})


def id_of(unit: Numbered, group: dist.ProcessGroup) -> int | None:
    """Return the id of the first flat parameter of ``unit`` over ``group``; None: it has no id."""
    return _ids_of_units.get(unit, {}).get(ids_of(group))


def id_of_flat_param(part: Shared) -> int | None:
    """Return the id of ``part`` over the group that shares it; None: it has no id."""
    return _ids_of_flat_params.get(part)
