"""Save on two ranks and resume on four or one, in another strategy, with the same weights and states bit for bit.

    torchrun --nproc-per-node 2 examples/resume_elsewhere.py run/elsewhere
    torchrun --nproc-per-node 4 examples/resume_elsewhere.py run/elsewhere --strategy HYBRID_SHARD
    python examples/resume_elsewhere.py run/elsewhere

The first command trains and saves. Each other one resumes, trains and saves. All print a checksum of weights and
optimizer state. The last lines of the first two:

    saved at step 10: sha256 ...
    loaded at step 10 by 4 ranks, HYBRID_SHARD: sha256 ...
    saved at step 20: sha256 ...
"""

import argparse
import gc
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh

from flatparam import FullyShardedDataParallel, ModuleWrapPolicy, checkpoint


def sum_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the start of the SHA-256 of the full weights and optimizer state. A collective call."""
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    tensors: dict[str, Any] = {f"weight {name}": value for name, value in weights.items()}
    states: Any = state["state"]
    for name, values in states.items():
        tensors |= {f"{key} of {name}": value for key, value in values.items()}
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + bytes(tensors[name].cpu().flatten().view(torch.uint8).tolist()))
    return found.hexdigest()[:16]


def train(options: argparse.Namespace, device: torch.device) -> None:
    world = dist.get_world_size()
    on_mesh = options.strategy.endswith(("HYBRID_SHARD", "LAYER_ZERO", "LAYER_ZERO_NESTED"))
    inner = min(world, 2)  # ranks of a machine
    module = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 32))
    model = FullyShardedDataParallel(
        module,
        sharding_strategy=options.strategy,
        device_mesh=init_device_mesh(device.type, (world // inner, inner)) if on_mesh else None,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sync_module_states=True,
        device_id=device,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    first = 0
    if options.folder.exists():
        first = checkpoint.load(options.folder, model, optimizer).extra["step"]
        say(f"loaded at step {first} by {world} ranks, {options.strategy}: sha256 {sum_of(model, optimizer)}")
    for step in range(first, first + options.steps):
        generator = torch.Generator().manual_seed(world * step + dist.get_rank())
        x = torch.randn(16, 32, generator=generator).to(device)
        loss = F.mse_loss(model(x), x.sort().values)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    done = first + options.steps
    checkpoint.save(options.folder, model, optimizer, {"step": done}, overwrite=True)
    say(f"saved at step {done}: sha256 {sum_of(model, optimizer)}")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Resume from a checkpoint at another number of ranks.")
    parser.add_argument("folder", type=Path, help="the checkpoint, to resume from if it exists and to save to")
    parser.add_argument("--strategy", default="FULL_SHARD", help="a name from flatparam.ShardingStrategy")
    parser.add_argument("--steps", type=int, default=10, help="steps to train")
    options = parser.parse_args()
    if "RANK" not in os.environ:  # started without torchrun: this process is the only rank
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    train(options, device)
    gc.collect()  # deletes the model, which holds the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
