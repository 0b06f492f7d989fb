"""The part of each parameter and buffer of a model that this rank holds.

State dicts, checkpoints and loads iterate over ``local_params_of`` and need to know no unit. This file writes no
parameter, issues no collective, and knows no format of states.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch.nn as nn
from torch import Tensor

from ...common.dense import Dense
from ...common.tensors import is_dense, refuse_freed
from ..names import clean_tensor_name, join
from ..sharding.flat_param import FlatParam, ShardSlice
from ..sharding.parameters import ParamInfo
from .unit import Unit, units_of


@dataclass(eq=False)
class LocalParam:
    """One parameter or buffer of the unwrapped model.

    This rank holds its elements ``[start, start + numel)``, counted in its memory order.

    - ``names``: all its names in the model.
    - ``owner``: the tensor that an optimizer steps: the parameter itself, or its flat parameter.
    - ``shape``, ``stride``: of the whole parameter.
    - ``unit``, ``flat_param``, ``number``: it is ``flat_param.originals[number]`` of ``unit``.
    - ``shard_slice``: its place in the shard. Without a unit ``unit``, ``flat_param`` and this are None.
    """

    names: list[str]
    owner: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    unit: Unit | None = None
    flat_param: FlatParam | None = None
    number: int = 0
    shard_slice: ShardSlice | None = None
    start: int = 0
    is_buffer: bool = False
    _dense: Dense | None = None  # no cached_property: it is slower, and models have thousands
    _flat: Tensor | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        """The number of elements that this rank holds."""
        return math.prod(self.shape) if self.shard_slice is None else max(0, self.shard_slice.numel)

    @property
    def original(self) -> ParamInfo:
        """The original parameter. Only for a parameter of a unit."""
        assert self.shard_slice is not None
        return self.shard_slice.original

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold different elements."""
        return self.flat_param is not None and self.flat_param.is_sharded

    @property
    def offset(self) -> int:
        """The first of its elements in ``owner``'s memory, counted in elements."""
        return (
            0
            if self.shard_slice is None or self.flat_param is None or self.flat_param.use_orig_params
            else self.shard_slice.start
        )

    @property
    def has_values(self) -> bool:
        """False for a parameter from ``defer_init`` that no checkpoint has filled."""
        return self.shard_slice is None or self.shard_slice.original.template is None

    @property
    def dense(self) -> Dense:
        """The memory order of the whole parameter."""
        if self._dense is None:
            self._dense = Dense.of(self.shape, self.stride)
        return self._dense

    @property
    def flat(self) -> Tensor:
        """The elements that this rank holds, 1-D, in the same memory.

        Raises: ValueError for a tensor on the meta device, that is not dense, or whose storage was freed.
        """
        if self._flat is None:
            self._flat = self._find_flat()
        return self._flat

    def _find_flat(self) -> Tensor:
        if self.shard_slice is not None and self.flat_param is not None:
            return self.flat_param.flat.detach().narrow(0, self.shard_slice.start, self.numel)
        if self.owner.is_meta or not is_dense(self.owner) or self.owner.is_conj() or self.owner.is_neg():
            where = "on the meta device" if self.owner.is_meta else "not dense, or a conjugate or negative view"
            raise ValueError(f"`{self.name}` is {where}: replace it first")
        refuse_freed(self.owner, f"`{self.name}`")
        return self.owner.detach().as_strided((self.numel,), (1,))

    def piece_of(self, shard: Tensor) -> Tensor:
        """The elements of this parameter in ``shard``, a tensor of the shard's length, in the shape for optimizers."""
        assert self.shard_slice is not None
        piece = self.shard_slice.of(shard)
        return piece.view(1) if self.is_sharded and not piece.dim() else piece


# (name, tensor of no unit) -> its LocalParam if something else has sharded it, else None
Other = Callable[[str, Tensor], LocalParam | None]


def local_params_of(
    module: nn.Module,
    *,
    buffers: bool = True,
    other: Other = lambda name, tensor: None,
    name_of: Callable[[str], str] = clean_tensor_name,
) -> Iterator[LocalParam]:
    """Yield this rank's part of ``module``: parameters of units in the order of their layouts, then all other tensors.

    Other tensors are parameters without a unit and, with ``buffers``, persistent buffers. They are whole unless
    ``other`` returns a part. ``name_of``: maps a name in ``module`` to the name in ``LocalParam.names``.
    The user's writes are taken into the shards of a unit before its parameters are yielded.
    """
    places = unit_paths(module)
    alone: dict[int, LocalParam] = {}  # id of an owner that holds no other parameter -> its LocalParam
    flat: set[int] = set()  # ids of the flat parameters that modules register
    for unit, paths in places.items():
        unit.sync_user_writes()
        for flat_param in unit.flat_params:
            for one in _of_flat_param(unit, paths, flat_param, name_of):
                if flat_param.use_orig_params:
                    alone[id(one.owner)] = one
                else:
                    flat.add(id(one.owner))
                yield one
    managed = managed_places(places)
    rest: list[LocalParam] = []
    for path, inner in module.named_modules(remove_duplicate=False):
        tensors: Iterable[tuple[str, Tensor | None]] = inner._parameters.items()
        if buffers:
            kept = ((n, b) for n, b in inner._buffers.items() if n not in inner._non_persistent_buffers_set)
            tensors = itertools.chain(tensors, kept)
        for name, tensor in tensors:
            if tensor is None or (inner, name) in managed or id(tensor) in flat:
                continue
            key = name_of(join(path, name))
            if id(tensor) in alone:
                alone[id(tensor)].names.append(key)
                continue
            one = other(key, tensor) or LocalParam([key], tensor, tuple(tensor.shape), tuple(tensor.stride()))
            one.is_buffer = not isinstance(tensor, nn.Parameter)
            alone[id(tensor)] = one
            rest.append(one)
    yield from rest


def _of_flat_param(
    unit: Unit, paths: list[str], flat_param: FlatParam, name_of: Callable[[str], str]
) -> Iterator[LocalParam]:
    for number, (shard_slice, piece) in enumerate(zip(flat_param.shard_slices(), flat_param.pieces, strict=True)):
        original = shard_slice.original
        names = [name_of(join(path, fqn)) for path in paths for fqn in original.fqns]
        owner = original.param if flat_param.use_orig_params else flat_param.flat
        start = piece.intra_param_start_idx or 0
        yield LocalParam(
            names, owner, tuple(original.shape), original.stride, unit, flat_param, number, shard_slice, start
        )


def refuse_forms(held: Iterable[LocalParam], what: str, instead: str) -> None:
    """Raises: ValueError naming a parameter of a unit that is a DTensor or has another ``Form``."""
    for one in held:
        if one.shard_slice is not None and one.original.form is not None:
            raise ValueError(f"{what}: `{one.name}` is stored as {one.original.form}: {instead}")


def units_in(module: nn.Module) -> Iterator[tuple[str, Unit]]:
    """Yield the units in ``module`` with their paths; a unit at several paths comes several times."""
    for path, inner in module.named_modules(remove_duplicate=False):
        yield from ((path, unit) for unit in units_of([inner]))


def unit_paths(module: nn.Module) -> dict[Unit, list[str]]:
    """Map each unit in ``module`` to all its paths."""
    found: dict[Unit, list[str]] = {}
    for path, unit in units_in(module):
        found.setdefault(unit, []).append(path)
    return found


def managed_places(units: Iterable[Unit]) -> set[tuple[nn.Module, str]]:
    """The places, (module, name), of the original and flat parameters of ``units``."""
    return {place for unit in units for place in (*unit.places, *((unit.module, name) for name in unit.flat_names()))}
