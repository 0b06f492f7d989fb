"""A world of ranks that do not exist: this process is one of them, and its collectives return at once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """Make this process ``rank`` of a fake world of ``size``; nothing is communicated."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
