"""Map the state of this rank's optimizer to that of the unwrapped model's optimizer, and back.

| function | does | communicates |
|---|---|---|
| ``unsharded_state`` | makes the full state, or one in rows, from the states of all ranks' optimizers | see below |
| ``cut`` | cuts the unwrapped model's state into this rank's | as its ``Fetch`` does |
| ``from_first`` | lets all ranks ``cut`` a full state that the first rank alone has | by broadcasts |

``unsharded_state``: first one exchange for each group of ranks: keys, dtypes and small values. All ranks check it and
raise alike. Then one all-gather for each flat parameter and key, in an order that all ranks know from the exchange.

``cut`` checks the whole state before it fetches the first tensor. The checks use only shapes, dtypes and small values,
which all ranks have alike: all ranks raise, or all come to the same fetches. A ``Fetch`` brings the elements:
`rows.py` from memory or by all-gathers, ``from_first`` by broadcasts.

`optimizer.py` calls this. The optimizers are not changed.
"""

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.collectives import ranks_of
from ...common.tensors import as_sent, refuse_freed
from ...common.warned import warn_user
from ..desync.checked_collectives import check_exchanges, exchange, gather_objects, settle
from ..desync.events import SetupCollective
from ..errors import StateError
from ..sharding.flat_param import FlatParam
from ..sharding.parameters import in_order
from ..unit.local_params import LocalParam, UnitParam
from .table import SteppedParam, Table, settings_of_group
from .values import Described, Like, Scalar, by_gather, classify, copy_of, described, difference, keys_of_one_shape

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
    unlike = keys_of_one_shape((one.shape, values) for one, values in held.items())
    found = {one: _described(one, values, unlike) for one, values in held.items() if not one.is_sharded}
    found |= _agreed([one for one in stepped if one.is_sharded], held, unlike)
    result: dict[str, dict[str, Any]] = {}
    for one in stepped:
        mine = held.get(one, {}) if one.is_here else {}
        for param in one.params if one in found else ():
            if sink is not None:
                later = one.is_flat or one.is_sharded  # it is gathered later
                result[param.name] = {
                    key: None if later and isinstance(value, Like) else _taken(value, mine.get(key), sink, param)
                    for key, value in found[one].items()
                }
    for (flat_param, key, dtype), members in by_gather(table, found):
        _gather(flat_param, key, dtype, members, held, sink, result)
    return result


def _taken(value: Any, held: Any, sink: Sink, param: LocalParam) -> Any:
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
        everyone, ranks = gather_objects(SetupCollective.TELLS_STATES, mine, group), ranks_of(group)
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
        return  # not sharded: _taken has copied it
    whole = flat_param.gather(shard)
    if sink is None:
        return
    for param in (param for one in members for param in one.unit_params):
        place = flat_param.view(whole, param.original, flat_param.layout.offsets[param.number])
        result[param.name][key] = sink.take(param, param.original.formed(place))


# From the unwrapped model

# fetch(flat parameter, key, dtype, parameters) yields (parameter, its elements on this rank: 1-D, in memory order). It
# may be a collective call.
Fetch = Callable[[FlatParam, str, torch.dtype, list[UnitParam]], Iterator[tuple[UnitParam, Tensor]]]


_ALIKE = (
    "All unflattened parameters comprising a single flat parameter must have scalar state with the same value and dtype"
)


def cut(
    table: Table, full: Mapping[str, Any], groups: list[list[SteppedParam]], fetch: Fetch, *, own: Any, named: bool
) -> dict[str, Any]:
    """Return ``full``, a state by FQNs of the unwrapped model, for ``load_state_dict`` of this rank's optimizer.

    Args: ``full``: may have the results of ``described`` in place of tensors. ``groups``: the tensors that the
    optimizer steps. ``fetch``: brings the elements. ``own``: the optimizer's ``param_groups``: the result has their
    order; None: the order of the groups in ``full``. ``named``: the result's keys are names, else numbers.
    Raises: ValueError naming parameter and key, before the first fetch. Warns of parameters without state, and of keys
    that are no parameters.
    """
    keys = table.keys(groups, named)
    stepped = [one for one in table.all_stepped() if one in keys]  # in the same order on all ranks
    state = by_first_name(table, full.get("state", {}))
    classified = classify(table, state)
    plan = {one: found for one in stepped if (found := shared_state(one.params, classified)) is not None}
    for group in groups:
        why = told_of_missing((one, one in plan) for one in group if one in plan or one.tensor.requires_grad)
        if why is not None:
            warn_user(f"the optimizer's state {why}", table.compared)
    result: dict[str, Any] = {"state": {}}
    if "param_groups" in full:
        result["param_groups"] = _param_groups(table, full["param_groups"], groups, keys, own)
    cut_state: dict[SteppedParam, dict[str, Any]] = {
        one: {key: _begun(value, one) for key, value in values.items()}
        for one, values in plan.items()
        if one.is_flat or one.is_here
    }
    for (flat_param, key, dtype), owners in by_gather(table, plan):
        owner_of = {param: one for one in owners for param in one.unit_params if param.name in classified}
        for param, piece in fetch(flat_param, key, dtype, list(owner_of)):
            if owner_of[param] in cut_state:
                _put(cut_state[owner_of[param]], key, owner_of[param], param, piece)
    result["state"] |= {key: cut_state[one] for one, key in keys.items() if one in cut_state}
    for key, value in full.get("state", {}).items():
        if key not in table.by_name:
            warn_user(
                f"the optimizer's state has {key!r}, which is no parameter of the model: it is copied as it is",
                table.compared,
            )
            result["state"][key] = value
    return result


def told_of_missing(group: Iterable[tuple[SteppedParam, bool]]) -> str | None:
    """Return a warning about a group in which some parameters have state and others have none; None: no warning.

    ``group``: the tensors that the optimizer steps, each with whether there is state for it. A parameter without
    elements needs none: optimizers may skip it, and a checkpoint has no state of it.
    """
    group = list(group)
    lacking = [f"`{param.name}`" for one, has in group if not has for param in one.params if 0 not in param.shape]
    having = next((one.name for one, has in group if has), None)
    if having is None or not lacking:
        return None
    more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
    return (
        f"has nothing for {', '.join(lacking[:3])}{more}, and has `{having}` of the same parameter group: the "
        "optimizer starts from no state for these. It had no gradient before the state was taken, or the state "
        "is not whole"
    )


def by_first_name(table: Table, state: Mapping[Any, Any]) -> dict[str, Mapping[str, Any]]:
    """Map the first FQN of each parameter to its state. ``state`` may use any of its FQNs; other keys are left out."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, values in state.items():
        if name in table.by_name:
            found.setdefault(table.by_name[name].name, values)
    return found


def shared_state(params: list[LocalParam], state: Mapping[str, Described]) -> Described | None:
    """Return the state that a stepped tensor with ``params`` gets; None: none. ``state``: by first FQN.

    Empty parameters count only if no other has a state: an optimizer may have skipped them.
    Raises: StateError if it differs between the parameters.
    """
    having = [param for param in params if param.name in state]
    having = [param for param in having if 0 not in param.shape] or having
    if not having:
        return None
    first = having[0]
    values = state[first.name]
    lacking = next((param for param in params if param.name not in state and 0 not in param.shape), None)
    scalar = next((key for key, value in values.items() if not isinstance(value, Like)), None)
    if lacking is not None and scalar is not None:
        raise StateError(
            f"{_ALIKE}: `{first.name}` has `{scalar}`, and `{lacking.name}` has no state; use use_orig_params=True"
        )
    for param in having[1:]:
        key = difference(values, state[param.name])
        if key is not None and not (key in values and key in state[param.name]):
            has, lacks = (first, param) if key in values else (param, first)
            raise StateError(
                f"optimizer state `{key}`: parameter `{has.name}` has it and `{lacks.name}` does not, and they are "
                "of one flat parameter: use use_orig_params=True"
            )
        if key is not None:
            raise StateError(
                f"{_ALIKE.replace('scalar ', '') if isinstance(values[key], Like) else _ALIKE}: optimizer state "
                f"`{key}` of parameters `{first.name}` and `{param.name}` differs; use use_orig_params=True"
            )
    return values


def _begun(value: Any, one: SteppedParam) -> Any:
    """Return the initial value for one key of ``one``: zeros or None where elements are fetched later, else a copy."""
    if isinstance(value, Like):
        return torch.zeros(one.shape, dtype=value.dtype) if one.is_flat else None
    if isinstance(value, Scalar):
        return value.tensor()
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _put(values: dict[str, Any], key: str, one: SteppedParam, param: UnitParam, piece: Tensor) -> None:
    here = param.shard_slice
    if not one.is_flat:
        stride = here.stride if len(here.stride) == len(one.shape) else (1,)
        mine = piece.to(one.tensor.device, copy=True)  # on the host where parameters are offloaded
        values[key] = mine.as_strided(one.shape, stride)
    elif piece.numel():
        values[key].narrow(0, here.start, here.numel).copy_(piece)


def _param_groups(
    table: Table, given: list[dict[str, Any]], groups: list[list[SteppedParam]], keys: dict[SteppedParam, Any], own: Any
) -> list[dict[str, Any]]:
    """Return the param_groups of the result. ``given``: those of the state; ``own``: the optimizer's, or None.

    A parameter that no unit manages may be missing in ``given``: it is then left out of the result.
    Raises: ValueError naming a parameter, if the optimizer's groups split or join groups of ``given``.
    """
    group_of: dict[str, int] = {}
    for number, group in enumerate(given):
        for name in group["params"]:
            if name in table.by_name:
                group_of.setdefault(table.by_name[name].name, number)
    places: dict[SteppedParam, int | None] = {}
    for one in keys:
        found = {group_of[param.name]: param for param in one.params if param.name in group_of}
        if len(found) > 1:
            first, second = list(found.values())[:2]
            raise StateError(
                f"parameters `{first.name}` and `{second.name}` are of one flat parameter, and in two groups of the "
                "optimizer's state: use use_orig_params=True"
            )
        places[one] = next(iter(found), None)
    if own is None:
        own, groups = given, [[one for one in keys if places[one] == number] for number in range(len(given))]
    result = []
    for number, (members, mine) in enumerate(zip(groups, own, strict=True)):
        sources = dict.fromkeys(place for one in members if (place := places[one]) is not None)
        missing = next((one for one in members if places[one] is None and one.flat_param is not None), None)
        if missing is not None:
            raise StateError(
                f"parameter `{missing.params[0].name}` is in group {number} of the optimizer, and in no group of the "
                "state that is loaded"
            )
        if len(sources) > 1:
            raise StateError(
                f"the parameters of group {number} of the optimizer are in groups {sorted(sources)} of the state that "
                "is loaded: group them alike"
            )
        source = given[next(iter(sources))] if sources else given[number] if number < len(given) else mine
        params = [keys[one] for one in members if places[one] is not None]
        result.append({**settings_of_group(source), "params": params})
    return result


# Elements from the first rank: one broadcast of a pickled header with shapes, dtypes and small values, which all ranks
# check in `cut`; then one broadcast for each flat parameter and key, in an order that all ranks know from the header


def _from_first(data: bytes, group: dist.ProcessGroup) -> Any:
    """Return the object that the first rank has pickled as ``data``. A collective call: two broadcasts."""
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
    size = torch.tensor([len(data)], device=device)
    _broadcast(size, group)
    buffer = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8).to(device)
    _broadcast(buffer, group)
    return pickle.loads(buffer.cpu().numpy().tobytes())


def _broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    exchange(SetupCollective.SENDS_STATES, dist.broadcast, tensor, group=group, group_src=0)


def from_first(
    table: Table, make: Callable[[], Mapping[str, Any]] | None, group: dist.ProcessGroup
) -> tuple[dict[str, Any], Fetch]:
    """Return ``(header, fetch)`` for ``cut``. ``make()``: the state, asked of the first rank alone. A collective call.

    Each fetch is a collective call too: a broadcast of one key of a whole flat parameter, from which each rank takes
    its elements. Raises: ValueError on every rank, if the first rank has no state, or one that cannot be pickled.
    """
    is_first, full = dist.get_rank(group) == 0, None
    try:
        full = make() if is_first and make is not None else None
        data = pickle.dumps(_header(table, full) if full else "rank 0 has no full optimizer state") if is_first else b""
    except Exception as error:
        data = pickle.dumps(f"rank 0 has a state that cannot be sent to other ranks: {type(error).__name__}: {error}")
    header = _from_first(data, group)
    if isinstance(header, str):
        raise ValueError(header)
    whole = by_first_name(table, full.get("state", {})) if is_first and full else {}

    @torch.no_grad()
    def fetch(
        flat_param: FlatParam, key: str, dtype: torch.dtype, params: list[UnitParam]
    ) -> Iterator[tuple[UnitParam, Tensor]]:
        flat = torch.empty(flat_param.layout.numel, dtype=dtype, device=flat_param.device)
        for param in params if is_first else ():
            value = in_order(whole[param.name][key].detach(), param.stride)
            flat.narrow(0, flat_param.layout.offsets[param.number], value.numel()).copy_(value)
        _broadcast(as_sent(flat), group)
        for param in params:
            yield param, flat.narrow(0, flat_param.layout.offsets[param.number] + param.start, param.numel)

    return header, fetch


def _header(table: Table, full: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``full`` with a ``Like`` in place of each tensor of its parameter's shape: those are broadcast later."""
    state = table.changed(full.get("state", {}), lambda param, value: described(value, param.shape))
    return {"state": state, **({"param_groups": full["param_groups"]} if "param_groups" in full else {})}
