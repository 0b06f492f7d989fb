"""What the ranks of a process group have agreed on when they built units: which unit is which.

Units are counted as they are built, which is a collective call, so a number is the same unit on all ranks, whatever a
rank has run since. Copies and loaded pickles are made without a word: they are counted apart, copies for each unit, so
that a rank that makes some alone puts no other unit out of step.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

# A number has 32 bits: whether it was loaded, the unit, which copy of it, which part (one a dtype and requires_grad).
# After so many of them the numbers begin again, and a unit is taken for one of long ago.
_COPY, _UNIT = 2**5, 2**15
_UNITS = 2**16


class Shared(Protocol):
    """A flat parameter, as far as its collectives are concerned."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share it."""

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """All groups that its collectives are issued over."""

    @property
    def device(self) -> torch.device:
        """Where its collectives are issued."""


class Numbered(Protocol):
    """A unit, as far as messages about its collectives need it."""

    name: str

    @property
    def flat_params(self) -> Sequence[Shared]:
        """Its flat parameters."""

    @property
    def is_in_forward(self) -> bool:
        """Whether its model is in a forward."""

    def trained(self, part: int) -> Mapping[str, bool]:
        """Whether each parameter of a part requires grad, by FQN."""


class UnitIds:
    """The units over one group. ``life``: a name that no group before it had, once its ranks have agreed on one."""

    def __init__(self) -> None:
        self.generation: str | None = None
        self._built, self._loaded = itertools.count(), itertools.count()
        self._copies: collections.Counter[int] = collections.Counter()
        self._units: weakref.WeakValueDictionary[int, Numbered] = weakref.WeakValueDictionary()

    def of_built(self) -> int:
        """The number of the next unit that ranks agree on, whether it is enrolled or not."""
        return next(self._built) % _UNITS * _UNIT

    def of_loaded(self) -> int:
        """The number of the next unit that is loaded."""
        return (_UNITS + next(self._loaded) % _UNITS) * _UNIT

    def of_copy(self, number: int) -> int:
        """The number of the next copy of the unit that has this one, or of a copy of it."""
        first = number - number % _UNIT
        self._copies[first] += 1
        return first + self._copies[first] * _COPY % _UNIT

    def assign(self, unit: Numbered, number: int) -> None:
        """Map ``number``, and the ids of its flat parameters, to ``unit``."""
        self._units[number] = unit

    def name(self, number: int) -> str:
        """What messages call the unit of a part."""
        unit = self._units.get(number - number % _COPY)
        return "a unit that is gone" if unit is None else unit.name

    def is_in_forward(self, number: int) -> bool:
        """Whether the model of a part is in a forward."""
        unit = self._units.get(number - number % _COPY)
        return unit is not None and unit.is_in_forward

    def trained(self, number: int) -> Mapping[str, bool]:
        """Whether each parameter of a part requires grad, by FQN; empty if the unit is gone."""
        unit = self._units.get(number - number % _COPY)
        return {} if unit is None else unit.trained(number % _COPY)


_ids: weakref.WeakKeyDictionary[dist.ProcessGroup, UnitIds] = weakref.WeakKeyDictionary()
_ids_of_units: weakref.WeakKeyDictionary[Numbered, dict[UnitIds, int]] = weakref.WeakKeyDictionary()
_ids_of_flat_params: weakref.WeakKeyDictionary[Shared, int] = weakref.WeakKeyDictionary()


def ids_of(group: dist.ProcessGroup) -> UnitIds:
    return _ids.setdefault(group, UnitIds())


def assign(unit: Numbered, numbers: dict[UnitIds, int]) -> None:
    """``unit`` has these numbers over its groups, from ``check_same_unit``."""
    _ids_of_units[unit] = numbers
    for ids, number in numbers.items():
        ids.assign(unit, number)
    for i, part in enumerate(unit.flat_params):
        first = None if part.group is None else numbers.get(ids_of(part.group))
        if first is not None:
            _ids_of_flat_params[part] = first + i


def assign_loaded(unit: Numbered, groups: Iterable[dist.ProcessGroup]) -> None:
    """The same for one that was loaded, whose collectives are over ``groups``."""
    all_ids = [ids_of(group) for group in groups]
    assign(unit, {ids: ids.of_loaded() for ids in all_ids})


def assign_copy(unit: Numbered, original: Numbered) -> None:
    """The same for a copy."""
    assign(unit, {ids: ids.of_copy(number) for ids, number in _ids_of_units.get(original, {}).items()})


def id_of(unit: Numbered, group: dist.ProcessGroup) -> int | None:
    """The number of the first part of ``unit`` among those over ``group``; None: it is not enrolled."""
    return _ids_of_units.get(unit, {}).get(ids_of(group))


def id_of_flat_param(part: Shared) -> int | None:
    """The number of a part among those over the group that shares it; None: it is not enrolled."""
    return _ids_of_flat_params.get(part)
