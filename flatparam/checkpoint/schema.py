"""The types and ranges of all values in a checkpoint's JSON. After ``misfit`` no code checks types again."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..fsdp.states.safetensors_files import is_shape, is_size

# A type; a str, which the value must equal; ANY; or an object of one of these classes
Kind = Any
ANY = object()


@dataclass(frozen=True)
class Lists:
    """A list of any length. ``of``: the kind of its items."""

    of: Kind


@dataclass(frozen=True)
class Named:
    """A JSON object with any names. ``of``: the kind of its values."""

    of: Kind


@dataclass(frozen=True)
class Row:
    """A list of fixed length. ``of``: the kind of each item."""

    of: tuple[Kind, ...]


@dataclass(frozen=True)
class Fields:
    """A JSON object with these names. ``optional``: names that may be absent. Other names are ignored."""

    of: dict[str, Kind]
    optional: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Either:
    """A value of one of these kinds."""

    of: tuple[Kind, ...]


@dataclass(frozen=True)
class That:
    """A value for which ``holds`` returns True. ``called``: its description in messages."""

    holds: Callable[[Any], bool]
    called: str


SHAPE = That(lambda value: isinstance(value, list) and is_shape(value), "a list of sizes")
NUMBER = That(is_size, "a number from 0 to 2**63")

_VALUE = Row((ANY, NUMBER))
_STATES = Named(Named(Either(("box", "one", _VALUE, Row((ANY, NUMBER, bool)), Fields({"pieces": Named(_VALUE)})))))
_GROUPS = Lists(Row((Named(ANY), Lists(str))))
OPTIMIZER = Fields(
    {"groups": Either((type(None), _GROUPS)), "optimizers": Lists(str), "classes": Named(str), "states": _STATES},
    frozenset({"optimizers", "classes"}),
)
_RANK = Fields(
    {
        **{"extra": ANY, "own": Named(str), "own_states": Named(str), "modules": Named(ANY)},
        **{"kept": Named(Row((NUMBER, NUMBER, bool)))},
    },
    frozenset({"extra", "own", "own_states", "modules", "kept"}),
)
_OF_MODULE = Fields({"version": Either((type(None), int))}, frozenset({"version"}))  # torch compares numbers
_ABOUT = Fields(
    {
        **{"flatparam": str, "torch": str, "aliases": Named(str), "modules": Named(ANY), "given": Lists(str)},
        **{"metadata": Named(_OF_MODULE), "base": Named(Row((str, SHAPE, Either((str, type(None))))))},
    },
    frozenset({"aliases", "modules", "given", "metadata", "base"}),
)
_UNIT = Fields(
    {
        **{"name": str, "strategy": Either((str, type(None))), "shards": NUMBER, "replicas": NUMBER},
        **{"parameters_over": NUMBER, "nested": bool, "shard_numels": Lists(NUMBER), "dtypes": Lists(str)},
    }
)
_TENSOR = Row((str, SHAPE, Lists(NUMBER), SHAPE, NUMBER, Either((type(None), Lists(NUMBER)))))
_FILES = Named(Fields({"bytes": NUMBER, "header": NUMBER, "tensors": Named(_TENSOR)}))
INDEX = Fields(
    {
        **{"id": str, "world_size": NUMBER, "about": _ABOUT, "units": Lists(_UNIT), "files": _FILES},
        **{"optimizer": Either((type(None), OPTIMIZER)), "ranks": Lists(_RANK)},
    }
)


def misfit(value: Any, kind: Kind, place: str = "") -> str | None:
    """Return why ``value`` is not of ``kind``; None: it is. ``place``: its path, for the message."""
    if kind is ANY:
        return None
    if isinstance(kind, Either):
        found = [misfit(value, one, place) for one in kind.of]
        return None if None in found else found[-1]
    if isinstance(kind, Lists) and isinstance(value, list):
        return _first(misfit(one, kind.of, f"{place}[{i}]") for i, one in enumerate(value))
    if isinstance(kind, Row) and isinstance(value, list) and len(value) == len(kind.of):
        return _first(
            misfit(one, its, f"{place}[{i}]") for i, (one, its) in enumerate(zip(value, kind.of, strict=True))
        )
    if isinstance(kind, Named) and isinstance(value, dict):
        return _first(misfit(one, kind.of, f"{place}.{name}") for name, one in value.items())
    if isinstance(kind, Fields) and isinstance(value, dict):
        absent = min(kind.of.keys() - value.keys() - kind.optional, default=None)
        if absent is not None:
            return f"{place} has no `{absent}`"
        return _first(misfit(value[name], its, f"{place}.{name}") for name, its in kind.of.items() if name in value)
    fits = (
        kind.holds(value) if isinstance(kind, That) else value == kind if isinstance(kind, str) else type(value) is kind
    )
    return None if fits else f"{place} is {reprlib.repr(value)}, expected {_called(kind)}"


def _first(found: Iterable[str | None]) -> str | None:
    return next((why for why in found if why is not None), None)


def _called(kind: Kind) -> str:
    if isinstance(kind, That):
        return kind.called
    if isinstance(kind, Row):
        return f"a list of {len(kind.of)}"
    if isinstance(kind, Lists | Named | Fields):
        return "a list" if isinstance(kind, Lists) else "an object"
    return repr(kind) if isinstance(kind, str) else str(kind.__name__)
