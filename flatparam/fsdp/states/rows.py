"""Sharded form: cut a whole tensor into this rank's rows, and gather whole tensors from the rows of all ranks.

Rows are cut along the first dimension as ``torch.chunk`` cuts them: a rank has ``ceil(rows / ranks)`` rows, the last
ranks fewer or none. They are a ``DTensor`` if the unit was made with a device mesh, else a ``ShardedTensor``.
`model.py` and `optimizer.py` call this. A tensor that torch's tensor parallelism has split already goes through its
extension; such a tensor may be whole for this unit's ranks (``is_whole``).
"""

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

from ... import _C
from ...common.collectives import ranks_of
from ...common.tensors import as_sent, row_major
from ...common.torch_private import Shard, ShardedTensor, _create_chunk_sharded_tensor, torch_extensions
from ..desync import checked_collectives, torch_collectives
from ..errors import StateError
from ..sharding.flat_param import FlatParam
from ..sharding.parameters import row_numel
from ..unit.local_params import LocalParam, UnitParam
from ..unit.unit import Unit
from .loading import Values, agree_on_loading
from .optimizer_mapping import Fetch, by_first_name
from .table import Table
from .values import Like, copy_of, dtype_of, shape_of

# mesh -> rank -> its place in each dimension
_places: weakref.WeakKeyDictionary[DeviceMesh, dict[int, list[int]]] = weakref.WeakKeyDictionary()


def is_rows(value: Any) -> bool:
    """Whether ``value`` is a ShardedTensor or a DTensor."""
    return isinstance(value, ShardedTensor | DTensor)


def has_rows(shape: tuple[int, ...], param: LocalParam) -> bool:
    """Whether a value of ``shape`` is cut into rows. Scalars, empty and unsharded ones are whole on each rank."""
    return param.is_sharded and bool(shape) and math.prod(shape) > 0


def cut_rows(param: UnitParam, whole: Tensor, *, to_cpu: bool) -> Any:
    """Return a copy of this rank's rows of ``whole``, or of all of it where ``has_rows`` is false.

    No communication by flatparam. An extension may communicate, over the ranks of its own mesh dimension.
    """
    flat_param, extension = param.flat_param, param.extension
    whole, placement = whole.detach(), flat_param.placement
    if not has_rows(tuple(whole.shape), param):
        return copy_of(whole, to_cpu)
    devices = 1 if whole.is_cpu else torch.accelerator.device_count()
    group: Any = placement.optim
    rows: Any
    if extension is not None and placement.mesh is not None:
        rows = torch_extensions._ext_chunk_dtensor(whole, placement.rank, placement.mesh, extension)
    elif extension is not None:
        rows = torch_extensions._ext_chunk_tensor(whole, placement.rank, placement.shards, devices, group, extension)
    elif placement.mesh is not None:
        first, last = _rows_of(whole.shape[0], _cuts_of(flat_param, dist.get_rank()))
        mine = whole.narrow(0, first, last - first).clone(memory_format=torch.contiguous_format)
        rows = DTensor.from_local(
            mine, placement.mesh, _splits(flat_param), run_check=False, shape=whole.shape, stride=row_major(whole.shape)
        )
    else:
        whole = whole.contiguous()
        rows = _create_chunk_sharded_tensor(whole, dist.get_rank(group), placement.shards, devices, group, whole.device)
    return rows.cpu() if to_cpu else rows


def is_whole(param: UnitParam, value: Any) -> bool:
    """Whether ``value`` is a DTensor on ``param``'s own mesh, whose ranks are not the unit's: it is not cut here."""
    form = param.original.form
    mesh = None if form is None else getattr(form.kept, "mesh", None)
    return isinstance(value, DTensor) and value.device_mesh == mesh


def _without_extension(param: UnitParam, value: Any) -> Any:
    """Convert a ``ShardedTensor`` that an extension has cut to flatparam's cut. Return other values unchanged."""
    if param.extension is None or not isinstance(value, ShardedTensor):
        return value
    return torch_extensions._ext_pre_load_state_dict_transform(value, param.extension)[0]


def _splits(flat_param: FlatParam) -> list[Any]:
    """Return the placements of rows on the unit's mesh, one for each of its dimensions.

    If all ranks of the mesh share the flat parameter, all dimensions split it; else the last one splits it and the
    others replicate it (HYBRID_SHARD).
    """
    mesh = flat_param.placement.mesh
    if mesh.size() == flat_param.placement.shards:
        return [Split(0)] * mesh.ndim
    return [Replicate()] * (mesh.ndim - 1) + [Split(0)]


def _cuts_of(flat_param: FlatParam, rank: int) -> list[tuple[int, int]]:
    """Return the cuts of rows in order, each ``(number of parts, this part)``, for ``rank``, a global rank."""
    placement = flat_param.placement
    if placement.mesh is None:
        return [(placement.shards, dist.get_group_rank(placement.optim, rank))]  # type: ignore[arg-type]
    places = _places.setdefault(placement.mesh, {})
    if rank not in places:
        places[rank] = (placement.mesh.mesh == rank).nonzero()[0].tolist()
    splits = enumerate(_splits(flat_param))
    return [(placement.mesh.size(i), places[rank][i]) for i, split in splits if isinstance(split, Split)]


def _rows_of(rows: int, cuts: list[tuple[int, int]]) -> tuple[int, int]:
    """Return ``(first, last)``, last excluded: the rows that ``cuts`` leave of ``rows`` rows."""
    first, last = 0, rows
    for parts, number in cuts:
        length = -(-(last - first) // parts)
        first, last = min(last, first + number * length), min(last, first + (number + 1) * length)
    return first, last


def check_rows(name: str, param: UnitParam, value: Any) -> None:
    """Raises: StateError naming the parameter unless ``value`` has the rows that ``cut_rows`` would give this rank."""
    flat_param = param.flat_param
    if isinstance(value, DTensor) and param.extension is not None:
        if isinstance(param.extension, DTensorExtensions):
            _check_rows_of_slice(name, param, value)
        return
    value = _without_extension(param, value)
    shape = shape_of(value)
    assert shape is not None
    first, last = _rows_of(shape[0], _cuts_of(flat_param, dist.get_rank()))
    if isinstance(value, DTensor):
        if list(value.placements) != (_splits(flat_param) if flat_param.placement.mesh is not None else [Split(0)]):
            raise StateError(f"`{name}` is a DTensor with placements {value.placements}, not of rows as saved here")
        found = tuple(value.to_local().shape)
    else:
        shards = value.local_shards()
        if len(shards) > 1:
            raise StateError(f"`{name}` has {len(shards)} shards on this rank, expected rows in one")
        found = tuple(shards[0].tensor.shape) if shards else (0, *shape[1:])
        if shards and tuple(shards[0].metadata.shard_offsets) != (first, *[0] * (len(shape) - 1)):
            raise StateError(
                f"`{name}` has its shard at {list(shards[0].metadata.shard_offsets)}, expected row {first}: it was "
                "saved over other ranks. Load it by torch.distributed.checkpoint"
            )
    if found != (last - first, *shape[1:]):
        raise StateError(
            f"`{name}` has a shard of shape {found}, expected {(last - first, *shape[1:])}: it was saved over other "
            "ranks. Load it by torch.distributed.checkpoint"
        )


def _check_rows_of_slice(name: str, param: UnitParam, value: DTensor) -> None:
    root, form = param.flat_param.placement.mesh._get_root_mesh(), param.original.form
    expected: list[Any] = [Replicate()] * root.ndim
    expected[0 if form is None else -2] = Split(0)
    if form is not None:
        expected[-1] = form.kept.placements[0]
    if value.device_mesh != root or list(value.placements) != expected:
        raise StateError(
            f"`{name}` is a DTensor with placements {value.placements} on {value.device_mesh}, expected {expected} on "
            f"{root}"
        )


def agree_on_rows(what: str, units: list[Unit], checked: Iterable[tuple[str, LocalParam, Any]]) -> None:
    """Compare the entries of a sharded state over the ranks of ``units``, before a gather. A collective call.

    ``checked``: yields ``(name, parameter, entry)`` and raises if an entry does not fit. Ranks compare names; of a
    tensor also shape, dtype and whether it ``is_rows``; of a string the text; of others the type.
    Raises: RuntimeError on every rank, if ``checked`` raises on one of them or entries differ.
    """
    failed: Exception | None = None
    values: Values = {}
    try:
        for name, param, value in checked:
            described = value if isinstance(value, str) else type(value).__name__
            if isinstance(value, Tensor):
                described = f"{is_rows(value)} {dtype_of(value)} {shape_of(value)}"
            values[name] = (param.unit, described)
    except Exception as error:
        failed = error.with_traceback(None)  # which refers to this frame
    agree_on_loading(what, units, failed, values)


def _local_rows(value: Any) -> Tensor | None:
    """Return this rank's rows of a ShardedTensor or DTensor; None: the ShardedTensor has no shard here."""
    if isinstance(value, DTensor):
        return value.to_local()
    shards: list[Shard] = value.local_shards()
    return shards[0].tensor if shards else None


def whole_values(values: Mapping[UnitParam, Any]) -> Iterator[tuple[UnitParam, Tensor]]:
    """Yield ``(parameter, its whole plain tensor)`` for values in rows, in pieces of an extension, or whole.

    A collective call if a value is not whole: one gather for each flat parameter and dtype.
    """
    groups: dict[tuple[FlatParam, torch.dtype], dict[UnitParam, Any]] = {}
    for param, given in values.items():
        value = _without_extension(param, given)
        if is_whole(param, value) or not is_rows(value):
            yield param, param.original.plain(value)
        elif isinstance(value, DTensor) and param.extension is not None:
            mesh = param.flat_param.placement.mesh._get_root_mesh()
            yield param, torch_extensions._ext_all_gather_dtensor(value, mesh, param.extension).detach()
        elif param.is_sharded:
            groups.setdefault((param.flat_param, dtype_of(value)), {})[param] = value
        else:
            yield param, value.full_tensor()
    for (flat_param, dtype), rows in groups.items():
        yield from _gathered(flat_param, rows, dtype)


@torch.no_grad()
def _gathered(
    flat_param: FlatParam, values: Mapping[UnitParam, Any], dtype: torch.dtype
) -> Iterator[tuple[UnitParam, Tensor]]:
    """All-gather rows of several parameters at once; yield ``(parameter, a new whole tensor)``. A collective call."""
    group = flat_param.placement.optim
    assert group is not None
    cuts = [_cuts_of(flat_param, rank) for rank in ranks_of(group)]
    parts = {param: [_rows_of(param.shape[0], cut) for cut in cuts] for param in values}
    widths = {param: row_numel(param.shape) for param in values}
    starts: dict[UnitParam, int] = {}
    total = 0
    for param, ranges in parts.items():
        starts[param] = total
        total += max(last - first for first, last in ranges) * widths[param]
    mine = torch.zeros(total, dtype=dtype, device=flat_param.device)
    for param, value in values.items():
        rows = _local_rows(value)
        if rows is not None and rows.numel():
            mine.narrow(0, starts[param], rows.numel()).copy_(rows.reshape(-1))
    whole = torch.empty(total * len(cuts), dtype=dtype, device=flat_param.device)
    trace = checked_collectives.before(flat_param, _C.EVENT_GATHERS_OUTSIDE, flat_param.device)
    torch_collectives.all_gather(as_sent(whole), as_sent(mine), group, trace)
    for param, ranges in parts.items():
        found = torch.empty(param.shape, dtype=dtype, device=flat_param.device)
        for number, (first, last) in enumerate(ranges):
            rows = whole.narrow(0, number * total + starts[param], (last - first) * widths[param])
            found[first:last].copy_(rows.view(last - first, *param.shape[1:]))
        yield param, found


def plain_state(table: Table, full: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``full`` with plain tensors in place of DTensors of parameters that have a form: checks see local shapes.

    Rows that an extension has cut become a ``Like``; ``from_rows`` fetches them from ``full``.
    """
    return {**full, "state": table.changed(full["state"], _plain)} if "state" in full else dict(full)


def _plain(param: UnitParam, value: Any) -> Any:
    if is_rows(value) and not is_whole(param, value):
        cut_so = param.extension is not None and shape_of(value) == param.original.full_shape
        return Like(param.shape, dtype_of(value)) if cut_so else value
    return param.original.plain(value) if isinstance(value, Tensor) else value


def from_rows(table: Table, state: Mapping[str, Mapping[str, Any]]) -> Fetch:
    """Return the ``Fetch`` for ``cut`` from a full or sharded state. Each fetch with rows is a collective call."""
    whole = by_first_name(table, state)

    return lambda flat_param, key, dtype, params: (
        (param, param.slice_of(value))
        for param, value in whole_values({param: whole[param.name][key] for param in params})
    )
