"""Storages of flat tensors: allocating and freeing in place, so that views made before stay valid objects."""

import torch
from torch import Tensor

from .. import _C
from .torch_private import _alloc_storage, _free_storage, _same_storage, _same_storage_size, _storage_size_allocated


def allocate(tensor: Tensor, size: torch.Size) -> bool:
    """Give ``tensor``'s freed storage room for ``size`` elements. False: it is plain, and has that already."""
    numel = size.numel()
    held = _C.storage_numel(tensor) if _C.is_plain(tensor) else -1
    if held == 0:
        _C.resize_storage(tensor, numel)
    elif held != numel:
        _alloc_storage(tensor, size)
    return held != numel


def free(tensor: Tensor, reason: str | None = None, keeps_size: bool = False) -> None:
    """Free ``tensor``'s storage.

    ``reason`` is what a RuntimeError says when the freed data is read or written. With ``keeps_size`` it also does for
    a view that is made of it then; the storage goes on to say the size that it had.
    """
    if _C.is_plain(tensor) and tensor.storage_offset() == 0:
        _C.resize_storage(tensor, 0, reason, keeps_size)
    else:
        _free_storage(tensor)


def is_allocated(tensor: Tensor) -> bool:
    """Whether ``tensor``'s storage has exactly the room that it needs."""
    if _C.is_plain(tensor):
        return _C.storage_numel(tensor) == tensor.numel()
    return bool(_same_storage_size(tensor, tensor.numel()))


def lacks_memory(tensor: Tensor) -> bool:
    """Whether a plain ``tensor``'s storage is too small for it: it was freed, or resized."""
    if not _C.is_plain(tensor) or tensor.numel() == 0:
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _C.storage_numel(tensor) <= tensor.storage_offset() + last


def has_memory(tensor: Tensor) -> bool:
    """Whether ``tensor``'s storage has any memory."""
    return _C.storage_numel(tensor) > 0 if _C.is_plain(tensor) else _storage_size_allocated(tensor)


def pinned(tensor: Tensor) -> Tensor:
    """A copy of a CPU ``tensor``, in pinned memory where the host has an accelerator."""
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor.clone()


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether both use the same memory; two freed storages count as the same, as for torch's ``_same_storage``."""
    if _C.is_plain(a, b):
        return _C.same_storage(a, b)
    return bool(_same_storage(a, b))
