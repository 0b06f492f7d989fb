"""The types and ranges of all values in a checkpoint's JSON. After ``misfit`` no code checks types again."""

import reprlib
from collections.abc import Iterable
from typing import Any

from ..fsdp.states.safetensors_files import is_shape, is_size

# | kind | value |
# |---|---|
# | a type, a str | of exactly this type; equal to the str |
# | a function | one for which it returns True; its docstring describes it in messages |
# | ``[kind]`` | a list of any length |
# | ``(kind, ...)`` | a list of this length |
# | ``{"*": kind}`` | an object with any names |
# | ``{"name": kind, "name?": kind}`` | an object with these names; "?": it may be absent. Other names are ignored |
# | ``Either``, ``ANY`` | a value of one of these kinds; any value |
Kind = Any
ANY = object()


class Either(list[Kind]):
    """A value of one of these kinds."""


def shape(value: Any) -> bool:
    """a list of sizes"""
    return isinstance(value, list) and is_shape(value)


def number(value: Any) -> bool:
    """a number from 0 to 2**63"""
    return is_size(value)


_ENTRY: Kind = (ANY, number)
_STATE = Either(["box", "one", _ENTRY, (ANY, number, bool), {"pieces": {"*": _ENTRY}}])
_GROUPS: Kind = [({"*": ANY}, [str])]
OPTIMIZER = {
    **{"groups": Either([type(None), _GROUPS]), "optimizers?": [str], "classes?": {"*": str}},
    "states": {"*": {"*": _STATE}},
}
_RANK = {
    **{"extra?": ANY, "own?": {"*": str}, "own_states?": {"*": str}, "modules?": {"*": ANY}},
    "kept?": {"*": (number, number, bool)},
}
_OF_MODULE = {"version?": Either([type(None), int])}  # torch compares numbers
_ABOUT = {
    **{"flatparam": str, "torch": str, "aliases?": {"*": str}, "modules?": {"*": ANY}, "given?": [str]},
    **{"metadata?": {"*": _OF_MODULE}, "base?": {"*": (str, shape, Either([str, type(None)]))}},
}
_UNIT = {
    **{"name": str, "strategy": Either([str, type(None)]), "shards": number, "replicas": number},
    **{"parameters_over": number, "nested": bool, "shard_numels": [number], "dtypes": [str]},
}
_TENSOR = (str, shape, [number], shape, number, Either([type(None), [number]]))
_FILE = {"bytes": number, "header": number, "tensors": {"*": _TENSOR}}
INDEX = {
    **{"id": str, "world_size": number, "about": _ABOUT, "units": [_UNIT], "files": {"*": _FILE}},
    **{"optimizer": Either([type(None), OPTIMIZER]), "ranks": [_RANK]},
}


def misfit(value: Any, kind: Kind, place: str = "") -> str | None:
    """Return why ``value`` is not of ``kind``; None: it is. ``place``: its path, for the message."""
    if kind is ANY:
        return None
    if isinstance(kind, Either):
        found = [misfit(value, one, place) for one in kind]
        return None if None in found else found[-1]
    if isinstance(kind, list) and isinstance(value, list):
        return _first((one, kind[0], f"{place}[{i}]") for i, one in enumerate(value))
    if isinstance(kind, tuple) and isinstance(value, list) and len(value) == len(kind):
        return _first((*pair, f"{place}[{i}]") for i, pair in enumerate(zip(value, kind, strict=True)))
    if isinstance(kind, dict) and isinstance(value, dict):
        if "*" in kind:
            return _first((one, kind["*"], f"{place}.{name}") for name, one in value.items())
        absent = min((name for name in kind if name not in value and not name.endswith("?")), default=None)
        if absent is not None:
            return f"{place} has no `{absent}`"
        named = ((name.removesuffix("?"), its) for name, its in kind.items())
        return _first((value[name], its, f"{place}.{name}") for name, its in named if name in value)
    if isinstance(kind, list | tuple | dict):
        fits = False
    elif isinstance(kind, type):
        fits = type(value) is kind
    else:
        fits = kind(value) if callable(kind) else value == kind
    return None if fits else f"{place} is {reprlib.repr(value)}, expected {_called(kind)}"


def _first(parts: Iterable[tuple[Any, Kind, str]]) -> str | None:
    return next((why for part in parts if (why := misfit(*part)) is not None), None)


def _called(kind: Kind) -> str:
    if isinstance(kind, list | dict):
        return "a list" if isinstance(kind, list) else "an object"
    if isinstance(kind, tuple):
        return f"a list of {len(kind)}"
    return str(kind.__name__ if isinstance(kind, type) else kind.__doc__ if callable(kind) else repr(kind))
