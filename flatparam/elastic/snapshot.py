"""A copy in host memory of what one rank would write into a checkpoint: one run of bytes.

That is its part of each shard and of the optimizers' states, which replicas share, and its ``extra``. Rank 0 alone has
the values that no unit manages. The run describes itself, and has a checksum, so that another rank can rebuild it from
parities and use it:

| bytes | content |
|---|---|
| 0 to 24 | three int64: ``checksum`` of the rest, the end of the head, the end of the run |
| to the end of the head | a pickle: epoch and step, the rank's number, its table, where each box lies |
| to the end of the run | the boxes, each at a multiple of 16 bytes |
"""

import io
import math
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.errors import CheckpointError
from ..checkpoint.files import Part
from ..checkpoint.planning import plan_save
from ..common.tensors import bytes_of
from .transport import Held, described

_ALIGNED = 16
_PREFIX = 24


Key = tuple[int, int]  # epoch and step of a snapshot


class Plan:
    """A snapshot to be taken of a model as it is now. ``length``: its number of bytes. No collective call.

    It refers to the model's memory, so ``write`` must come before the model changes.
    """

    def __init__(self, model: nn.Module, optimizer: Any, extra: Any, key: Key, number: int):
        plan = plan_save(model, optimizer, extra, number)
        plan.keep_alone(number, False)
        self._boxes: list[tuple[int, Tensor]] = []
        places, at = [], 0
        for file, parts in plan.parts.items():
            for part in parts:
                tensor = part.tensor.detach()
                places.append((file, part.key, part.shape, part.offsets, tensor.dtype, tuple(tensor.shape), at))
                self._boxes.append((at, tensor))
                at = _aligned(at + tensor.nbytes)
        self._head = pickle.dumps((key, number, described(plan), places))
        self._begin = _aligned(_PREFIX + len(self._head))
        self.length = self._begin + at

    @torch.no_grad()
    def write(self, out: Tensor) -> None:
        """Write the run into ``out``, bytes on the CPU, and zeros behind it.

        The copies come after the work of the current streams, and the host waits for them.
        """
        head = torch.frombuffer(bytearray(self._head), dtype=torch.uint8)
        out[_PREFIX : self._begin].zero_()
        out[_PREFIX : _PREFIX + len(head)] = head
        for at, tensor in self._boxes:
            _box(out, self._begin + at, tensor.dtype, tuple(tensor.shape)).copy_(tensor, non_blocking=True)
        for device in {tensor.device for _, tensor in self._boxes if not tensor.is_cpu}:
            torch.accelerator.current_stream(device).synchronize()
        out[self.length :].zero_()
        prefix = out[:_PREFIX].view(torch.int64)
        prefix[1], prefix[2] = _PREFIX + len(head), self.length
        prefix[0] = checksum(out[8 : self.length])


def _is_intact(run: Tensor) -> bool:
    """Whether the checksum of ``run`` fits."""
    sums, end_of_head, end = (int(one) for one in run[:_PREFIX].view(torch.int64))
    is_length = _PREFIX <= end_of_head <= end <= run.numel() and end % 8 == 0
    return is_length and sums == checksum(run[8:end])


def read(run: Tensor, key: Key, number: int) -> Held:
    """Return what ``run`` holds; the boxes are views of it.

    Raises: CheckpointError if it is corrupt, or another snapshot than ``key``'s of the rank ``number``.
    """
    if not _is_intact(run):
        raise CheckpointError(
            f"the copy of rank {number}'s state of step {key[1]} is corrupt: its checksum does not fit"
        )
    end = int(run[:_PREFIX].view(torch.int64)[1])
    found, of, table, places = pickle.load(io.BytesIO(bytes_of(run[_PREFIX:end])))
    if (found, of) != (key, number):
        raise CheckpointError(
            f"the copy of rank {number}'s state of step {key[1]} is corrupt: it is rank {of}'s of step {found[1]}"
        )
    parts: dict[str, list[Part]] = {}
    for file, name, shape, offsets, dtype, sizes, at in places:
        box = _box(run, _aligned(end) + at, dtype, sizes)
        parts.setdefault(file, []).append(Part(name, shape, offsets, box))
    return Held(table, parts)


def checksum(run: Tensor) -> int:
    """Return the sum of the 64-bit words of ``run``. A change of one word always changes it.

    It costs an eighth of a crc32: one core sums 17 GiB/s, and makes a crc32 of 2 GiB/s.
    """
    return int(run.view(torch.int64).sum())


def _aligned(at: int) -> int:
    return -(-at // _ALIGNED) * _ALIGNED


def _box(run: Tensor, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return run[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
