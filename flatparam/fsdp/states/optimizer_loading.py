"""Cut a state of the unwrapped model's optimizer into the state of this rank's optimizer.

``cut`` checks the whole state before it fetches the first tensor. The checks use only shapes, dtypes and small values,
which all ranks have alike: all ranks raise, or all come to the same fetches. A ``Fetch`` brings the elements:
`rows.py` from memory or by all-gathers, `from_rank0.py` by broadcasts. The optimizer is not changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...common.warned import warn_user
from ..errors import StateError
from ..sharding.flat_param import FlatParam
from ..unit.local_params import LocalParam, UnitParam
from .table import SteppedParam, Table, settings_of_group
from .values import Described, Like, Scalar, by_gather, classify, difference

# fetch(flat parameter, key, dtype, parameters) yields (parameter, its elements on this rank: 1-D, in memory order). It
# may be a collective call.
Fetch = Callable[[FlatParam, str, torch.dtype, list[UnitParam]], Iterator[tuple[UnitParam, Tensor]]]


_ALIKE = (
    "All unflattened parameters comprising a single flat parameter must have scalar state with the same value and dtype"
)


def cut(
    table: Table,
    full: Mapping[str, Any],
    groups: list[list[SteppedParam]],
    fetch: Fetch,
    *,
    own: Any = None,
    named: bool = False,
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
    described = classify(table, state)
    plan = {one: found for one in stepped if (found := shared_state(one.params, described)) is not None}
    _warn_of_missing(table, groups, plan)
    result: dict[str, Any] = {"state": {}}
    if "param_groups" in full:
        result["param_groups"] = _param_groups(table, full["param_groups"], groups, keys, own)
    cut_state: dict[SteppedParam, dict[str, Any]] = {
        one: {key: _own(value, one) for key, value in values.items()}
        for one, values in plan.items()
        if one.is_flat or one.is_here
    }
    for (flat_param, key, dtype), owners in by_gather(table, plan):
        owner_of = {param: one for one in owners for param in one.unit_params if param.name in described}
        for param, piece in fetch(flat_param, key, dtype, list(owner_of)):
            if owner_of[param] in cut_state:
                _put(cut_state[owner_of[param]], key, owner_of[param], param, piece)
    for one in keys:
        if one in cut_state:
            result["state"][keys[one]] = cut_state[one]
    for key, value in full.get("state", {}).items():
        if key not in table.by_name:
            warn_user(
                f"the optimizer's state has {key!r}, which is no parameter of the model: it is copied as it is",
                table.compared,
            )
            result["state"][key] = value
    return result


def _warn_of_missing(table: Table, groups: list[list[SteppedParam]], plan: Mapping[SteppedParam, Any]) -> None:
    for group in groups:
        why = told_of_missing(
            ([param.name for param in one.params], one in plan)
            for one in group
            if one in plan or one.tensor.requires_grad
        )
        if why is not None:
            warn_user(f"the optimizer's state {why}", table.compared)


def told_of_missing(group: Iterable[tuple[list[str], bool]]) -> str | None:
    """Return a warning about a group in which some parameters have state and others have none; None: no warning.

    ``group``: for each tensor that the optimizer steps, ``(FQNs of its parameters, whether the state has it)``.
    """
    group = list(group)
    lacking = [f"`{name}`" for names, has in group if not has for name in names]
    having = next((names[0] for names, has in group if has), None)
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

    Raises: StateError if it differs between the parameters.
    """
    having = [param for param in params if param.name in state]
    if not having:
        return None
    first = having[0]
    values = state[first.name]
    lacking = next((param for param in params if param.name not in state), None)
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


def _own(value: Any, one: SteppedParam) -> Any:
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
        result.append(
            {**settings_of_group(source), "params": [keys[one] for one in members if places[one] is not None]}
        )
    return result
