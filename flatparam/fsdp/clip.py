"""Clipping gradients that are spread over ranks by their norm over all of them."""

import functools
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


def clip_grad_norm(
    units: Iterable[Unit], others: Iterable[Any], max_norm: float, norm_type: float, device: torch.device
) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before, on every rank the same.

    ``others``: parameters that no unit has, counted once. Sharded ones are summed over the ranks that share them.
    The norm is computed in fp32, or fp64 where a parameter is, and has the widest real dtype of the gradients.
    Source: torch 2.13 ``FullyShardedDataParallel.clip_grad_norm_``.
    """
    found: dict[int, tuple[Segment | None, Any]] = {
        id(param): (segment, param) for unit in units for segment, param in unit.parameters()
    }
    apart = (param for param in others if id(param) not in found and isinstance(param, nn.Parameter))
    found |= {id(param): (segment_of(param), param) for param in apart}
    return clip(*by_group(found.values()), max_norm, norm_type, device)


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
    device: torch.device,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """``clip_grad_norm`` of parameters that ``by_group`` has told apart, with no autograd recording.

    Raises: RuntimeError for a norm that is none, if asked.
    """
    if not sharded:
        return nn.utils.clip_grad_norm_(whole, max_norm, norm_type)
    groups = [*sharded, *([(None, whole)] if whole else [])]
    dtypes = {param.dtype for _, members in groups for param in members}
    is_wide = not dtypes.isdisjoint((torch.float64, torch.complex128))  # on every rank alike
    precision = torch.float64 if is_wide else torch.float32
    is_max = norm_type == math.inf
    total: Tensor | None = None
    every = [_by_kind(members) for _, members in groups]
    for (first, _), kinds in zip(groups, every, strict=True):
        norm = _norm(kinds, norm_type, precision, device)
        norm = norm if is_max else norm**norm_type
        if first is not None:
            if is_max:  # a MAX may drop NaN: whether there is any goes along
                norm = torch.stack([norm.nan_to_num(posinf=math.inf), norm.isnan().to(precision)])
                order.all_reduce(norm, dist.ReduceOp.MAX, first, _C.EVENT_CLIPS)
                norm = norm[0].masked_fill(norm[1] > 0, math.nan)
            else:
                order.all_reduce(norm, dist.ReduceOp.SUM, first, _C.EVENT_CLIPS)
        total = norm if total is None else torch.maximum(total, norm) if is_max else total + norm
    assert total is not None
    if not is_max:
        total = total ** (1.0 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}: nothing was clipped"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for (place, dtype), grads in (kind for kinds in every for kind in kinds.items()):
        torch._foreach_mul_(list(grads.values()), factor.to(place, dtype.to_real()))
    if not any(every):
        name = "fp64" if is_wide else "fp32"
        warnings.warn(
            f"clip_grad_norm_() found no gradients on rank {dist.get_rank()}: the norm is {name}", stacklevel=3
        )
        return total
    return total.to(functools.reduce(torch.promote_types, (dtype for kinds in every for _, dtype in kinds)).to_real())


Kinds = dict[tuple[torch.device, torch.dtype], dict[int, Tensor]]


def _by_kind(params: list[Any]) -> Kinds:
    """The gradients of ``params`` by device and dtype, each with its place among them."""
    kinds: Kinds = {}
    for i, param in enumerate(params):
        if (grad := param.grad) is not None:
            kinds.setdefault((grad.device, grad.dtype), {})[i] = grad
    return kinds


def _norm(kinds: Kinds, norm_type: float, precision: torch.dtype, device: torch.device) -> Tensor:
    """The norm of the gradients of this rank, on ``device``."""
    found: dict[int, Tensor] = {}
    for (_, dtype), grads in kinds.items():
        some = {i: grad for i, grad in grads.items() if grad.numel() > 0}
        if some:
            norms = torch._foreach_norm(list(some.values()), norm_type, torch.promote_types(dtype, precision))
            found.update(zip(some, norms, strict=True))
    if not found:
        return torch.zeros((), dtype=precision, device=device)
    each = list(found.values())
    if len(each) == 1 and norm_type in (2.0, math.inf):
        return each[0].to(device, precision)  # is its own norm
    if len(kinds) > 1:
        each = [found[i].to(device, precision) for i in sorted(found)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(each), norm_type)
    return norm.to(device, precision)
