"""The attributes by which torch's ``FlatParameter`` describes itself, on ours: tools read them from ``parameters()``.

They are for reading. What is unsharded has none: C has it, for as long as a step needs it.
Source: torch 2.13, ``torch/distributed/fsdp/_flat_param.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor

from ..common.tensors import lacks_memory
from ..common.torch_private import _ShardParamInfo

if TYPE_CHECKING:
    from .segment import Segment


def describe(segment: Segment) -> None:
    """Let ``segment.flat`` say what it has. Again when it is given other data."""
    flat: Any = segment.flat
    layout, originals = segment.layout, segment.originals
    flat._fqns = tuple(original.fqn for original in originals)
    flat._num_params = len(originals)
    flat._shapes = tuple(original.shape for original in originals)
    flat._strides = tuple(original.stride for original in originals)
    flat._contiguities = tuple(original.contiguous for original in originals)
    flat._numels, flat._numels_with_padding = layout.numels, layout.numels_with_padding
    flat._is_padding_mask = layout.is_padding_mask
    flat._shard_param_infos = tuple(_ShardParamInfo(*piece) for piece in segment.pieces)
    flat._shard_numel_padded = layout.shard(segment.placement.rank).padding
    flat._unpadded_unsharded_size = torch.Size([layout.numel])
    flat._padded_unsharded_size = torch.Size([layout.padded_numel])
    flat._sharded_size = torch.Size([layout.shard_numel])
    flat._local_shard = flat.data
    flat._params = [original.param for original in originals] if segment.use_orig_params else None
    if segment.compute_dtype is not None:
        flat._mp_shard = flat.new_empty(0, dtype=segment.compute_dtype)  # a gather's input, which is not kept


def now(segment: Segment, whole: Tensor | None) -> nn.Parameter:
    """The flat parameter as torch's: of the memory that ``whole`` begins while that is there, else the shard."""
    flat = segment.flat
    if whole is None or not segment.is_sharded or lacks_memory(whole):
        return flat
    unsharded = nn.Parameter(whole.detach().as_strided((segment.layout.numel,), (1,), 0), flat.requires_grad)
    vars(unsharded).update(vars(flat))
    return unsharded
