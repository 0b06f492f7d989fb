"""What this rank holds of each parameter and buffer of a model: what states, checkpoints and loads work on."""

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
    """One parameter or buffer of the unwrapped model: elements ``[start, start + numel)`` of it, in its memory order.

    ``names``: all that it has there; ``owner``: the tensor that the optimizer steps: itself, or its flat parameter;
    ``shape`` and ``stride`` of the whole; ``unit``: what manages it, if anything does, as original ``number`` of
    ``flat_param``; ``shard_slice``: where the shard has it.
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
    _dense: Dense | None = None  # cached properties take longer, where there are thousands
    _flat: Tensor | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        """How many of its elements are here."""
        return math.prod(self.shape) if self.shard_slice is None else max(0, self.shard_slice.numel)

    @property
    def original(self) -> ParamInfo:
        """Of one that a unit manages."""
        assert self.shard_slice is not None
        return self.shard_slice.original

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold different elements."""
        return self.flat_param is not None and self.flat_param.is_sharded

    @property
    def offset(self) -> int:
        """Where in ``owner``'s memory its elements begin."""
        return (
            0
            if self.shard_slice is None or self.flat_param is None or self.flat_param.use_orig_params
            else self.shard_slice.start
        )

    @property
    def has_values(self) -> bool:
        return self.shard_slice is None or self.shard_slice.original.template is None

    @property
    def dense(self) -> Dense:
        """The order of its elements."""
        if self._dense is None:
            self._dense = Dense.of(self.shape, self.stride)
        return self._dense

    @property
    def flat(self) -> Tensor:
        """The memory of its elements here, 1-D. Raises: ValueError for one on the meta device, or not dense."""
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
        """What a tensor like the shard has of it, in the shape that an optimizer sees."""
        assert self.shard_slice is not None
        piece = self.shard_slice.of(shard)
        return piece.view(1) if self.is_sharded and not piece.dim() else piece


Other = Callable[[str, Tensor], LocalParam | None]


def local_params_of(
    module: nn.Module,
    *,
    buffers: bool = True,
    other: Other = lambda name, tensor: None,
    name_of: Callable[[str], str] = clean_tensor_name,
) -> Iterator[LocalParam]:
    """What this rank holds of ``module``: first what units manage, in the order of their layouts, then the rest, whole.

    The rest is parameters that no unit manages and, with ``buffers``, persistent buffers. ``other``: makes what is held
    of such a tensor, if something else has cut it. ``name_of``: gives each name in ``module`` the one that it has here.
    """
    places = unit_paths(module)
    alone: dict[int, LocalParam] = {}  # by what is theirs alone
    flat: set[int] = set()
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
    """Raises: ValueError naming a DTensor, or another parameter in a form of its own, of which this rank has a part."""
    for one in held:
        if one.shard_slice is not None and one.original.form is not None:
            raise ValueError(f"{what}: `{one.name}` is in a form of its own, {one.original.form}: {instead}")


def units_in(module: nn.Module) -> Iterator[tuple[str, Unit]]:
    """The units in ``module``, each under every path that it has."""
    for path, inner in module.named_modules(remove_duplicate=False):
        yield from ((path, unit) for unit in units_of([inner]))


def unit_paths(module: nn.Module) -> dict[Unit, list[str]]:
    """The same by unit."""
    found: dict[Unit, list[str]] = {}
    for path, unit in units_in(module):
        found.setdefault(unit, []).append(path)
    return found


def managed_places(units: Iterable[Unit]) -> set[tuple[nn.Module, str]]:
    """Where modules have parameters of ``units``, original or flat, and by which names."""
    return {place for unit in units for place in (*unit.places, *((unit.module, name) for name in unit.flat_names()))}
