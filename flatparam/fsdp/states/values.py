"""What an optimizer keeps for a parameter: tensors like it, which are cut and gathered as it is, and other values."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.torch_private import ShardedTensor
from ..errors import StateError
from ..sharding.parameters import same_bytes
from ..unit.local_params import LocalParam
from .table import SteppedParam, Table

Shape = tuple[int, ...]


class Like(NamedTuple):
    """A tensor that has an element for each of the parameter's."""

    shape: Shape
    dtype: torch.dtype


class Scalar(NamedTuple):
    """A tensor without dimensions."""

    dtype: torch.dtype
    value: Any
    device: str

    def tensor(self) -> Tensor:
        return torch.tensor(self.value, dtype=self.dtype, device=self.device)


Described = dict[str, Any]  # by key: a Like, a Scalar, or the value itself


def copy_of(value: Tensor, to_cpu: bool) -> Tensor:
    """With memory of its own, detached: on the CPU, or where ``value`` is."""
    return value.detach().to("cpu" if to_cpu else value.device, copy=True)


def described(value: Any, whole: Shape | None) -> Any:
    """``value`` as other ranks are told of it. ``whole``: the shape of a tensor that is like the parameter, if any."""
    if not isinstance(value, Tensor):
        return value
    if whole and tuple(value.shape) == whole:
        return Like(whole, value.dtype)
    if value.dim() == 0:
        return Scalar(value.dtype, value.item(), "cpu" if value.is_cpu else value.device.type)
    return value.detach().cpu()


def shapes_of(values: Mapping[str, Any]) -> dict[str, Shape | None]:
    """``shape_of`` each of what an optimizer keeps for a parameter."""
    return {key: shape_of(value) for key, value in values.items()}


def keys_of_one_shape(states: Iterable[tuple[Shape, Mapping[str, Shape | None]]]) -> set[str]:
    """Keys whose tensors have one shape for parameters of several: they are like none, though one may have that shape.

    ``states``: for each parameter the shape of a tensor that is like it, and ``shapes_of`` what is kept for it.
    """
    return _of_one_shape(_by_key(states))


def _by_key(states: Iterable[tuple[Shape, Mapping[str, Shape | None]]]) -> dict[str, set[tuple[Shape, Shape]]]:
    """Of the tensors under each key: of a parameter of which shape, and its own."""
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


def classify(table: Table, state: Mapping[str, Mapping[str, Any]]) -> dict[str, Described]:
    """Which values of a full state are like their parameters, and the others: by the parameter's name and key.

    ``state`` has tensors, or what ``described`` made of them. Raises: ValueError naming parameter and key for a tensor
    that is like another parameter.
    """
    held = {name: values for name, values in state.items() if name in table.by_name}
    shapes = {name: shapes_of(values) for name, values in held.items() if table.by_name[name].flat_param is not None}
    by_key = _by_key((table.by_name[name].shape, of_keys) for name, of_keys in shapes.items())
    constant = _of_one_shape(by_key)
    likes = _keys_like_params(by_key, constant)
    found: dict[str, Described] = {}
    for name, values in held.items():
        param = table.by_name[name]
        if name not in shapes:
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


def by_gather(found: Mapping[SteppedParam, Described]) -> list[tuple[tuple[int, str, torch.dtype], list[SteppedParam]]]:
    """What one gather brings: the flat parameter's number, key and dtype, and whose tensors. Alike on all ranks."""
    members: dict[tuple[int, str, torch.dtype], list[SteppedParam]] = {}
    for one, values in found.items():
        for key, value in values.items():
            if isinstance(value, Like) and one.place is not None:
                members.setdefault((one.place[0], key, value.dtype), []).append(one)
    return sorted(members.items(), key=lambda item: (*item[0][:2], str(item[0][2])))


def shape_of(value: Any) -> Shape | None:
    """The shape of a tensor, or of what stands for one; None: it is another value."""
    if isinstance(value, ShardedTensor):  # whose attributes take 0.1 ms each
        return tuple(value.metadata().size)
    if isinstance(value, Tensor | Like):
        return tuple(value.shape)
    return () if isinstance(value, Scalar) else None


def dtype_of(value: Any) -> torch.dtype:
    """The dtype of a tensor, or of a ``Like``."""
    found: torch.dtype = value.metadata().tensor_properties.dtype if isinstance(value, ShardedTensor) else value.dtype
    return found


def _plain(value: Any, shape: Shape | None) -> Any:
    return described(value, (1,)) if shape == () and isinstance(value, Tensor) else value


def _keys_like_params(shapes: Mapping[str, set[tuple[Shape, Shape]]], constant: set[str]) -> set[str]:
    """Keys whose tensors have the shapes of parameters. ``constant``: those that have one shape for all of them."""
    found = set()
    for key, pairs in shapes.items():
        with_dims = [pair for pair in pairs if pair[0]]
        if key in constant or _are_factors(with_dims):
            continue
        if any(one == other for one, other in with_dims) or (not with_dims and key != "step"):
            found.add(key)
    return found


def _are_factors(pairs: list[tuple[Shape, Shape]]) -> bool:
    """Whether all values are like their parameters but for the last dimension, or the one before, which is 1."""
    return any(one != other for one, other in pairs) and any(
        all(len(one) > 1 and other == (*one[: len(one) + d], 1, *one[len(one) + d + 1 :]) for one, other in pairs)
        for d in (-1, -2)
    )


def _is_made_of(shape: Shape, whole: Shape) -> bool:
    """Whether ``shape`` is ``whole`` with dimensions left out, or 1 in place of them."""
    sizes = iter(whole)
    kept = [one for one in shape if one != 1]
    fits = len(whole) > 1 and len(shape) <= len(whole) and shape != whole
    return fits and len(kept) > 0 and all(one in sizes for one in kept)


def _is_cut(param: LocalParam) -> bool:
    """Whether no optimizer has all of it, in its own shape and nothing else."""
    flat_param = param.flat_param
    assert flat_param is not None
    if not flat_param.use_orig_params:
        return flat_param.is_sharded or len(flat_param.originals) > 1
    begin, length = flat_param.layout.offsets[param.number], flat_param.layout.shard_numel
    numel = math.prod(param.shape)
    ends_there = numel == 0 or begin // length == (begin + numel - 1) // length
    return flat_param.is_sharded and not (flat_param.in_rows[param.number] and ends_there)


def _may_be_other(param: LocalParam, shape: Shape, constant: Iterable[str], key: str) -> bool:
    """Whether a tensor may be of another shape than its parameter by intent, and not that of another model."""
    if key in constant or len(shape) != len(param.shape):
        return True
    return all(one in (1, other) for one, other in zip(shape, param.shape, strict=True))
