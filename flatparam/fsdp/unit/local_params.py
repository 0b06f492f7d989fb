"""The part of each parameter and buffer of a model that this rank holds.

State dicts, checkpoints and loads iterate over ``local_params_of`` and need to know no unit. This file writes no
parameter, issues no collective, and knows no format of states.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from ...common.dense import Dense
from ...common.tensors import is_dense, refuse_freed
from ...common.torch_private import FSDPExtensions
from ..names import clean_tensor_name, join
from ..sharding.flat_param import FlatParam, ShardSlice
from ..sharding.parameters import ParamInfo, in_order
from .unit import Unit, units_of


@dataclass(eq=False)
class LocalParam:
    """One parameter or buffer of the unwrapped model. Without a unit this rank holds all of it.

    This rank holds its elements ``[start, start + numel)``, counted in its memory order.

    - ``names``: all its names in the model.
    - ``owner``: the tensor that an optimizer steps: the parameter itself, or its flat parameter.
    - ``shape``, ``stride``: of the whole parameter.
    - ``unit``, ``flat_param``, ``shard_slice``: None, except in a ``UnitParam``.
    """

    names: list[str]
    owner: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    number: int = 0
    start: int = 0
    unit: Unit | None = None
    flat_param: FlatParam | None = None
    shard_slice: ShardSlice | None = None
    is_buffer: bool = False
    is_managed: ClassVar[bool] = False  # whether a unit, or a handle, may hold its elements on several ranks
    _dense: Dense | None = None  # no cached_property: it is slower, and models have thousands
    _flat: Tensor | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        """The number of elements that this rank holds."""
        return math.prod(self.shape)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold different elements."""
        return False

    @property
    def offset(self) -> int:
        """The first of its elements in ``owner``'s memory, counted in elements."""
        return 0

    @property
    def has_values(self) -> bool:
        """False for a parameter from ``defer_init`` that no checkpoint has filled."""
        return True

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
        if self.owner.is_meta or not is_dense(self.owner) or self.owner.is_conj() or self.owner.is_neg():
            where = "on the meta device" if self.owner.is_meta else "not dense, or a conjugate or negative view"
            raise ValueError(f"`{self.name}` is {where}: replace it first")
        refuse_freed(self.owner, f"`{self.name}`")
        return self.owner.detach().as_strided((self.numel,), (1,))

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this rank's elements of ``whole``, a tensor of the whole parameter's shape: 1-D, in memory order."""
        return in_order(whole.detach(), self.stride).narrow(0, self.start, self.numel)


class UnitParam(LocalParam):
    """A parameter of a unit: ``flat_param.originals[number]``. ``shard_slice``: its place in the shard."""

    unit: Unit  # no fields of a dataclass: keywords would double the time to make one
    flat_param: FlatParam
    shard_slice: ShardSlice
    is_managed = True

    @property
    def numel(self) -> int:
        return max(0, self.shard_slice.numel)

    @property
    def original(self) -> ParamInfo:
        return self.shard_slice.original

    @property
    def extension(self) -> FSDPExtensions | None:
        """The extension that cuts and gathers its rows in sharded states; None: flatparam does."""
        return self.flat_param.extension_of(self.original)

    @property
    def is_sharded(self) -> bool:
        return self.flat_param.is_sharded

    @property
    def offset(self) -> int:
        return 0 if self.flat_param.use_orig_params else self.shard_slice.start

    @property
    def has_values(self) -> bool:
        return self.original.template is None

    def _find_flat(self) -> Tensor:
        return self.flat_param.flat.detach().narrow(0, self.shard_slice.start, self.numel)

    def piece_of(self, shard: Tensor) -> Tensor:
        """The elements of this parameter in ``shard``, a tensor of the shard's length, in the shape for optimizers."""
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
        for managed in params_of(unit, paths, name_of):
            if unit.options.use_orig_params:
                alone[id(managed.owner)] = managed
            else:
                flat.add(id(managed.owner))
            yield managed
    taken = managed_places(places)
    rest: list[LocalParam] = []
    for path, inner in module.named_modules(remove_duplicate=False):
        tensors: Iterable[tuple[str, Tensor | None]] = inner._parameters.items()
        if buffers:
            kept = ((n, b) for n, b in inner._buffers.items() if n not in inner._non_persistent_buffers_set)
            tensors = itertools.chain(tensors, kept)
        for name, tensor in tensors:
            if tensor is None or (inner, name) in taken or id(tensor) in flat:
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


def params_of(
    unit: Unit, paths: Iterable[str], name_of: Callable[[str], str] = clean_tensor_name
) -> Iterator[UnitParam]:
    """Yield this rank's part of each parameter of ``unit``, which is at ``paths``, in the order of its layouts."""
    for flat_param in unit.flat_params:
        for number, (shard_slice, piece) in enumerate(zip(flat_param.shard_slices(), flat_param.pieces, strict=True)):
            original = shard_slice.original
            names = [name_of(join(path, fqn)) for path in paths for fqn in original.fqns]
            owner = original.param if flat_param.use_orig_params else flat_param.flat
            start = piece.intra_param_start_idx or 0
            held = names, owner, tuple(original.shape), original.stride, number, start
            yield UnitParam(*held, unit, flat_param, shard_slice)


def refuse_forms(held: Iterable[LocalParam], what: str, instead: str) -> None:
    """Raises: ValueError naming a parameter of a unit that is a DTensor or has another ``Form``."""
    for one in held:
        if isinstance(one, UnitParam) and one.original.form is not None:
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
