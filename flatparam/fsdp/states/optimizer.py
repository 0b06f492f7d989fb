"""The wrapper's functions for optimizer states, with the names and arguments of torch 1.12 and torch 2.

Policy only: arguments, forms, and who communicates. `optimizer_mapping.py` makes a state, and cuts one; `rows.py`
brings the elements of a state in rows. Nothing here changes a model.

A state is a dict with ``"state"`` (FQN of the unwrapped model -> key -> value) and ``"param_groups"``. A tensor
with one element for each element of the parameter has the parameter's shape. Other values, as a step count, are as
the optimizer has them. Parameters without state are left out.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictType

from ...common.collectives import ranks_of
from ...common.warned import warn_user
from ..desync.checked_collectives import telling
from ..either import or_torchs
from ..errors import StateError
from ..unit.local_params import LocalParam, UnitParam
from ..unit.unit import units_of
from .optimizer_classes import class_of, why_not
from .optimizer_mapping import Sink, cut, from_first, unsharded_state
from .rows import agree_on_rows, check_rows, cut_rows, from_rows, is_rows, plain_state
from .table import Table, settings_of
from .values import copy_of, shape_of

OptimInput = Iterable[Any] | None


@or_torchs
def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: OptimInput = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the full state, on the host. ``rank0_only``: ``{}`` on all ranks of ``group`` but the first.

    A collective call. Peak memory: the result, and one state tensor of the largest unit.
    Raises: ValueError naming parameter and key, if ranks have different keys or values for a parameter.
    """
    wants = not rank0_only or dist.get_rank(group) == 0
    return _unsharded(
        model, _state_of(model, optim), optim if optim_input is None else _warned(optim_input), True, wants=wants
    )


@or_torchs
def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the state in the form that ``state_dict_type`` chooses. A collective call.

    ``optim_state_dict``: an earlier result of ``optim.state_dict()``; None: call it now.
    """
    settings = settings_of(model)
    config = settings.optim_state_dict_config
    given = _state_of(model, optim) if optim_state_dict is None else optim_state_dict
    in_rows = settings.state_dict_type is not StateDictType.FULL_STATE_DICT
    wants = in_rows or not getattr(config, "rank0_only", False) or dist.get_rank(group) == 0
    return _unsharded(model, given, optim, config.offload_to_cpu, in_rows, wants)


@or_torchs
def sharded_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the state with this rank's rows of each tensor, as SHARDED_STATE_DICT has parameters.

    A collective call. Raises: ValueError naming parameter and key, if ranks have different keys or values.
    """
    return _unsharded(model, _state_of(model, optim), optim, False, in_rows=True)


@or_torchs
def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """Convert a sharded state, saved over the same ranks, for this rank's ``optim.load_state_dict``.

    A collective call. Raises: ValueError naming parameter and key, on all ranks, if the state does not fit on one.
    """
    table = Table(model)
    _agree_on(table, sharded_optim_state_dict)
    return _cut(table, sharded_optim_state_dict, optim)


@or_torchs
def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Convert a full state, which every rank must have, for this rank's ``optim.load_state_dict``.

    No communication. Raises: ValueError naming parameter and key, if the state does not fit.
    """
    return _cut(Table(model), full_optim_state_dict, optim, optim_input)


@or_torchs
def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Any = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Convert a full state that only the first rank of ``group`` has. The others pass None. A collective call.

    Returns: the state for this rank's ``optim.load_state_dict``. ``optim`` may be the group, as with torch 1.12.
    """
    if isinstance(optim, dist.ProcessGroup):
        optim, group = None, optim
    table = Table(model)
    header, fetch = _from_first(table, full_optim_state_dict, group)
    return _cut(table, header, optim, optim_input, fetch)


@or_torchs
def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Return a full state with FQNs for keys, or with the numbers that the optimizer of the unwrapped model uses.

    The same object, if it has these keys already; else a new one with the same values. The members of each group are
    sorted, as torch's function sorts them. Raises: ValueError for keys of both kinds, or of no parameter.
    """
    state, given = optim_state_dict, optim if optim is not None else _warned(optim_input)
    if optim_state_key_type not in (OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID):
        raise ValueError(f"expected key_type to be an OptimStateKeyType, got {optim_state_key_type!r}")
    wanted = str if optim_state_key_type is OptimStateKeyType.PARAM_NAME else int
    kinds = {type(key) for key in state["state"]}
    if not kinds:
        kinds = {type(key) for group in state.get("param_groups", ()) for key in group["params"]}
    if kinds - {int, str} or len(kinds) > 1:
        raise ValueError(
            f"expected the optimizer's state to have names or numbers for keys, got {sorted(k.__name__ for k in kinds)}"
        )
    if kinds <= {wanted}:
        return state
    stepped = [one for group in Table(model).groups(given) for one in group]
    keys: dict[Any, Any] = {}
    for number, one in enumerate(stepped):
        for name in one.params[0].names:
            keys.update({name: number} if wanted is int else {number: one.params[0].name})
    try:
        result: dict[str, Any] = {"state": {keys[key]: value for key, value in state["state"].items()}}
        if "param_groups" in state:
            result["param_groups"] = [
                {**copy.deepcopy(group), "params": sorted(keys[key] for key in group["params"])}
                for group in state["param_groups"]
            ]
    except KeyError as error:
        raise ValueError(
            f"the optimizer's state has {error.args[0]!r}, which is no parameter of {type(model).__name__} that the "
            "optimizer has"
        ) from None
    return result


@or_torchs
def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Convert a state in the form that ``state_dict_type`` chooses, for this rank's ``optim.load_state_dict``.

    A collective call for sharded and local forms, and with ``rank0_only``, where only rank 0 needs the state.
    ``load_directly``: also load it. Raises: ValueError naming parameter and key, if the state does not fit; the
    optimizer is then unchanged.
    """
    first: Any = model
    if isinstance(first, Mapping):  # the order of arguments in torch 2.0
        model, optim, optim_state_dict = optim, optim_state_dict, first  # type: ignore[assignment]
    settings, table = settings_of(model), Table(model)
    fetch, state = None, optim_state_dict
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        _agree_on(table, state)
    elif getattr(settings.optim_state_dict_config, "rank0_only", False):
        state, fetch = _from_first(table, state, group)
    result = _cut(table, state, optim, None, fetch, named=is_named_optimizer)
    if load_directly:
        optim.load_state_dict(result)
    return result


def _state_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    with telling(lambda: units_of(model.modules())):  # hooks of users may raise
        return optim.state_dict()


def _warned(optim_input: OptimInput) -> OptimInput:
    if optim_input is not None:
        warn_user(
            "The `optim_input` argument is deprecated, as in torch: pass the optimizer, or nothing",
            category=FutureWarning,
        )
    return optim_input


def _from_first(table: Table, full: Mapping[str, Any] | None, group: dist.ProcessGroup | None) -> Any:
    found = dist.group.WORLD if group is None else group
    assert found is not None
    ranks = ranks_of(found)
    for param in table.params:
        if isinstance(param, UnitParam) and param.original.form is not None:
            shared = param.flat_param.placement.optim
            ours = [dist.get_rank()] if shared is None else ranks_of(shared)
            if ranks != ours:
                raise StateError(
                    f"optimizer state of `{param.name}`, which is stored as {param.original.form}: rank "
                    f"{ranks[0]} has it for ranks {ours} at most, not for {ranks}. Load it on every rank "
                    "(rank0_only=False), or pass the group of those as group="
                )
    return from_first(table, None if full is None else lambda: plain_state(table, full), found)


def _unsharded(
    model: nn.Module, given: Mapping[str, Any], optim: Any, to_cpu: bool, in_rows: bool = False, wants: bool = True
) -> dict[str, Any]:
    """Return ``given`` in full or ``in_rows``; empty if this rank does not want it. ``optim``: as ``Table.groups``."""
    table = Table(model)

    def take(param: UnitParam, whole: Tensor) -> Any:
        return cut_rows(param, whole, to_cpu=to_cpu) if in_rows else copy_of(whole, to_cpu)

    return unsharded_state(table, given, table.groups(optim), Sink(take, to_cpu) if wants else None)


def _agree_on(table: Table, state: Mapping[str, Any]) -> None:
    """Compare a sharded state over ranks. Raises: RuntimeError on every rank, if it does not fit on one."""
    agree_on_rows("optim_state_dict_to_load", table.units, _checked(table, state.get("state", {})))


def _checked(table: Table, state: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, LocalParam, Any]]:
    for name, values in state.items():
        param = table.by_name.get(name)
        if not isinstance(param, UnitParam):
            continue
        for key, value in values.items():
            what = f"{key} of {param.name}"
            if is_rows(value) and param.is_sharded and shape_of(value) == param.original.full_shape:
                check_rows(what, param, value)
            yield what, param, value


def _cut(
    table: Table, full: Mapping[str, Any], optim: Any, given: OptimInput = None, fetch: Any = None, named: bool = False
) -> dict[str, Any]:
    """Return the result of ``cut``. ``given``: the user's ``optim_input``.

    ``fetch``: None for a state that this rank has, in full or in rows.
    """
    if fetch is None:
        fetch, full = from_rows(table, full.get("state", {})), plain_state(table, full)
    groups = table.groups(optim if optim is not None else _warned(given))
    own = None if optim is None else optim.param_groups
    if optim is not None:
        state = {name: list(values) for name, values in full.get("state", {}).items() if name in table.by_name}
        why = why_not(optim, full.get("param_groups", ()), state)
        if why is not None:
            raise StateError(
                f"the state is of another class of optimizer than {class_of(optim)}: {why}. Make the optimizer that "
                "was saved, or convert the state before it is loaded"
            )
    return cut(table, full, groups, fetch, own=own, named=named)
