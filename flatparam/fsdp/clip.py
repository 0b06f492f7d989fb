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


def clip_grad_norm(
    units: Iterable[Unit], others: Iterable[Any], max_norm: float, norm_type: float, device: torch.device
) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before, on every rank the same.

    ``others``: parameters that no unit has, counted once. Sharded ones are summed over the ranks that share them.
    The norm is computed in fp32, or fp64 where a parameter is, and has the widest real dtype of the gradients.
    Source: torch 2.13 ``FullyShardedDataParallel.clip_grad_norm_``.
    """
    found = {id(param): (segment, param) for unit in units for segment, param in unit.parameters()}
    apart = (param for param in others if id(param) not in found and isinstance(param, nn.Parameter))
    found |= {id(param): (segment_of(param), param) for param in apart}
    return clip(*by_group(found.values()), max_norm, norm_type, device)


def by_group(params: Iterable[tuple[Segment | None, Any]]) -> tuple[dict[Any, list[Any]], list[Any]]:
    """The sharded ones of ``params``, each behind its segment, by the group that shares them, and the others."""
    sharded: dict[Any, list[Any]] = {}
    whole: list[Any] = []
    members: dict[Segment | None, list[Any]] = {None: whole}
    for segment, param in params:
        if segment not in members:
            members[segment] = sharded.setdefault(segment.placement.optim, []) if segment.is_sharded else whole
        members[segment].append(param)
    return sharded, whole


@torch.no_grad()
def clip(
    sharded: dict[Any, list[Any]],
    whole: list[Any],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """``clip_grad_norm`` of parameters that ``by_group`` has told apart; an error for a norm that is none, if asked."""
    params = [param for group in sharded.values() for param in group] + whole
    gradients = [grad for param in params if (grad := param.grad) is not None]
    if not sharded:
        return nn.utils.clip_grad_norm_(whole, max_norm, norm_type)

    is_wide = any(dtype.to_real() == torch.float64 for dtype in {param.dtype for param in params})  # on every rank alike
    precision = torch.float64 if is_wide else torch.float32

    def local_norm(some: Iterable[nn.Parameter]) -> Tensor:
        grads = [grad for param in some if (grad := param.grad) is not None and grad.numel() > 0]
        if not grads:
            return torch.zeros((), dtype=precision, device=device)
        norms: list[Any] = [None] * len(grads)
        for (_, dtype), indices in _by_kind(grads).items():
            found = torch._foreach_norm([grads[i] for i in indices], norm_type, torch.promote_types(dtype, precision))
            for i, norm in zip(indices, found, strict=True):
                norms[i] = norm
        apart = any(norm.device != norms[0].device for norm in norms)
        norms = [norm.to(device if apart else norm.device, precision) for norm in norms]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        return total.to(device)

    is_max = norm_type == math.inf
    total: Tensor | None = None
    for members in sharded.values():
        norm = local_norm(members)
        norm = norm if is_max else norm**norm_type
        first = segment_of(members[0])
        assert first is not None
        order.all_reduce(norm, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, first, _C.EVENT_CLIPS)
        total = norm if total is None else torch.maximum(total, norm) if is_max else total + norm
    assert total is not None
    if whole:
        norm = local_norm(whole)
        total = torch.maximum(total, norm) if is_max else total + norm**norm_type
    if not is_max:
        total = total ** (1.0 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}: nothing was clipped"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    kinds = _by_kind(gradients)
    for (place, dtype), indices in kinds.items():
        torch._foreach_mul_([gradients[i] for i in indices], factor.to(place, dtype.to_real()))
    if not gradients:
        name = "fp64" if is_wide else "fp32"
        warnings.warn(
            f"clip_grad_norm_() found no gradients on rank {dist.get_rank()}: the norm is {name}", stacklevel=3
        )
        return total
    return total.to(functools.reduce(torch.promote_types, (dtype for _, dtype in kinds)).to_real())


def _by_kind(grads: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """The indices of ``grads`` of each device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, grad in enumerate(grads):
        kinds.setdefault((grad.device, grad.dtype), []).append(i)
    return kinds
