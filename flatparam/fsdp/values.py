"""Values that users put in place of a parameter's: in the order of its memory, and in its dtype."""

import torch
from torch import Tensor

from ..common.tensors import in_storage_order
from .originals import Original


def check_not_rounded(name: str, original: Original, value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` in ``dtype``. Raises: ValueError naming the parameter if that loses something."""
    if value.dtype == dtype:
        return value
    converted = value.to(dtype)
    if not same_bytes(converted.to(value.dtype), value):
        raise ValueError(
            f"{name}: the new data of parameter `{original.fqn}` are of {value.dtype}, which {dtype} would round: "
            "convert them yourself, or the model before"
        )
    return converted


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one dtype and shape are equal bit for bit: -0.0 is not 0.0, and a NaN is itself."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def in_order(value: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The elements of ``value`` as a 1-D tensor in the order of memory that dense strides give."""
    if value.stride() == stride:
        return in_storage_order(value)
    ordered = value.new_empty(value.numel())
    ordered.as_strided(value.shape, stride).copy_(value)
    return ordered
