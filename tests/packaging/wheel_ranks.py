"""Try an installed wheel: python tests/packaging/wheel_ranks.py

The import is timed. A model trains on one and on two gloo ranks, by the runtime and by the drop-in, and is compared
with the unsharded module in every bit. This takes no compiler, and no package but torch and the wheel.
"""

import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def trained(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):
        model(torch.arange(16.0).view(2, 8) - step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def rank_of(rank, size, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size)
    import flatparam

    expected = trained(module()).state_dict()
    flatparam.install()
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    name = "FULL_SHARD" if size > 1 else "NO_SHARD"
    drop_in = {"sharding_strategy": ShardingStrategy[name], "use_orig_params": True, "device_id": torch.device("cpu")}
    for wrapped in (
        flatparam.FullyShardedDataParallel(module(), sharding_strategy=flatparam.ShardingStrategy[name]),
        FullyShardedDataParallel(module(), **drop_in),
    ):
        found = trained(wrapped).state_dict()
        different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
        assert not different, f"{type(wrapped).__module__}, rank {rank} of {size}: {different} differ"
    dist.destroy_process_group()


def main():
    began = time.process_time()
    import flatparam

    seconds = time.process_time() - began
    for size in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(rank_of, (size, folder), size)
    print(f"torch {torch.__version__}: import {seconds * 1000:.0f} ms, {flatparam._C.__file__}; 1 and 2 ranks: equal")
    return int(seconds > 0.06)


if __name__ == "__main__":
    sys.exit(main())
