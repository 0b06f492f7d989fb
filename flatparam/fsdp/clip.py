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
from .unit import Unit


def clip_grad_norm(
    units: Iterable[Unit], others: Iterable[nn.Parameter], max_norm: float, norm_type: float, device: torch.device
) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before, on every rank the same.

    ``others``: parameters that no unit has, counted once. Sharded ones are summed over the ranks that share them.
    The norm is computed in fp32, or fp64 where a parameter is, and has the widest real dtype of the gradients.
    Source: torch 2.13 ``FullyShardedDataParallel.clip_grad_norm_``.
    """
    params = [*(param for unit in units for _, param in unit.parameters()), *others]
    sharded, whole = by_group(params)
    return clip(sharded, whole, max_norm, norm_type, device)


def by_group(params: Iterable[Any]) -> tuple[dict[Any, list[Any]], list[Any]]:
    """The sharded ones of ``params`` by the group that shares them, and the others; each once."""
    sharded: dict[Any, list[Any]] = {}
    whole: list[Any] = []
    for param in {id(param): param for param in params}.values():
        segment = segment_of(param)
        if segment is not None and segment.is_sharded:
            sharded.setdefault(segment.placement.optim, []).append(param)
        else:
            whole.append(param)
    return sharded, whole


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
    gradients = list({id(param): param.grad for param in params if param.grad is not None}.values())
    if not sharded:
        return nn.utils.clip_grad_norm_(whole, max_norm, norm_type)

    is_wide = any(param.dtype.to_real() == torch.float64 for param in params)  # on every rank alike
    precision = torch.float64 if is_wide else torch.float32

    def local_norm(some: Iterable[nn.Parameter]) -> Tensor:
        norms = [
            torch.linalg.vector_norm(grad.detach(), norm_type, dtype=torch.promote_types(grad.dtype, precision))
            for grad in (param.grad for param in some)
            if grad is not None and grad.numel() > 0
        ]
        if not norms:
            return torch.zeros((), dtype=precision, device=device)
        apart = any(norm.device != norms[0].device for norm in norms)
        norms = [norm.to(device if apart else norm.device, precision) for norm in norms]
        return torch.linalg.vector_norm(torch.stack(norms), norm_type).to(device)

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
    factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    for grad in gradients:
        kind = grad.device, grad.dtype.to_real()
        if kind not in factors:
            factors[kind] = factor.to(*kind)
        grad.detach().mul_(factors[kind])
    if not gradients:
        name = "fp64" if is_wide else "fp32"
        warnings.warn(
            f"clip_grad_norm_() found no gradients on rank {dist.get_rank()}: the norm is {name}", stacklevel=3
        )
        return total
    dtype = gradients[0].dtype
    for grad in gradients[1:]:
        dtype = torch.promote_types(dtype, grad.dtype)
    return total.to(dtype.to_real())
