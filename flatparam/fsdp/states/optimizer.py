"""The wrapper's functions for optimizer states, with the names and arguments of torch 1.12 and torch 2.

Policy only: arguments, forms, and who communicates. `optimizer_saving.py` makes a state, `optimizer_loading.py` cuts
one, `rows.py` and `from_rank0.py` bring the elements of a state that is not whole here. Nothing here changes a model.

A state is a dict with ``"state"`` (FQN of the unwrapped model -> key -> value) and ``"param_groups"``. A tensor
with one element for each element of the parameter has the parameter's shape. Other values, as a step count, are as
the optimizer has them. Parameters without state are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictType

from ...common.warned import warn_user
from ..desync.checked_collectives import telling
from ..either import or_torchs
from ..errors import StateError
from ..unit.local_params import LocalParam, UnitParam
from ..unit.unit import units_of
from .from_rank0 import from_first
from .ids import rekeyed
from .optimizer_classes import class_of, why_not
from .optimizer_loading import cut, from_here
from .optimizer_saving import Sink, unsharded_state
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
    return _full(model, optim, _state_of(model, optim), optim_input, rank0_only, group, to_cpu=True)


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
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        return _sharded(model, optim, given, to_cpu=config.offload_to_cpu)
    rank0_only = getattr(config, "rank0_only", False)
    return _full(model, optim, given, None, rank0_only, group, to_cpu=config.offload_to_cpu)


@or_torchs
def sharded_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the state with this rank's rows of each tensor, as SHARDED_STATE_DICT has parameters.

    A collective call. Raises: ValueError naming parameter and key, if ranks have different keys or values.
    """
    return _sharded(model, optim, _state_of(model, optim), to_cpu=False)


@or_torchs
def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """Convert a sharded state, saved over the same ranks, for this rank's ``optim.load_state_dict``.

    A collective call. Raises: ValueError naming parameter and key, on all ranks, if the state does not fit on one.
    """
    table = Table(model)
    fetch = _rows_of(table, sharded_optim_state_dict)
    return _cut(table, plain_state(table, sharded_optim_state_dict), fetch, optim, None)


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
    table = Table(model)
    full = plain_state(table, full_optim_state_dict)
    return _cut(table, full, from_here(table, full.get("state", {})), optim, optim_input)


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
    return _cut(table, header, fetch, optim, optim_input)


@or_torchs
def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Return a full state with FQNs for keys, or with the numbers that the optimizer of the unwrapped model uses.

    The same object, if it has these keys already. Raises: ValueError for keys of both kinds, or of no parameter.
    """
    return rekeyed(optim_state_dict, optim_state_key_type, model, optim if optim is not None else _warned(optim_input))


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
    full: Mapping[str, Any] = optim_state_dict
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        fetch, full = _rows_of(table, full), plain_state(table, full)
    elif getattr(settings.optim_state_dict_config, "rank0_only", False):
        full, fetch = _from_first(table, optim_state_dict, group)
    else:
        full = plain_state(table, full)
        fetch = from_here(table, full.get("state", {}))
    result = _cut(table, full, fetch, optim, None, named=is_named_optimizer)
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
    ranks = dist.get_process_group_ranks(found)
    for param in table.params:
        if isinstance(param, UnitParam) and param.original.form is not None:
            shared = param.flat_param.placement.optim
            ours = [dist.get_rank()] if shared is None else dist.get_process_group_ranks(shared)
            if ranks != ours:
                raise StateError(
                    f"optimizer state of `{param.name}`, which is stored as {param.original.form}: rank "
                    f"{ranks[0]} has it for ranks {ours} at most, not for {ranks}. Load it on every rank "
                    "(rank0_only=False), or pass the group of those as group="
                )
    return from_first(table, None if full is None else plain_state(table, full), found)


def _full(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    given: Mapping[str, Any],
    optim_input: OptimInput,
    rank0_only: bool,
    group: dist.ProcessGroup | None,
    *,
    to_cpu: bool,
) -> dict[str, Any]:
    table = Table(model)
    groups = table.groups(optim if optim_input is None else _warned(optim_input))
    shown = not rank0_only or dist.get_rank(group) == 0
    sink = Sink(lambda param, whole: copy_of(whole, to_cpu), to_cpu) if shown else None
    return unsharded_state(table, given, groups, sink)


def _sharded(
    model: nn.Module, optim: torch.optim.Optimizer, given: Mapping[str, Any], *, to_cpu: bool
) -> dict[str, Any]:
    table, take = Table(model), functools.partial(cut_rows, to_cpu=to_cpu)
    return unsharded_state(table, given, table.groups(optim), Sink(take, to_cpu))


def _rows_of(table: Table, state: Mapping[str, Any]) -> Any:
    """Return the ``Fetch`` of a sharded state. Raises: RuntimeError on every rank, if it does not fit on one."""
    agree_on_rows("optim_state_dict_to_load", table.units, _checked(table, state.get("state", {})))
    return from_rows(table, state.get("state", {}))


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
    table: Table, full: Mapping[str, Any], fetch: Any, optim: Any, optim_input: OptimInput, named: bool = False
) -> dict[str, Any]:
    groups = table.groups(optim if optim is not None else _warned(optim_input))
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
