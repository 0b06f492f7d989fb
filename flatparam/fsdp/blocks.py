"""What of a parameter stays together on one rank, and how shards are aligned: ``atomic=`` and ``shard_alignment=``."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn as nn

Atomic = Literal["row"] | Callable[[nn.Parameter], int] | None


def check_layout_arguments(shard_alignment: int | None, atomic: Atomic) -> None:
    """Raises: ValueError, TypeError for what the two arguments may not be."""
    if shard_alignment is not None:
        if isinstance(shard_alignment, bool) or not isinstance(shard_alignment, int):
            raise TypeError(f"expected shard_alignment to be bytes, an int, got {shard_alignment!r}")
        if shard_alignment < 1 or shard_alignment & (shard_alignment - 1):
            raise ValueError(f"expected shard_alignment to be a power of two of bytes, got {shard_alignment}")
    if atomic is not None and atomic != "row" and not callable(atomic):
        raise ValueError(f'expected atomic to be "row", None or a callable(param) -> elements, got {atomic!r}')


def row_numel(shape: Sequence[int]) -> int:
    """Elements of one row: an index of dimension 0."""
    return math.prod(shape[1:])


def has_rows(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether each row of a dense tensor is one run of memory, and the rows follow each other."""
    return len(shape) == 0 or shape[0] <= 1 or stride[0] == row_numel(shape)


def block_of(fqn: str, param: nn.Parameter, shape: Sequence[int], stride: Sequence[int], atomic: Atomic) -> int:
    """Elements of ``param`` that stay together: a row, what the callable says, or one.

    Where the rows are no runs of memory (a transposed weight): all of it.
    Raises: ValueError, TypeError naming the parameter when the callable gives no int of at least 1.
    """
    if atomic is None:
        return 1
    if atomic == "row":
        return max(1, row_numel(shape) if has_rows(shape, stride) else math.prod(shape))
    block: Any = atomic(param)
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"expected atomic(param) to give an int for parameter `{fqn}`, got {block!r}")
    if block < 1:
        raise ValueError(f"expected atomic(param) to give at least 1 element for parameter `{fqn}`, got {block}")
    return block


def keeps_rows(shape: Sequence[int], stride: Sequence[int], block: int) -> bool:
    """Whether blocks of so many elements are whole rows, so that a piece has the parameter's dimensions."""
    if block >= math.prod(shape):
        return True
    return has_rows(shape, stride) and block % max(1, row_numel(shape)) == 0


def alignment_of(shard_alignment: int | None, dtypes: Sequence[torch.dtype], use_orig_params: bool) -> int:
    """Elements to whose multiples parameters are aligned; 0: none.

    ``dtypes``: of the shard, of gathers, and of reductions: aligned in each of them. With ``use_orig_params`` at least
    16 bytes in gathers, as torch has it.
    """
    alignment = 16 // dtypes[1].itemsize if use_orig_params else 0
    if shard_alignment is not None:
        alignment = max(alignment, shard_alignment // min(dtype.itemsize for dtype in dtypes), 1)
    return alignment
