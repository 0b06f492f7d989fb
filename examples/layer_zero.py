"""LayerZero beside FULL_SHARD and HYBRID_SHARD: the same training, other memory and traffic between machines.

    torchrun --nproc-per-node 4 examples/layer_zero.py

Ranks 0 and 1 stand for one machine, ranks 2 and 3 for another. FULL_SHARD gathers every block from all machines, twice
a micro-batch. HYBRID_SHARD gathers within a machine, and in return each machine holds the whole optimizer state.
LayerZero gathers within a machine too, and shards the optimizer state over all ranks. It uses the network between
machines twice a step, however many micro-batches there are. The last lines:

    FULL_SHARD          last loss 0.06, bytes of a rank: 409,440 between steps, at most 1,402,016
    HYBRID_SHARD        last loss 0.06, bytes of a rank: 818,880 between steps, at most 1,844,544
    LAYER_ZERO_NESTED   last loss 0.06, bytes of a rank: 409,440 between steps, at most 1,600,544
"""

import argparse
import contextlib
import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flatparam import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD, ShardingStrategy.LAYER_ZERO_NESTED)
TOKENS, WIDTH, BLOCKS = 32, 64, 4


class Block(nn.Module):
    """A feed-forward layer. FSDP gathers one block at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(F.gelu(self.first(F.layer_norm(x, (WIDTH,)))))
        return out


def train(strategy: ShardingStrategy, options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    # A row of the mesh is a machine. FULL_SHARD shards over the whole world.
    mesh = init_device_mesh(device.type, (dist.get_world_size() // options.inner, options.inner))
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Embedding(TOKENS, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, TOKENS)),
        sharding_strategy=strategy,
        device_mesh=None if strategy is ShardingStrategy.FULL_SHARD else mesh,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=device,
    )
    plan = model.memory_plan()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(options.steps):
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for i in range(options.micro_batches):
            tokens = torch.randint(TOKENS, (64,), generator=generator).to(device)
            # Without no_sync() in the last micro-batch: its backward reduces the sum of all of them.
            with model.no_sync() if i < options.micro_batches - 1 else contextlib.nullcontext():
                loss = F.cross_entropy(model(tokens), (tokens + 3) % TOKENS) / options.micro_batches
                loss.backward()
            total += loss.detach()
        optimizer.step()
    if dist.get_rank() == 0:
        print(
            f"{strategy.name:<18}  last loss {total.item():.2f}, bytes of a rank:",
            f"{plan.between_steps:,} between steps, at most {plan.peak_no_sync:,}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with three strategies, and compare memory.")
    parser.add_argument("--steps", type=int, default=20, help="steps to train")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches in a step")
    parser.add_argument("--inner", type=int, default=2, help="ranks of a machine; it divides the number of ranks")
    options = parser.parse_args()
    dist.init_process_group()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    for strategy in STRATEGIES:
        train(strategy, options, device)
    gc.collect()  # deletes the model, which holds the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
