"""The memory order of a dense tensor, and ranges of elements in that order as boxes.

The order is row-major except for dense tensors with other strides, such as a transposed weight. A box has the tensor's
dimensions. Checkpoints and local states use this.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .layout import Box, boxes_of_range
from .tensors import row_major


@dataclass(frozen=True)
class Dense:
    """The memory order of a dense tensor of ``shape`` and ``stride``. ``order``: its dimensions, outermost first."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], stride: Sequence[int]) -> "Dense":
        """Return the order for dense strides. The strides of dimensions of size 1 may have any value."""
        if tuple(stride) == row_major(shape):
            return cls(tuple(shape), tuple(stride), tuple(range(len(shape))))
        order = sorted(range(len(shape)), key=lambda d: (shape[d] > 1, -stride[d]))
        inner = row_major([shape[d] for d in order])
        strides = dict(zip(order, inner, strict=True))
        return cls(tuple(shape), tuple(strides[d] for d in range(len(shape))), tuple(order))

    def boxes(self, begin: int, end: int) -> list[Box]:
        """Return elements ``[begin, end)`` in memory order as boxes of the tensor."""
        found = boxes_of_range([self.shape[d] for d in self.order], begin, end)
        if self.order == tuple(range(len(self.order))):  # row-major
            return found
        back = sorted(range(len(self.order)), key=lambda i: self.order[i])
        return [Box(tuple(box.offsets[i] for i in back), tuple(box.sizes[i] for i in back)) for box in found]

    def view(self, flat: Tensor, start: int, box: Box) -> Tensor:
        """Return a view of ``box`` in 1-D ``flat``, which begins with element ``start`` in memory order."""
        at = sum(offset * stride for offset, stride in zip(box.offsets, self.stride, strict=True)) - start
        return flat.as_strided(box.sizes, self.stride, flat.storage_offset() + at)
