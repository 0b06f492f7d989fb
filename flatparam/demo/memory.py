"""How many bytes a process holds: of tensors, and resident."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor


def tensor_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages under ``tensors``, each counted once: padding counts, a view does not."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in the optimizer's state."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return tensor_bytes(value for value in values if isinstance(value, Tensor))


class PeakMemory:
    """The peak of resident memory from now on, above what is resident now."""

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        except OSError:
            pass  # not allowed in some containers: the peak then counts from the start of the process
        self._baseline = _status("VmRSS")

    def above_start(self) -> int:
        """Bytes."""
        return _status("VmHWM") - self._baseline


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
