"""torch's attributes of a ``FlatParameter``, set on ours for tools that read them from ``parameters()``.

They are for reading only. Attributes of the unsharded data are not set: C owns that memory during a step.
``unit/unit.py`` and ``wrapper/torch_names.py`` call this.
Source: torch 2.13, ``torch/distributed/fsdp/_flat_param.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import _C
from ...common.tensors import is_at
from ...common.torch_private import _ShardParamInfo

if TYPE_CHECKING:
    from .flat_param import FlatParam


def describe(flat_param: FlatParam) -> None:
    """Set torch's attributes on ``flat_param.flat``. Call it again when ``flat.data`` is replaced."""
    flat: Any = flat_param.flat
    layout, originals = flat_param.layout, flat_param.originals
    flat._fqns = tuple(original.fqn for original in originals)
    flat._num_params = len(originals)
    flat._shapes = tuple(original.shape for original in originals)
    flat._strides = tuple(original.stride for original in originals)
    flat._contiguities = tuple(original.contiguous for original in originals)
    flat._numels, flat._numels_with_padding = layout.numels, layout.numels_with_padding
    flat._is_padding_mask = layout.is_padding_mask
    flat._shard_param_infos = tuple(_ShardParamInfo(*piece) for piece in flat_param.pieces)
    flat._shard_numel_padded = layout.shard(flat_param.placement.rank).padding
    flat._unpadded_unsharded_size = torch.Size([layout.numel])
    flat._padded_unsharded_size = torch.Size([layout.padded_numel])
    flat._sharded_size = torch.Size([layout.shard_numel])
    flat._local_shard = flat.data
    flat_param.dtype = flat.dtype
    flat._params = [original.param for original in originals] if flat_param.use_orig_params else None
    if flat_param.compute_dtype is not None:
        flat._mp_shard = flat.new_empty(0, dtype=flat_param.compute_dtype)  # empty, as torch's outside of a gather


def now(flat_param: FlatParam, whole: Tensor | None) -> nn.Parameter:
    """Return the flat parameter as torch shows it at this moment.

    Its data are the unsharded memory while that is allocated, else the shard. ``whole``: a tensor at the beginning of
    the unsharded memory. With ``use_orig_params`` it has a gradient if the originals' gradients are views of one
    tensor: that tensor.
    """
    flat, grad = flat_param.flat, _common_gradient(flat_param) if flat_param.use_orig_params else None
    if whole is not None and flat_param.is_sharded and not _C.lacks_memory(whole):
        data = whole.detach().as_strided((flat_param.layout.numel,), (1,), 0)
    elif grad is not None:
        data = flat.detach()
    else:
        return flat
    shown = nn.Parameter(data, flat.requires_grad)
    vars(shown).update(vars(flat))
    if grad is not None and grad.shape == shown.shape:
        shown.grad = grad
    return shown


def _common_gradient(flat_param: FlatParam) -> Tensor | None:
    pieces = [(here, here.original.param.grad) for here in flat_param.shard_slices() if here.numel > 0]
    given = [(here, grad) for here, grad in pieces if grad is not None]
    if not given:
        return None
    (first, grad), numel = given[0], flat_param.layout.shard_numel
    begin = grad.storage_offset() - first.start
    if begin < 0 or grad.untyped_storage().nbytes() < (begin + numel) * grad.itemsize:
        return None
    shard = grad.as_strided((numel,), (1,), begin)
    return shard if all(is_at(grad, here.of(shard)) for here, grad in given) else None
