"""Collectives by the names that the installed torch has, looked up at each call: users count and replace them."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._flat_param import FakeProcessGroup

from ._waits import is_sliced, wait_in_slices

_AS_THEY_WERE: dict[str, Any] = {
    name: getattr(dist, name, None)
    for name in ("all_gather", "all_gather_single", "all_gather_into_tensor", "all_reduce")
}


def gathering() -> Callable[..., Any]:
    """``torch.distributed.all_gather_single`` (2.13), ``all_gather_into_tensor`` before."""
    return getattr(dist, "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor")


def all_gather_single(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``shard`` ``[n]`` of every rank into ``output`` ``[world size * n]``, in rank order."""
    function = gathering()
    if _can_be_interrupted(function, group, shard):
        wait_in_slices(function(output, shard, group, async_op=True))
    else:
        function(output, shard, group)


def all_gather_chunks(chunks: list[Tensor], shard: Tensor, group: dist.ProcessGroup) -> None:
    """The same into one tensor a rank, through ``torch.distributed.all_gather``, which every backend has."""
    if _can_be_interrupted(dist.all_gather, group, shard):
        wait_in_slices(dist.all_gather(chunks, shard, group=group, async_op=True))
    else:
        dist.all_gather(chunks, shard, group=group)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The sum over ranks, in place."""
    if _can_be_interrupted(dist.all_reduce, group, tensor):
        wait_in_slices(dist.all_reduce(tensor, group=group, async_op=True))
    else:
        dist.all_reduce(tensor, group=group)


def _can_be_interrupted(function: Any, group: dist.ProcessGroup, tensor: Tensor) -> bool:
    """Where not, torch waits: for what a user has put in its place, and for backends whose waits cannot be cut."""
    return is_sliced(group, tensor.device) and any(function is known for known in _AS_THEY_WERE.values())


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
