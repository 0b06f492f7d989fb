"""Classify the values of an optimizer's state: is a tensor sharded like its parameter, or one value for the whole?

A ``Like`` has one element for each element of the parameter, and is cut and gathered with it. Other values are copied.
torch does not tell the two apart, so ``classify`` compares shapes over all parameters. A key is no ``Like`` if its
tensors have one shape for all parameters, or if their last or second last dimension is always 1 (Adafactor).
This knows no ranks. `optimizer_mapping.py` and checkpoints call it.
"""

import math
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.torch_private import ShardedTensor
from ..errors import StateError
from ..sharding.flat_param import FlatParam
from ..sharding.parameters import same_bytes
from ..unit.local_params import LocalParam, UnitParam
from .table import SteppedParam, Table

Shape = tuple[int, ...]


class Like(NamedTuple):
    """Stands for a tensor with one element for each element of the parameter; ``shape`` is the parameter's."""

    shape: Shape
    dtype: torch.dtype


class Scalar(NamedTuple):
    """Stands for a tensor without dimensions. ``device``: its type."""

    dtype: torch.dtype
    value: Any
    device: str

    def tensor(self) -> Tensor:
        return torch.tensor(self.value, dtype=self.dtype, device=self.device)


Described = dict[str, Any]  # key -> a Like, a Scalar, or the value itself


def copy_of(value: Tensor, to_cpu: bool) -> Tensor:
    """Return a detached copy, on the CPU or on ``value``'s device."""
    return value.detach().to("cpu" if to_cpu else value.device, copy=True)


def described(value: Any, whole: Shape | None) -> Any:
    """Return ``value`` as ranks send it: ``Like``, ``Scalar``, a CPU tensor, or itself.

    ``whole``: a tensor of this shape becomes a ``Like``; None or (): none does.
    """
    if not isinstance(value, Tensor):
        return value
    if whole and tuple(value.shape) == whole:
        return Like(whole, value.dtype)
    if value.dim() == 0:
        return Scalar(value.dtype, value.item(), "cpu" if value.is_cpu else value.device.type)
    return value.detach().cpu()


def shapes_of(values: Mapping[str, Any]) -> dict[str, Shape | None]:
    """Return ``shape_of`` for each value."""
    return {key: shape_of(value) for key, value in values.items()}


def keys_of_one_shape(states: Iterable[tuple[Shape, Mapping[str, Any]]]) -> set[str]:
    """Return the keys whose tensors have one shape for parameters of different shapes.

    Such tensors are no ``Like``, even where a parameter happens to have that shape.
    ``states``: for each parameter its shape and its state.
    """
    return _of_one_shape(_by_key((whole, shapes_of(values)) for whole, values in states))


def _by_key(states: Iterable[tuple[Shape, Mapping[str, Shape | None]]]) -> dict[str, set[tuple[Shape, Shape]]]:
    """Map each key to the pairs ``(shape of the parameter, shape of its tensor)``."""
    found: dict[str, set[tuple[Shape, Shape]]] = {}
    for whole, values in states:
        for key, shape in values.items():
            if shape is not None:
                found.setdefault(key, set()).add((whole, shape))
    return found


def _of_one_shape(shapes: Mapping[str, set[tuple[Shape, Shape]]]) -> set[str]:
    with_dims = {key: [pair for pair in pairs if pair[1]] for key, pairs in shapes.items()}
    return {key for key, pairs in with_dims.items() if len({own for _, own in pairs}) == 1 < len(pairs)}


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, NaN to itself too, and tensors bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype) and same_bytes(one.cpu(), other.cpu())
    if type(one) is not type(other):
        return False
    if isinstance(one, Scalar):
        return one.dtype == other.dtype and repr(one.value) == repr(other.value)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    try:
        if one is other or bool(one == other):
            return True
    except Exception:
        return False
    return bool(pickle.dumps(one) == pickle.dumps(other))


def difference(one: Described, other: Described) -> str | None:
    """Return the first key that one of them lacks, or whose values differ; None: there is none.

    Two ``Like`` differ only in dtype: their shapes are of different parameters.
    """
    for key in {**one, **other}:
        if key not in one or key not in other:
            return key
        mine, theirs = one[key], other[key]
        are_like = isinstance(mine, Like) and isinstance(theirs, Like) and mine.dtype == theirs.dtype
        if not are_like and not same(mine, theirs):
            return key
    return None


def classify(table: Table, state: Mapping[str, Mapping[str, Any]]) -> dict[str, Described]:
    """Return for each parameter and key a ``Like``, or the value itself (a ``Scalar`` for a scalar tensor).

    ``state``: first FQN -> key -> a tensor, or its ``described`` form; FQNs that are no parameters are left out.
    Raises: ValueError naming parameter and key, for a tensor whose shape does not fit its parameter, and for one made
    of some of the parameter's dimensions if no rank's optimizer steps the parameter whole.
    """
    held = {name: values for name, values in state.items() if name in table.by_name}
    shapes = {name: shapes_of(values) for name, values in held.items() if table.by_name[name].unit is not None}
    by_key = _by_key((table.by_name[name].shape, of_keys) for name, of_keys in shapes.items())
    constant = _of_one_shape(by_key)
    likes = _keys_like_params(by_key, constant)
    found: dict[str, Described] = {}
    for name, values in held.items():
        param = table.by_name[name]
        if not isinstance(param, UnitParam):
            found[name] = {key: _plain(value, shape_of(value)) for key, value in values.items()}
            continue
        found[name] = {}
        for key, value in values.items():
            shape = shapes[name][key]
            if shape is not None and key in likes and (shape or shape == param.shape):
                if shape != param.shape:
                    raise StateError(
                        f"optimizer state `{key}` of parameter `{name}` has shape {shape}, the parameter's is "
                        f"{param.shape}"
                    )
                found[name][key] = Like(shape, dtype_of(value))
            else:
                if shape and key not in constant and _is_cut(param) and _is_made_of(shape, param.shape):
                    raise StateError(
                        f"optimizer state `{key}` of parameter `{name}` has shape {shape}, made of the parameter's "
                        f"{param.shape}, which is cut here: load it where the parameter lies whole on a rank "
                        "(NO_SHARD, or `atomic`), or without this state"
                    )
                if shape and not _may_be_other(param, shape, constant, key):
                    raise StateError(
                        f"optimizer state `{key}` of parameter `{name}` has shape {shape}, which does not fit the "
                        f"parameter's {param.shape}"
                    )
                found[name][key] = _plain(value, shape)
    return found


Gather = tuple[FlatParam, str, torch.dtype]  # flat parameter, key, dtype: one collective


def by_gather(table: Table, found: Mapping[SteppedParam, Described]) -> list[tuple[Gather, list[SteppedParam]]]:
    """Return the gathers, sorted, with the stepped tensors of each.

    ``found`` has the same items on all ranks, so the result is the same: one collective for each item.
    """
    members: dict[Gather, list[SteppedParam]] = {}
    for one, values in found.items():
        for key, value in values.items():
            if isinstance(value, Like) and one.flat_param is not None:
                members.setdefault((one.flat_param, key, value.dtype), []).append(one)
    order = {flat_param: number for number, flat_param in enumerate(table.flat_params)}
    return sorted(members.items(), key=lambda item: (order[item[0][0]], item[0][1], str(item[0][2])))


def shape_of(value: Any) -> Shape | None:
    """Return the shape of a tensor, ``Like`` or ``Scalar``; None for other values."""
    if isinstance(value, ShardedTensor):  # its attributes take 0.1 ms each
        return tuple(value.metadata().size)
    if isinstance(value, Tensor | Like):
        return tuple(value.shape)
    return () if isinstance(value, Scalar) else None


def dtype_of(value: Any) -> torch.dtype:
    """Return the dtype of a tensor or of a ``Like``."""
    found: torch.dtype = value.metadata().tensor_properties.dtype if isinstance(value, ShardedTensor) else value.dtype
    return found


def _plain(value: Any, shape: Shape | None) -> Any:
    return described(value, (1,)) if shape == () and isinstance(value, Tensor) else value


def _keys_like_params(shapes: Mapping[str, set[tuple[Shape, Shape]]], constant: set[str]) -> set[str]:
    """Return the keys whose tensors are ``Like`` their parameters. ``constant``: the result of ``_of_one_shape``."""
    found = set()
    for key, pairs in shapes.items():
        with_dims = [pair for pair in pairs if pair[0]]
        if key in constant or _are_factors(with_dims):
            continue
        if any(one == other for one, other in with_dims) or (not with_dims and key != "step"):
            found.add(key)
    return found


def _are_factors(pairs: list[tuple[Shape, Shape]]) -> bool:
    """Whether all tensors have the parameter's shape with a 1 in the last, or in all in the second last, dimension."""
    return any(one != other for one, other in pairs) and any(
        all(len(one) > 1 and other == (*one[: len(one) + d], 1, *one[len(one) + d + 1 :]) for one, other in pairs)
        for d in (-1, -2)
    )


def _is_made_of(shape: Shape, whole: Shape) -> bool:
    """Whether ``shape`` is ``whole`` with some dimensions left out or replaced by 1."""
    sizes = iter(whole)
    kept = [one for one in shape if one != 1]
    fits = len(whole) > 1 and len(shape) <= len(whole) and shape != whole
    return fits and len(kept) > 0 and all(one in sizes for one in kept)


def _is_cut(param: UnitParam) -> bool:
    """Whether no rank's optimizer steps exactly this parameter, whole and in its own shape."""
    flat_param = param.flat_param
    if not flat_param.use_orig_params:
        return flat_param.is_sharded or len(flat_param.originals) > 1
    begin, length = flat_param.layout.offsets[param.number], flat_param.layout.shard_numel
    numel = math.prod(param.shape)
    ends_there = numel == 0 or begin // length == (begin + numel - 1) // length
    return flat_param.is_sharded and not (flat_param.in_rows[param.number] and ends_there)


def _may_be_other(param: LocalParam, shape: Shape, constant: Iterable[str], key: str) -> bool:
    """Whether ``shape`` may differ from the parameter's on purpose; else the state is probably of another model."""
    if key in constant or len(shape) != len(param.shape):
        return True
    return all(one in (1, other) for one, other in zip(shape, param.shape, strict=True))
