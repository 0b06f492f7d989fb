"""The entries of one unit in a state dict: their keys, and their values in full, sharded and local form.

`model.py` calls this while it saves or loads a unit. Nothing here is a collective call. The callers gather, and agree
with other ranks. A ``prefix`` is the path of the unit's inner module in the state dict, with a dot at its end.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...common.collectives import ranks_of
from ...common.torch_private import Shard, ShardedTensor, ShardedTensorMetadata, ShardMetadata, TensorProperties
from ..errors import StateError
from ..names import FSDP_PREFIX
from ..sharding.flat_param import FlatParam
from ..unit.base import Wrapper
from ..unit.local_params import UnitParam, params_of
from ..unit.unit import Unit
from .rows import is_rows

_OLD_FLAT_PARAM = "flat_param"  # of torch 1.12


def own_params(unit: Unit, prefix: str) -> list[UnitParam]:
    """Return the parameters of the unit. Their ``names`` are keys of the state dict; a tied one has several."""
    return list(params_of(unit, [prefix[:-1]], str))


def _own_keys(unit: Unit, prefix: str) -> list[str]:
    """Return the names of ``own_params``, without the time that it takes to make a UnitParam."""
    return [prefix + fqn for original in unit.originals for fqn in original.fqns]


def is_own(value: Any, param: UnitParam) -> bool:
    """Whether ``value`` is ``param`` itself, its flat parameter, or a view of its slice of the shard.

    Loading such a value changes nothing. torch's helpers add these values for keys that the caller's state dict lacks.
    """
    flat = param.flat_param.flat
    if value is param.original.param or value is flat:
        return True
    if not isinstance(value, Tensor) or is_rows(value) or value.is_meta or value.numel() != param.numel:
        return False
    mine = param.shard_slice.of(flat.detach())
    is_same = value.dtype == mine.dtype and value.shape == mine.shape
    return is_same and (value.data_ptr() == mine.data_ptr() if value.numel() else param.is_sharded)


def take_own(
    unit: Unit, destination: dict[str, Any], prefix: str, keep_vars: bool, take: Callable[[str, Tensor], Any] | None
) -> None:
    """Replace each entry of a parameter of ``unit`` with ``take(key, value)``. ``take`` None: drop the entries.

    The values in ``destination`` are whole parameters. They may be views of a flat buffer that is freed afterwards.
    """
    for key in _own_keys(unit, prefix):
        value = destination.get(key)
        if not isinstance(value, Tensor):
            continue
        if take is None:
            del destination[key]
            continue
        taken = take(key, value)
        is_parameter = keep_vars and type(taken) is Tensor
        destination[key] = nn.Parameter(taken, requires_grad=value.requires_grad) if is_parameter else taken


def put_flat(unit: Unit, destination: dict[str, Any], prefix: str, to_cpu: bool) -> None:
    """Local form: replace the entries of the original parameters with one ShardedTensor for each flat parameter."""
    for key in _own_keys(unit, prefix):
        destination.pop(key, None)
    for name, flat_param in zip(unit.flat_names(), unit.flat_params, strict=True):
        destination[prefix + name] = _as_sharded(flat_param, to_cpu)


def _as_sharded(flat_param: FlatParam, to_cpu: bool) -> ShardedTensor:
    """Return the flat parameter as a ShardedTensor of shape ``[layout.numel]``, without padding.

    Its local shard is a view of this rank's shard, except with ``to_cpu``. No communication: the metadata of the other
    ranks' shards follow from the layout.
    """
    placement, layout, flat = flat_param.placement, flat_param.layout, flat_param.flat.detach()
    group: Any = placement.optim
    devices = 1 if flat.is_cpu else torch.accelerator.device_count()
    metadata = []
    for number in range(placement.shards):
        numel = layout.shard(number).numel
        if numel:
            rank = ranks_of(group)[placement.holder(number)]
            where = f"rank:{rank}/cpu" if flat.is_cpu else f"rank:{rank}/{flat.device.type}:{rank % devices}"
            metadata.append(ShardMetadata([number * layout.shard_numel], [numel], where))
    mine = layout.shard(placement.rank).numel
    offsets = [placement.rank * layout.shard_numel]
    local = [Shard(flat[:mine], one) for one in metadata if one.shard_offsets == offsets]
    properties = TensorProperties(dtype=flat.dtype, pin_memory=flat.is_pinned())
    told = ShardedTensorMetadata(metadata, torch.Size([layout.numel]), properties)
    sharded = ShardedTensor._init_from_local_shards_and_global_metadata(local, told, process_group=group)
    return sharded.cpu() if to_cpu else sharded


def take_flat(unit: Unit, state: dict[str, Any], prefix: str) -> None:
    """The reverse of ``put_flat``: replace flat entries of ``state`` with tensors that torch copies into the modules.

    With use_orig_params these are the slices of a copy of the shard, one for each FQN; else it is the copy itself.
    Raises: StateError naming the key, for an entry of another type, size or place. Earlier entries are replaced then.
    """
    for name, flat_param in zip(unit.flat_names(), unit.flat_params, strict=True):
        key = prefix + name
        old = prefix + _OLD_FLAT_PARAM + name.removeprefix(unit.flat_names()[0])
        value = state.pop(key, None)
        if value is None:
            value = state.pop(old, None)
        if value is None:
            continue
        shard = _shard_of(key.replace(FSDP_PREFIX, ""), flat_param, value)
        if not flat_param.use_orig_params:
            state[key] = shard
            continue
        for here in flat_param.shard_slices():
            piece = here.of(shard).view(here.original.param.shape)
            state.update((prefix + fqn, piece) for fqn in here.original.fqns)


def _shard_of(key: str, flat_param: FlatParam, value: Any) -> Tensor:
    if not isinstance(value, ShardedTensor):
        raise StateError(f"`{key}` of a local state dict is expected to be a ShardedTensor, got {type(value).__name__}")
    mine = flat_param.layout.shard(flat_param.placement.rank).numel
    shards = value.local_shards()
    if value.size() != torch.Size([flat_param.layout.numel]):
        raise StateError(
            f"`{key}` has {value.size().numel()} elements, the flat parameter has {flat_param.layout.numel}"
        )
    found = sum(shard.tensor.numel() for shard in shards)
    at = [flat_param.placement.rank * flat_param.layout.shard_numel]
    if found != mine or (mine and (len(shards) != 1 or list(shards[0].metadata.shard_offsets) != at)):
        raise StateError(
            f"`{key}` has {found} elements on this rank, expected {mine} from {at[0]} on: it was saved over other "
            "ranks, and a local state dict is for the same ones"
        )
    whole = flat_param.flat.detach().clone()
    if mine:
        whole[:mine].copy_(shards[0].tensor)
    return whole


def units_below(module: nn.Module, path: str) -> Iterator[tuple[str, Wrapper]]:
    """Yield ``(path, wrapper)`` for the outermost wrappers below ``module``, which is at ``path``.

    A wrapper that is registered in several places comes once for each of its paths.
    """
    for name, child in module._modules.items():
        if child is None:
            continue
        below = f"{path}{name}."
        if isinstance(child, Wrapper):
            yield below, child
        else:
            yield from units_below(child, below)


def rename_last(mapping: dict[str, Any], before: int, inner: str, outer: str) -> None:
    """Replace the prefix ``inner`` by ``outer`` in all keys of ``mapping`` after its first ``before`` keys."""
    for key in list(itertools.islice(reversed(mapping), len(mapping) - before))[::-1]:
        value = mapping.pop(key)
        if key.startswith(inner):
            key = outer + key[len(inner) :]
        elif key + "." == inner:
            key = outer[:-1]
        mapping[key] = value


def put_units_in(state: dict[str, Any], prefix: str) -> None:
    """Insert the wrapper's own name after ``prefix`` in the keys of ``state``, in place: torch looks them up so."""
    inner = prefix + FSDP_PREFIX
    for key in list(state):
        if key.startswith(prefix) and not key.startswith(inner):
            state[inner + key[len(prefix) :]] = state.pop(key)
