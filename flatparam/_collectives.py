"""Collectives by the names that the installed torch has, looked up at each call: users count and replace them."""

import torch.distributed as dist
from torch import Tensor


def all_gather_single(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``shard`` ``[n]`` of every rank into ``output`` ``[world size * n]``, in rank order.

    Source: ``torch.distributed.all_gather_single`` (2.13), ``all_gather_into_tensor`` before.
    """
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(output, shard, group)


def all_gather_chunks(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """The same through ``torch.distributed.all_gather`` of the equal chunks of ``output``, which every backend has."""
    dist.all_gather(list(output.chunk(dist.get_world_size(group))), shard, group=group)
