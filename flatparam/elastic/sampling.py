"""``samples``: which samples of the data set a rank has in a step, while the number of ranks changes."""

import functools

import torch

from .training import rank, size


def samples(step: int, batch_size: int, length: int, seed: int = 0) -> list[int]:
    """Return the indices of this rank's samples in ``step``, for any number of ranks.

    In a pass over the data set each of the first ``length // batch_size * batch_size`` entries of a permutation comes
    once, also if the number of ranks changes in it: step and ``batch_size`` decide the batch, and the ranks deal it
    out. The first ``batch_size % size()`` ranks get one sample more.

    Args:
        step: of ``steps``.
        batch_size: samples of a step on all ranks together.
        length: samples of the data set, at least ``batch_size``.
        seed: of the permutations, one for each pass over the data set.

    Raises: ValueError; StateError as ``rank``.
    """
    if not 0 < batch_size <= length:
        raise ValueError(f"elastic.samples: expected batch_size from 1 to {length}, got {batch_size}")
    epoch, number = divmod(step, length // batch_size)
    batch = _order(length, seed + epoch)[number * batch_size : (number + 1) * batch_size]
    found: list[int] = batch[rank() :: size()].tolist()
    return found


@functools.lru_cache(maxsize=1)
def _order(length: int, seed: int) -> torch.Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed), device="cpu")
