"""The bytes that the elastic loop keeps on each rank; oracle: the storages that are really there.

Promises:
- ``bytes_of_copies`` gives them exactly, and ``memory_plan().kept_by_elastic`` within 2 %, from the parameters and the
  optimizer:
  `test_the_bytes_kept_are_those_of_the_plan`
"""

import datetime

import pytest
import torch
import torch.distributed as dist
from simulated_ranks import simulate_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, elastic
from flatparam.common.redundancy import bytes_of_copies, group_of
from flatparam.elastic import training
from flatparam.fsdp.desync.stores import store_of_world

pytestmark = pytest.mark.multiprocess


def keeps(redundancy, strategy):
    store, rank, size = store_of_world(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()

    def build():
        model = FSDP(nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))), sharding_strategy=strategy)
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    session = training.Session(store, f"{rank}.0", size, redundancy, 1, datetime.timedelta(seconds=60))
    model, optimizer = training.begin_session(session, build)
    for _ in elastic.steps(model, optimizer, until=4):
        with elastic.survive():
            model(torch.ones(2, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    session.complete()
    kept = [tensor for one in session.generations for tensor in (one.data, one._got, one.parity)]
    held = sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}.values())
    lengths = [None] * size
    dist.all_gather_object(lengths, (int(session.generations[-1].data[:24].view(torch.int64)[2]), held))
    longest, most = map(max, zip(*(lengths[one] for one in group_of(0, size, redundancy)), strict=True))
    assert most == bytes_of_copies(longest, size, redundancy)
    assert 0.98 < model.memory_plan().kept_by_elastic(size, redundancy) / most < 1.0


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize(("size", "redundancy"), [(2, "parity"), (3, "buddy"), (4, "parity"), (5, "parity")])
def test_the_bytes_kept_are_those_of_the_plan(size, redundancy, strategy):
    simulate_ranks(keeps, size, redundancy, strategy)
