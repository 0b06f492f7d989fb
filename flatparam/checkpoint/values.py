"""Encode Python values as JSON, with their tensors apart, and decode them: ``extra``, and states of optimizers.

A value that JSON lacks becomes an object with one key that begins with ``$``. Nothing is ever unpickled.
"""

import collections
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..common.tensors import refuse_freed
from .errors import CheckpointError
from .files import NAMES

_COUNTER, _DICT, _DTYPE, _FLOAT = "$counter", "$dict", "$dtype", "$float"
_INT, _TENSOR, _TUPLE = "$int", "$tensor", "$tuple"
MOST_DEPTH = 150  # nested lists and objects: decoding recurses once for each
_WIDE = 2**53  # larger integers become text: other readers of JSON make floats of them
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def encode(value: Any, path: str, tensors: dict[str, Tensor], prefix: str = "") -> Any:
    """Return ``value`` for JSON, and put its tensors into ``tensors`` under their paths, detached, not copied.

    ``path``: the path of ``value``, for names and messages; ``prefix``: goes before the names. Raises: CheckpointError
    naming the path of a value that is no tensor, number, str, bool, None, dtype, or list, tuple or dict of those.
    """
    try:
        found = _encode(value, path, tensors, prefix)
        if not _is_deeper(found, MOST_DEPTH):
            return found
    except RecursionError:
        pass
    raise CheckpointError(f"`{path}` is nested deeper than {MOST_DEPTH}: a checkpoint has no such values")


def _is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects in ``value`` are nested deeper than ``most``."""
    level = [value]
    while level and most >= 0:
        inside = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level, most = [item for items in inside for item in items], most - 1
    return bool(level)


def _encode(value: Any, path: str, tensors: dict[str, Tensor], prefix: str) -> Any:
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if abs(value) < _WIDE else {_INT: hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value)}
    if type(value) in (Tensor, torch.nn.Parameter):
        if value.layout != torch.strided:
            raise CheckpointError(f"`{path}` is a tensor of layout {value.layout}: give it dense, or its parts")
        refuse_freed(value, f"`{path}`")
        if value.dtype not in NAMES:
            raise CheckpointError(f"`{path}` is of {value.dtype}, which no safetensors file has")
        name = prefix + path
        while name in tensors:
            name += "'"
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if type(value) in (list, torch.Size, tuple):
        items = [_encode(item, f"{path}[{i}]", tensors, prefix) for i, item in enumerate(value)]
        return {_TUPLE: items} if type(value) is tuple else items
    if type(value) in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict):
        return _encode_dict(value, path, tensors, prefix)
    raise CheckpointError(
        f"`{path}` is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint has tensors, numbers, str, "
        "bool, None, and lists, tuples and dicts of those; give its state_dict(), or the numbers in it"
    )


def _encode_dict(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor], prefix: str) -> Any:
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    if plain and type(value) is not collections.Counter:
        return {key: _encode(item, f"{path}.{key}", tensors, prefix) for key, item in value.items()}
    for key in value:
        if type(key) not in (str, int, float, bool, tuple, type(None)):
            raise CheckpointError(f"`{path}` has the key {key!r}: keys are str, numbers, bool, None or tuples of those")
    pairs = [[_encode(one, f"{path}.{key}", tensors, prefix) for one in (key, item)] for key, item in value.items()]
    return {_COUNTER if type(value) is collections.Counter else _DICT: pairs}


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that ``encode`` was given. ``tensors``: by path. Raises: CheckpointError for an unknown form."""
    if _is_deeper(value, MOST_DEPTH):
        raise CheckpointError(f"a value that no checkpoint has: nested deeper than {MOST_DEPTH}")
    return _decode(value, tensors)


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: _decode(item, tensors) for key, item in value.items()}
    [(kind, content)] = value.items()
    try:
        if kind == _TUPLE:
            return tuple(_decode(item, tensors) for item in content)
        if kind in (_DICT, _COUNTER):
            found = {_decode(key, tensors): _decode(item, tensors) for key, item in content}
            return collections.Counter(found) if kind == _COUNTER else found
        if kind == _INT:
            return int(content, 0)
        if kind == _FLOAT:
            return float(content)
        return _DTYPES[content] if kind == _DTYPE else {_TENSOR: tensors}[kind][content]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"a value that no checkpoint has: {kind} {content!r:.100}") from error
