"""Collectives by the names that the installed torch has, looked up at each call: users count and replace them."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .torch_private import FakeProcessGroup
from .waits import is_sliced, wait_in_slices

# The names that torch has had for each, the newest first
NAMES = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_reduce": ("all_reduce",),
}
_AS_THEY_WERE: list[Any] = [
    getattr(dist, name, None) for name in ("all_gather", *NAMES["all_gather"], *NAMES["all_reduce"])
]


def gathering() -> Callable[..., Any]:
    """The all-gather into one tensor, by the newest name that this torch has."""
    function: Callable[..., Any] = getattr(dist, next(name for name in NAMES["all_gather"] if hasattr(dist, name)))
    return function


def all_gather_at_once(output: Tensor, shard: Tensor, group: Any, async_op: bool) -> Any:
    """Begin ``gathering()``; past torch's checks of its arguments, where nobody has replaced it."""
    function = gathering()
    if hasattr(group, "_allgather_base") and any(function is known for known in _AS_THEY_WERE):
        return group._allgather_base(output, shard)
    return function(output, shard, group=group, async_op=async_op)


def all_gather_single(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``shard`` ``[n]`` of every rank into ``output`` ``[world size * n]``, in rank order."""
    _complete(gathering(), shard, group, output, shard, group)


def all_gather_chunks(chunks: list[Tensor], shard: Tensor, group: dist.ProcessGroup) -> None:
    """The same into one tensor a rank, through ``torch.distributed.all_gather``, which every backend has."""
    _complete(dist.all_gather, shard, group, chunks, shard, group=group)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The sum over ranks, in place."""
    _complete(dist.all_reduce, tensor, group, tensor, group=group)


def _complete(
    collective: Callable[..., Any], sent: Tensor, group: dist.ProcessGroup, /, *args: Any, **kwargs: Any
) -> None:
    """Wait for it here, so that Ctrl-C ends that; torch does for what a user has put in its place, and where waits
    cannot be cut.
    """
    if is_sliced(group, sent.device) and any(collective is known for known in _AS_THEY_WERE):
        wait_in_slices(collective(*args, **kwargs, async_op=True))
    else:
        collective(*args, **kwargs)


class FakeGroup:
    """torch's FakeProcessGroup, which communicates nothing, with the collectives that it lacks in torch 2.13.

    torch's own runtime fails there with FSDP_USE_FAKE_REDUCE: ``dist.reduce_scatter_single`` asks the group for it.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._group: Any = FakeProcessGroup._create_internal(rank=rank, world_size=world_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return FakeGroup, (self._group.rank(), self._group.size())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, _OLD_NAMES.get(name, name))


_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}


def fake_group(rank: int, world_size: int) -> Any:
    """A group in which ``rank`` is alone: its collectives return at once."""
    if all(hasattr(FakeProcessGroup, name) for name in _OLD_NAMES):
        return FakeProcessGroup._create_internal(rank=rank, world_size=world_size)
    return FakeGroup(rank, world_size)
