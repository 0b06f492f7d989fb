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
    def segments(self) -> Sequence[Shared]:
        """Its flat parameters."""

    @property
    def is_in_forward(self) -> bool:
        """Whether its model is in a forward."""

    def trained(self, part: int) -> Mapping[str, bool]:
        """Whether each parameter of a part requires grad, by FQN."""


class Register:
    """The units over one group. ``life``: a name that no group before it had, once its ranks have agreed on one."""

    def __init__(self) -> None:
        self.life: str | None = None
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

    def enroll(self, unit: Numbered, number: int) -> None:
        """From now on ``unit`` is meant by ``number`` and those of its parts."""
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


_registers: weakref.WeakKeyDictionary[dist.ProcessGroup, Register] = weakref.WeakKeyDictionary()
_numbers: weakref.WeakKeyDictionary[Numbered, dict[Register, int]] = weakref.WeakKeyDictionary()
_numbers_of_parts: weakref.WeakKeyDictionary[Shared, int] = weakref.WeakKeyDictionary()


def register_of(group: dist.ProcessGroup) -> Register:
    return _registers.setdefault(group, Register())


def enroll(unit: Numbered, numbers: dict[Register, int]) -> None:
    """``unit`` has these numbers over its groups, from ``check_same_unit``."""
    _numbers[unit] = numbers
    for register, number in numbers.items():
        register.enroll(unit, number)
    for i, part in enumerate(unit.segments):
        first = None if part.group is None else numbers.get(register_of(part.group))
        if first is not None:
            _numbers_of_parts[part] = first + i


def enroll_loaded(unit: Numbered, groups: Iterable[dist.ProcessGroup]) -> None:
    """The same for one that was loaded, whose collectives are over ``groups``."""
    registers = [register_of(group) for group in groups]
    enroll(unit, {register: register.of_loaded() for register in registers})


def enroll_copy(unit: Numbered, original: Numbered) -> None:
    """The same for a copy."""
    enroll(unit, {register: register.of_copy(number) for register, number in _numbers.get(original, {}).items()})


def number_of(unit: Numbered, group: dist.ProcessGroup) -> int | None:
    """The number of the first part of ``unit`` among those over ``group``; None: it is not enrolled."""
    return _numbers.get(unit, {}).get(register_of(group))


def number_of_part(part: Shared) -> int | None:
    """The number of a part among those over the group that shares it; None: it is not enrolled."""
    return _numbers_of_parts.get(part)
