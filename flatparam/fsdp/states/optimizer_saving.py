"""Make the state of the unwrapped model's optimizer, full or in rows, from the states of all ranks' optimizers.

First one exchange for each group of ranks: keys, dtypes and small values. All ranks check it and raise alike. Then one
all-gather for each flat parameter and key, in an order that all ranks know from the exchange. `optimizer.py` calls it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.tensors import refuse_freed
from ...common.warned import warn_user
from ..desync.checked_collectives import check_exchanges, gather_objects, settle
from ..desync.events import SetupCollective
from ..errors import StateError
from ..sharding.flat_param import FlatParam
from ..unit.local_params import LocalParam, UnitParam
from .table import SteppedParam, Table, settings_of_group
from .values import Described, Like, Scalar, by_gather, copy_of, described, difference, keys_of_one_shape, shapes_of

_NOTHING = "nothing"  # told for a parameter without elements on that rank


class Sink(NamedTuple):
    """The way to make results. ``take``: copies a gathered tensor, whose memory is then freed or used again.

    ``to_cpu``: copy tensors to the host that need no gather.
    """

    take: Callable[[UnitParam, Tensor], Any]
    to_cpu: bool


def unsharded_state(
    table: Table, given: Mapping[str, Any], groups: list[list[SteppedParam]], sink: Sink | None
) -> dict[str, Any]:
    """Return ``given``, this rank's ``optim.state_dict()``, by FQNs of the unwrapped model. A collective call.

    ``groups``: the tensors that the optimizer steps. ``sink``: None on a rank that wants no result: it takes part in
    the gathers and returns ``{}``. Raises: ValueError naming parameter and key, on all ranks that share the parameter.
    """
    settle(flat_param for flat_param in table.flat_params if not flat_param.is_sharded)
    state = given.get("state", {})
    keyed = {key: one for one, key in table.keys(groups, any(isinstance(key, str) for key in state)).items()}
    held = {one: state[key] for key, one in keyed.items() if key in state}
    result: dict[str, Any] = {"state": _states(table, held, sink)}
    if sink is None:
        return {}
    for key, value in state.items():
        if key not in keyed:
            warn_user(
                f"the optimizer has state under {key!r}, which is of no parameter of the model: it is copied as it is",
                table.compared,
            )
            result["state"][key] = value
    if "param_groups" in given:
        result["param_groups"] = [
            {**settings_of_group(group), "params": [param.name for one in members for param in one.params]}
            for group, members in zip(given["param_groups"], groups, strict=True)
        ]
    return result


def _states(table: Table, held: dict[SteppedParam, Mapping[str, Any]], sink: Sink | None) -> dict[str, dict[str, Any]]:
    for one, values in held.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                refuse_freed(value, f"the optimizer's `{key}` of `{one.name}`")
    stepped = table.all_stepped()  # in the same order on all ranks, whatever the order in their optimizers
    unlike = keys_of_one_shape((one.shape, shapes_of(values)) for one, values in held.items())
    found = {one: _described(one, values, unlike) for one, values in held.items() if not one.is_sharded}
    found |= _agreed([one for one in stepped if one.is_sharded], held, unlike)
    result: dict[str, dict[str, Any]] = {}
    for one in stepped:
        mine = held.get(one, {}) if one.is_here else {}
        for param in one.params if one in found else ():
            if sink is not None:
                gathered_later = one.is_flat or one.is_sharded
                result[param.name] = {
                    key: None if gathered_later and isinstance(value, Like) else _own(value, mine.get(key), sink, param)
                    for key, value in found[one].items()
                }
    for (flat_param, key, dtype), members in by_gather(table, found):
        _gather(flat_param, key, dtype, members, held, sink, result)
    return result


def _own(value: Any, held: Any, sink: Sink, param: LocalParam) -> Any:
    """Return a copy of a value that is not gathered: of ``held``, this rank's tensor, else of ``value``, as sent."""
    if isinstance(held, Tensor) and isinstance(value, Like) and isinstance(param, UnitParam):
        held = param.original.formed(held)
    if isinstance(held, Tensor):
        return copy_of(held, sink.to_cpu)
    return value.tensor() if isinstance(value, Scalar) else copy.deepcopy(value)


def _described(one: SteppedParam, values: Mapping[str, Any], unlike: set[str]) -> Described:
    return {key: described(value, None if key in unlike else one.shape) for key, value in values.items()}


def _agreed(
    sharded: list[SteppedParam], held: dict[SteppedParam, Mapping[str, Any]], unlike: set[str]
) -> dict[SteppedParam, Described]:
    """Return the descriptions of the states of ``sharded``, in the same order on all ranks. A collective call.

    ``sharded``: all sharded parameters, in the same order on all ranks.
    """
    groups: dict[Any, list[SteppedParam]] = {}
    for one in sharded:
        assert one.flat_param is not None
        group = one.flat_param.placement.optim
        if group is not None and group not in groups:
            check_exchanges([group], one.flat_param.device)  # as in agree_on_loading
        groups.setdefault(group, []).append(one)
    result: dict[SteppedParam, Described] = {}
    for group, members in groups.items():
        mine: dict[str, Described | None] = {}
        share: dict[Any, Any] = {}  # one object for equal descriptions: pickle sends it once
        for one in members:
            if not one.is_here:
                continue  # the optimizer may keep state for an empty slice: ignore it
            mine[one.name] = None
            if one in held:
                values = _described(one, held[one], unlike)
                is_small = all(isinstance(value, Like | Scalar | int | float | str | None) for value in values.values())
                mine[one.name] = share.setdefault(repr(values), values) if is_small else values
        everyone, ranks = gather_objects(SetupCollective.TELLS_STATES, mine, group), dist.get_process_group_ranks(group)
        having = {name for other in everyone for name, values in other.items() if values is not None}
        for one in (one for one in members if one.name in having):
            result[one] = _merged(one, ranks, [other.get(one.name, _NOTHING) for other in everyone])
    return result


def _merged(one: SteppedParam, ranks: list[int], everyone: list[Any]) -> Described:
    """Return the description that all ranks agree on. ``everyone``: by rank a description, None, or ``_NOTHING``.

    None: the rank has elements of the parameter and no state for them. Raises: StateError if ranks differ.
    """
    name = one.name
    first, values = next((rank, other) for rank, other in zip(ranks, everyone, strict=True) if isinstance(other, dict))
    for rank, other in zip(ranks, everyone, strict=True):
        if other is None:
            raise StateError(
                "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer "
                "but some ranks are missing some of those states: "
                f"rank {first} has optimizer state of parameter `{name}`, and rank {rank} has none"
            )
        if other == _NOTHING or other is values:
            continue
        key = difference(values, other)
        if key is not None and not (key in values and key in other):
            has, lacks = (first, rank) if key in values else (rank, first)
            raise StateError(f"optimizer state `{key}` of parameter `{name}`: rank {has} has it, not rank {lacks}")
        if key is not None:
            raise StateError(
                f"optimizer state `{key}` of parameter `{name}` is {_said(values[key])} on rank {first} and "
                f"{_said(other[key])} on rank {rank}: a value that has not the shape of the parameter's piece must be "
                "the same on all ranks; flatparam.checkpoint.save keeps it, for the same ranks and units"
            )
    return dict(values)


def _said(value: Any) -> str:
    if isinstance(value, Like | Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return repr(value.value if isinstance(value, Scalar) else value)


@torch.no_grad()
def _gather(
    flat_param: FlatParam,
    key: str,
    dtype: torch.dtype,
    members: list[SteppedParam],
    held: dict[SteppedParam, Mapping[str, Any]],
    sink: Sink | None,
    result: dict[str, dict[str, Any]],
) -> None:
    """All-gather one key of a flat parameter, and put each parameter's part into ``result``. A collective call."""
    if members[0].is_flat and members[0].is_here:
        shard = held[members[0]][key].detach()
    elif flat_param.is_sharded:
        shard = torch.zeros(flat_param.layout.shard_numel, dtype=dtype, device=flat_param.flat.device)
        for one in members:
            if one in held and one.is_here:
                one.unit_params[0].piece_of(shard).copy_(held[one][key])
    else:
        return  # not sharded: _own has copied it
    whole = flat_param.gather(shard)
    if sink is None:
        return
    for param in (param for one in members for param in one.unit_params):
        place = flat_param.view(whole, param.original, flat_param.layout.offsets[param.number])
        result[param.name][key] = sink.take(param, param.original.formed(place))
