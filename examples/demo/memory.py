"""The bytes of a process: of its tensors, and the peak of its resident memory or of its GPU."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

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


class PeakMemory:
    """The growth of memory from now to its peak: of resident memory, or of memory allocated on the GPU."""

    def __init__(self, device: str = "cpu") -> None:
        self._on_gpu = device == "cuda"
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self._baseline = torch.cuda.memory_allocated()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        except OSError:
            pass  # not allowed in some containers: the peak then counts from the start of the process
        self._baseline = _status("VmRSS")

    def above_start(self) -> int:
        """The growth in bytes."""
        if self._on_gpu:
            return torch.cuda.max_memory_allocated() - self._baseline
        return _status("VmHWM") - self._baseline


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
