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
from ..sharding.flat_param import Here, Segment
from ..sharding.parameters import Original
from .unit import Unit, units_of


@dataclass(eq=False)
class Held:
    """One parameter or buffer of the unwrapped model: elements ``[start, start + numel)`` of it, in its memory order.

    ``names``: all that it has there; ``owner``: what an optimizer has in its place: itself or the flat parameter;
    ``shape`` and ``stride`` of the whole; ``unit``: what manages it, if anything does, as original ``number`` of
    ``segment``; ``here``: where the shard has it.
    """

    names: list[str]
    owner: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    unit: Unit | None = None
    segment: Segment | None = None
    number: int = 0
    here: Here | None = None
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
        return math.prod(self.shape) if self.here is None else max(0, self.here.numel)

    @property
    def original(self) -> Original:
        """Of one that a unit manages."""
        assert self.here is not None
        return self.here.original

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold different elements."""
        return self.segment is not None and self.segment.is_sharded

    @property
    def offset(self) -> int:
        """Where in ``owner``'s memory its elements begin."""
        return 0 if self.here is None or self.segment is None or self.segment.use_orig_params else self.here.start

    @property
    def has_values(self) -> bool:
        return self.here is None or self.here.original.template is None

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
        if self.here is not None and self.segment is not None:
            return self.segment.flat.detach().narrow(0, self.here.start, self.numel)
        if self.owner.is_meta or not is_dense(self.owner) or self.owner.is_conj() or self.owner.is_neg():
            where = "on the meta device" if self.owner.is_meta else "not dense, or a conjugate or negative view"
            raise ValueError(f"`{self.name}` is {where}: replace it first")
        refuse_freed(self.owner, f"`{self.name}`")
        return self.owner.detach().as_strided((self.numel,), (1,))

    def piece_of(self, shard: Tensor) -> Tensor:
        """What a tensor like the shard has of it, in the shape that an optimizer sees."""
        assert self.here is not None
        piece = self.here.of(shard)
        return piece.view(1) if self.is_sharded and not piece.dim() else piece


Other = Callable[[str, Tensor], Held | None]


def held_by(
    module: nn.Module,
    *,
    buffers: bool = True,
    other: Other = lambda name, tensor: None,
    name_of: Callable[[str], str] = clean_tensor_name,
) -> Iterator[Held]:
    """What this rank holds of ``module``: first what units manage, in the order of their layouts, then the rest, whole.

    The rest is parameters that no unit manages and, with ``buffers``, persistent buffers. ``other``: makes what is held
    of such a tensor, if something else has cut it. ``name_of``: gives each name in ``module`` the one that it has here.
    """
    places = unit_paths(module)
    alone: dict[int, Held] = {}  # by what is theirs alone
    flat: set[int] = set()
    for unit, paths in places.items():
        unit.look_over()
        for segment in unit.segments:
            for one in _of_segment(unit, paths, segment, name_of):
                if segment.use_orig_params:
                    alone[id(one.owner)] = one
                else:
                    flat.add(id(one.owner))
                yield one
    managed = managed_places(places)
    rest: list[Held] = []
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
            one = other(key, tensor) or Held([key], tensor, tuple(tensor.shape), tuple(tensor.stride()))
            one.is_buffer = not isinstance(tensor, nn.Parameter)
            alone[id(tensor)] = one
            rest.append(one)
    yield from rest


def _of_segment(unit: Unit, paths: list[str], segment: Segment, name_of: Callable[[str], str]) -> Iterator[Held]:
    for number, (here, piece) in enumerate(zip(segment.here(), segment.pieces, strict=True)):
        original = here.original
        names = [name_of(join(path, fqn)) for path in paths for fqn in original.fqns]
        owner = original.param if segment.use_orig_params else segment.flat
        start = piece.intra_param_start_idx or 0
        yield Held(names, owner, tuple(original.shape), original.stride, unit, segment, number, here, start)


def refuse_forms(held: Iterable[Held], what: str, instead: str) -> None:
    """Raises: ValueError naming a DTensor, or another parameter in a form of its own, of which this rank has a part."""
    for one in held:
        if one.here is not None and one.original.form is not None:
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
