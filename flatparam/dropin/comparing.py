"""Check that all ranks have built the same units, before the first gather and the first reduction of a model.

Without the check, ranks with other sizes or fewer units would crash in a collective, ranks that have frozen other units
would wait for each other in a reduction, and ranks with other parameters would train a mixture. torch compares only
indices of parameters, and only with TORCH_DISTRIBUTED_DEBUG.

| moment | group | units |
|---|---|---|
| before a gather | the shards' group | those of the model that are sharded over this group |
| before a reduction | NO_SHARD: the process group; HYBRID_SHARD: the replicas' group | those that are reduced over it |

At both moments all ranks of the group issue a collective anyway. A rank without sharding may run forwards alone, and so
may a replica. If a replica's own ranks differ, they raise in a gather, and never come to the reduction: they tell the
other replicas through the store. ``gathering.py`` calls this; each unit is compared once for each moment.

Not compared: reductions by a user's communication hook, which may use other ranks; parameters that are frozen later;
groups of torch's "fake" backend, which has no other ranks. With TORCH_DISTRIBUTED_DEBUG=DETAIL frozen parameters are
not compared either: torch compares the order of the units and the kinds of collectives then, and its errors stay.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..common.collectives import all_gather_beside, ranks_of
from ..common.described import Described, digest_of_said, first_difference
from ..common.warned import warn_user
from .base import Handle
from .post_backward import is_reduced_by_default

_HALF = 16  # bytes of each of the two digests
_Unit = tuple[str, Described]  # (name for messages, its parameters and settings)


def check_before_gather(handle: Handle) -> None:
    """Compare the units of the model that are sharded over this group. A collective call, unless it was done before.

    If only the names differ, it warns: torch allows that, for example if ranks ignore other modules.
    Raises: ValueError on all ranks alike, naming the first rank and parameter that differ from the first rank's.
    """
    if handle._is_compared:
        return
    units = [unit for unit in handle.units_of_model if unit.process_group is handle.process_group]
    units = [unit for unit in units if unit.uses_sharded_strategy and not unit._is_compared]
    try:
        _check(units, handle.process_group)
    except ValueError as error:
        with contextlib.suppress(StopIteration, dist.DistError):  # no replicas; the store is gone
            unit = next(unit for unit in units if unit._replicas is not None)
            _store().set(_key(dist.get_rank(), unit), str(error))
        raise
    for unit in units:
        unit._is_compared = True


def check_before_reduction(handle: Handle) -> None:
    """``check_before_gather`` for the units that are reduced over the group of this unit's all-reduce.

    Called in the runtime's post-backward hook. Nothing is done if the runtime issues no all-reduce next.
    """
    group = _all_reduced_over(handle)
    if handle._is_reduction_compared or handle.flat_param.grad is None or not is_reduced_by_default(handle):
        return
    units = [unit for unit in handle.units_of_model if _all_reduced_over(unit) is group]
    units = [unit for unit in units if not unit._is_reduction_compared]
    if group is not None:
        _check(units, group, lambda: _raise_error_of_replica(units[0]))
    for unit in units:
        unit._is_reduction_compared = True


def _all_reduced_over(handle: Handle) -> Any:
    """Return the group over which the runtime all-reduces the unit's gradient; None: it only reduce-scatters."""
    return handle._replicas if handle.uses_sharded_strategy else handle.process_group


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _key(rank: int, unit: Handle) -> str:
    return f"flatparam/{rank} differs/{unit._replicas.group_name}/{unit._replicas_serial}"


def _raise_error_of_replica(unit: Handle) -> None:
    """Raises: ValueError if a rank of another replica has raised it in ``check_before_gather``."""
    if unit._replicas is None:
        return
    with contextlib.suppress(dist.DistError):
        for rank in ranks_of(unit._replicas):
            if _store().check([_key(rank, unit)]):
                raise ValueError(f"rank {rank}: {_store().get(_key(rank, unit)).decode()}")


def _check(units: list[Handle], group: Any, look: Callable[[], object] = lambda: None) -> None:
    """Compare ``units`` over ``group``: 32 bytes, not through ``torch.distributed``'s functions."""
    said = [(unit._names(), _describe(unit)) for unit in units]
    parts = ([[each[i] for each in described] for _, described in said] for i in (1, 0))  # forms, names
    digests = b"".join(digest_of_said(repr(part))[:_HALF] for part in parts)
    words = [int.from_bytes(digests[i : i + 8], "little", signed=True) for i in range(0, len(digests), 8)]
    look()
    everyone = all_gather_beside(torch.tensor(words, device=units[0].device), group, look)
    if everyone is None or all(other == words for other in everyone):
        return
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, said, group)
    _raise_or_warn(told, group)


def _raise_or_warn(told: list[list[_Unit]], group: Any) -> None:
    """``told``: the units of each rank of ``group``, which are not all equal."""
    ranks, others = ranks_of(group), []
    for unit in itertools.zip_longest(*told, fillvalue=("", [])):
        name = next(name for name, _ in unit if name)
        described = [_with_names_of(unit[0][1], other) for _, other in unit]
        if any(other != described[0] for other in described):
            raise ValueError(
                f"the ranks have built different units: {first_difference(ranks, described)}. Build the same model, "
                f"with the same settings, on every rank [{name}]"
            )
        if any(other != unit[0][1] for _, other in unit):
            others.append(name)
    warn_user(
        "the ranks have other names for parameters of the same shapes: the first of one rank is trained as the first "
        f"of the others, whatever its name. If they are not the same, build the same model on every rank [{others[0]}]",
        [group],
    )


def _with_names_of(first: Described, other: Described) -> Described:
    """Return ``other`` with the names of ``first`` for entries that differ only in the name: names are not compared."""
    names = [
        expected[0] if expected[1] == found[1] else found[0] for expected, found in zip(first, other, strict=False)
    ]
    return [*zip(names, (what for _, what in other), strict=False), *other[len(names) :]]


def _describe(handle: Handle) -> Described:
    flat_param = handle.flat_param
    settings = (
        f"{handle._sharding_strategy.name}, {handle.world_size} ranks, {handle._orig_param_dtype}, "
        f"use_orig_params={handle._use_orig_params}, param_dtype={handle._fwd_bwd_param_dtype}, "
        f"reduce_dtype={handle._reduce_dtype}, {flat_param.numel()} elements on each rank"
    )
    originals = flat_param._params if handle._use_orig_params else [flat_param] * len(flat_param._fqns)
    fields = (flat_param._fqns, flat_param._shapes, flat_param._strides, originals)
    torch_compares = dist.get_debug_level() == dist.DebugLevel.DETAIL
    parameters = [
        (
            f"parameter `{fqn}`",
            f"shape {tuple(shape)}, strides {tuple(stride)}, {handle._orig_param_dtype}"
            + ("" if torch_compares else f", requires_grad={original.requires_grad}"),
        )
        for fqn, shape, stride, original in zip(*fields, strict=True)
    ]
    return [*parameters, ("a flat parameter", settings)]
