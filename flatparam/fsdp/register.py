"""What the ranks of a process group have agreed on when they built units: which unit is which.

Units are counted as they are built, which is a collective call, so a number is the same unit on all ranks, whatever a
rank has run since. Copies and loaded pickles are made without a word: they are counted apart, copies for each unit, so
that a rank that makes some alone puts no other unit out of step.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from .segment import Segment
    from .unit import Unit

# A number has 32 bits: whether it was loaded, the unit, which copy of it, which part (one a dtype and requires_grad).
# After so many of them the numbers begin again, and a unit is taken for one of long ago.
_COPY, _UNIT = 2**5, 2**15
_UNITS = 2**16


class Register:
    """The units over one group. ``life``: a name that no group before it had, once its ranks have agreed on one."""

    def __init__(self) -> None:
        self.life: str | None = None
        self._built, self._loaded = itertools.count(), itertools.count()
        self._copies: collections.Counter[int] = collections.Counter()
        self._units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()

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

    def enroll(self, unit: Unit, number: int) -> None:
        """From now on ``unit`` is meant by ``number`` and those of its parts."""
        self._units[number] = unit

    def name(self, number: int) -> str:
        """What messages call the unit of a part."""
        unit = self._units.get(number - number % _COPY)
        return "a unit that is gone" if unit is None else unit.name

    def is_in_forward(self, number: int) -> bool:
        """Whether the model of a part is in a forward."""
        unit = self._units.get(number - number % _COPY)
        return unit is not None and unit.step.root is not None and unit.step.root.state == "FORWARD"

    def segment(self, number: int) -> Segment | None:
        """The part with this number; None: it is gone."""
        unit = self._units.get(number - number % _COPY)
        return None if unit is None else unit.segments[number % _COPY]


_registers: weakref.WeakKeyDictionary[dist.ProcessGroup, Register] = weakref.WeakKeyDictionary()
_numbers: weakref.WeakKeyDictionary[Unit, dict[Register, int]] = weakref.WeakKeyDictionary()
_numbers_of_parts: weakref.WeakKeyDictionary[Segment, int] = weakref.WeakKeyDictionary()


def register_of(group: dist.ProcessGroup) -> Register:
    return _registers.setdefault(group, Register())


def enroll(unit: Unit, numbers: dict[Register, int]) -> None:
    """``unit`` has these numbers over its groups, from ``check_same_unit``."""
    _numbers[unit] = numbers
    for register, number in numbers.items():
        register.enroll(unit, number)
    group = unit.options.placement.optim
    first = None if group is None else numbers.get(register_of(group))
    if first is not None:
        _numbers_of_parts.update((segment, first + i) for i, segment in enumerate(unit.segments))


def enroll_loaded(unit: Unit) -> None:
    """The same for one that was loaded."""
    placement = unit.options.placement
    groups = (placement.optim, placement.replicate, placement.param if placement.copied else None)
    registers = [register_of(group) for group in groups if group is not None]
    enroll(unit, {register: register.of_loaded() for register in registers})


def enroll_copy(unit: Unit, original: Unit) -> None:
    """The same for a copy."""
    enroll(unit, {register: register.of_copy(number) for register, number in _numbers.get(original, {}).items()})


def number_of(unit: Unit, group: dist.ProcessGroup) -> int | None:
    """The number of the first part of ``unit`` among those over ``group``; None: it is not enrolled."""
    return _numbers.get(unit, {}).get(register_of(group))


def number_of_part(segment: Segment) -> int | None:
    """The number of a part among those over the group that shares it; None: it is not enrolled."""
    return _numbers_of_parts.get(segment)
