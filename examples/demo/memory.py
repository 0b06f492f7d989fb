"""The bytes of the tensors of a process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def tensor_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the storages of ``tensors``. Each storage counts once, with padding."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the tensors in the state of the optimizer."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return tensor_bytes(value for value in values if isinstance(value, Tensor))
