"""Clip sharded gradients by their norm over all ranks.

The wrapper's ``clip_grad_norm_`` and the replaced ``torch.nn.utils.clip_grad_norm_`` call ``clip(by_group(...))``.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ... import _C
from ...common.tensors import refuse_freed
from ...common.warned import warn_here
from ..desync import checked_collectives
from ..sharding.flat_param import FlatParam


class Members(NamedTuple):
    """Parameters whose norm is reduced over the same groups.

    ``flat_param``: one sharded flat parameter of them, None: each rank has whole gradients; ``across``: the group of
    the mesh over which DTensors are sharded besides, None: there is none.
    """

    flat_param: FlatParam | None
    params: list[Any]
    across: Any


_WIDE = {torch.float64, torch.complex128}


def by_group(params: Iterable[tuple[FlatParam | None, Any]]) -> list[Members]:
    """Sort ``params`` into groups. Each item is (flat parameter or None, parameter).

    A DTensor, or a flat parameter with DTensors in it, comes as stand-in parameters with the local gradients.
    Raises: ValueError naming a parameter whose gradient has no memory.
    """
    found: dict[Any, Members] = {}
    plain: dict[FlatParam | None, list[Any]] = {}
    cuts: dict[FlatParam, dict[int, Any]] = {}  # id of an original parameter -> the group of its mesh

    def members_of(flat_param: FlatParam | None, across: Any) -> list[Any]:
        shared = None if flat_param is None or not flat_param.is_sharded else flat_param
        group = None if shared is None else shared.placement.optim
        return found.setdefault((group, across), Members(shared, [], across)).params

    for flat_param, param in params:
        if param.grad is not None and _C.lacks_memory(param.grad):
            refuse_freed(param.grad, f"the gradient of {_called(flat_param, param)}")
        if flat_param is None and isinstance(param, DTensor):
            grad: Any = param.grad
            members_of(None, _across(param._spec)).append(_having(None if grad is None else grad.to_local(), param))
        elif flat_param is None or not flat_param.has_forms:
            if flat_param not in plain:
                plain[flat_param] = members_of(flat_param, None)
            plain[flat_param].append(param)
        elif flat_param.use_orig_params:
            if flat_param not in cuts:
                cuts[flat_param] = {id(one.param): _across(one.form and one.form.kept) for one in flat_param.originals}
            members_of(flat_param, cuts[flat_param][id(param)]).append(param)
        else:
            for here in flat_param.shard_slices():
                form = here.original.form
                piece = None if param.grad is None or here.numel < 0 else here.of(param.grad)
                members_of(flat_param, _across(form and form.kept)).append(_having(piece, param))
    return sorted(found.values(), key=lambda members: members.flat_param is None)


def _called(flat_param: FlatParam | None, param: Tensor) -> str:
    if flat_param is not None and not flat_param.use_orig_params:
        return f"the shard that holds `{flat_param.originals[0].fqn}`"
    for original in () if flat_param is None else flat_param.originals:
        if original.param is param:
            return f"`{original.fqn}`"
    return f"a parameter of shape {tuple(param.shape)}"


def _across(spec: Any) -> Any:
    """The group over which a DTensor, or its spec, is sharded; None: each rank has the whole."""
    placements = getattr(spec, "placements", ())
    return spec.mesh.get_group(0) if any(placement.is_shard() for placement in placements) else None


def _having(grad: Tensor | None, like: Tensor) -> nn.Parameter:
    """A stand-in parameter without elements: it has the dtype of ``like``, and ``grad`` itself as its gradient."""
    param = nn.Parameter(torch.empty(0, dtype=like.dtype))
    _C.set_grad(param, grad)
    return param


def clip(groups: list[Members], max_norm: float, norm_type: float, error_if_nonfinite: bool = False) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``. Return the norm before, equal on every rank.

    A collective call. ``groups``: from ``by_group``. The norm of a group is added over the ranks that share it, and
    over the mesh of DTensors. It is computed in fp32, or in fp64 if a parameter is in fp64. The result has the widest
    real dtype of the gradients. Autograd records nothing.
    Raises: ValueError for a ``max_norm`` that is NaN or below 0, which would reverse the gradients, and for a
    ``norm_type`` that is not above 0; RuntimeError with ``error_if_nonfinite`` for a norm that is infinite or NaN. The
    gradients are as before then.
    Source: torch 2.13 ``FullyShardedDataParallel.clip_grad_norm_``.
    """
    if not max_norm >= 0:
        raise ValueError(f"expected max_norm to be at least 0, got {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"expected norm_type to be above 0, or infinity, got {norm_type}")
    params = [param for group in groups for param in group.params]
    if all(group.flat_param is None and group.across is None for group in groups):
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    device = next((group.flat_param.device for group in groups if group.flat_param is not None), params[0].device)
    is_wide = not _WIDE.isdisjoint({param.dtype for param in params})  # on every rank alike
    is_max = norm_type == math.inf
    total: Tensor | None = None
    for group in groups:
        norm = _C.grad_norm(group.params, norm_type, is_wide, device)
        if is_max:  # MAX may drop NaN, so a second element says whether there is one
            norm = torch.stack([norm.nan_to_num(posinf=math.inf), norm.isnan().to(norm.dtype)])
        op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
        if group.flat_param is not None:
            checked_collectives.all_reduce(norm, op, group.flat_param, _C.EVENT_CLIPS)
        if group.across is not None:
            checked_collectives.run(dist.all_reduce, norm, op=op, group=group.across)
        if is_max:
            norm = norm[0].masked_fill(norm[1] > 0, math.nan)
        total = norm if total is None else torch.maximum(total, norm) if is_max else total + norm
    assert total is not None
    root = 1.0 if is_max else 1.0 / norm_type
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {(total**root).item()}: nothing was clipped"
        )
    if all(param.grad is None for param in params):  # torch's class, too, warns on each rank, and its test asks for it
        warn_here(
            f"clip_grad_norm_() was called on rank {dist.get_rank()} with no gradients -- returning the total norm in "
            f"the default dtype {torch.float64 if is_wide else torch.float32}"
        )
    return _C.clip_grads(params, total, root, max_norm)
