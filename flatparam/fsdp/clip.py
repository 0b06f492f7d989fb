"""Clipping gradients that are spread over ranks by their norm over all of them."""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from .. import _C
from . import order
from .owners import segment_of
from .segment import Segment
from .unit import Unit

Members = tuple[Segment, list[Any]]  # the parameters that a group shares, and the segment of the first

_WIDE = {torch.float64, torch.complex128}


def clip_grad_norm(units: Iterable[Unit], others: Iterable[Any], max_norm: float, norm_type: float) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before, on every rank the same.

    ``others``: parameters that no unit has, counted once. Sharded ones are summed over the ranks that share them.
    The norm is computed in fp32, or fp64 where a parameter is, and has the widest real dtype of the gradients.
    Source: torch 2.13 ``FullyShardedDataParallel.clip_grad_norm_``.
    """
    of_units = [pair for unit in units for pair in unit.parameters()]
    known = {id(param) for _, param in of_units}
    apart = {id(param): param for param in others if id(param) not in known and isinstance(param, nn.Parameter)}
    return clip(*by_group([*of_units, *((segment_of(param), param) for param in apart.values())]), max_norm, norm_type)


def by_group(params: Iterable[tuple[Segment | None, Any]]) -> tuple[list[Members], list[Any]]:
    """The sharded ones of ``params``, each behind its segment, by the group that shares them, and the others."""
    sharded: dict[Any, Members] = {}
    whole: list[Any] = []
    members: dict[Segment | None, list[Any]] = {None: whole}
    for segment, param in params:
        if segment is not None and segment not in members:
            shared = sharded.setdefault(segment.placement.optim, (segment, [])) if segment.is_sharded else None
            members[segment] = whole if shared is None else shared[1]
        members[segment].append(param)
    return list(sharded.values()), whole


def clip(
    sharded: list[Members],
    whole: list[Any],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """``clip_grad_norm`` of parameters that ``by_group`` has told apart, with no autograd recording.

    Raises: RuntimeError for a norm that is none, if asked.
    """
    if not sharded:
        return nn.utils.clip_grad_norm_(whole, max_norm, norm_type)
    groups = [*sharded, *([(None, whole)] if whole else [])]
    params = [param for _, members in groups for param in members]
    is_wide = not _WIDE.isdisjoint({param.dtype for param in params})  # on every rank alike
    is_max = norm_type == math.inf
    total: Tensor | None = None
    for first, members in groups:
        norm = _C.grad_norm(members, norm_type, is_wide, sharded[0][0].device)
        if first is not None:
            if is_max:  # a MAX may drop NaN: whether there is any goes along
                norm = torch.stack([norm.nan_to_num(posinf=math.inf), norm.isnan().to(norm.dtype)])
                order.all_reduce(norm, dist.ReduceOp.MAX, first, _C.EVENT_CLIPS)
                norm = norm[0].masked_fill(norm[1] > 0, math.nan)
            else:
                order.all_reduce(norm, dist.ReduceOp.SUM, first, _C.EVENT_CLIPS)
        total = norm if total is None else torch.maximum(total, norm) if is_max else total + norm
    assert total is not None
    root = 1.0 if is_max else 1.0 / norm_type
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {(total**root).item()}: nothing was clipped"
        )
    if all(param.grad is None for param in params):
        warnings.warn(
            f"clip_grad_norm_() was called on rank {dist.get_rank()} with no gradients -- returning the total norm in "
            f"the default dtype {torch.float64 if is_wide else torch.float32}",
            stacklevel=3,
        )
    return _C.clip_grads(params, total, root, max_norm)
