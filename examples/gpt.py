"""Train a small GPT on two ranks, in fp32 or bf16, and save and resume it.

    torchrun --nproc-per-node 2 examples/gpt.py
    torchrun --nproc-per-node 2 examples/gpt.py --bf16 --checkpoint run/gpt    # once more: it goes on from there

The text is Python's own help pages, as bytes, so nothing is downloaded. The last lines on a CPU, of Python 3.11:

    step 40: loss 2.86
    2 ranks, FULL_SHARD, fp32: each holds 67,456 of 134,912 parameters
"""

import argparse
import gc
import os
from pathlib import Path
from pydoc_data import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel, MixedPrecision, ModuleWrapPolicy, checkpoint

WIDTH, HEADS, BLOCKS, CONTEXT = 64, 2, 2, 32


class Block(nn.Module):
    """Attention and a feed-forward layer. FSDP gathers one block at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, time, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, WIDTH))
        out: Tensor = x + self.feed(self.norms[1](x))
        return out


class GPT(nn.Module):
    """Bytes ``[batch, time]`` in, the loss of each next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        seen, next_bytes = text[:, :-1], text[:, 1:]
        x = self.bytes(seen) + self.places.weight[: seen.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.float().flatten(0, 1), next_bytes.flatten())


def batch_of(step: int, rows: int, device: torch.device) -> Tensor:
    """Another piece of the text for each step and rank: ``[rows, CONTEXT + 1]``."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    starts = torch.randint(len(TEXT) - CONTEXT, (rows, 1), generator=generator)
    return TEXT[starts + torch.arange(CONTEXT + 1)].long().to(device)


def train(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    low = torch.bfloat16 if options.bf16 else None
    model = FullyShardedDataParallel(
        GPT(),
        sharding_strategy=options.strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=torch.float32),
        device_id=device,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    first = 0
    if options.checkpoint and options.checkpoint.exists():
        first = checkpoint.load(options.checkpoint, model, optimizer).extra["step"]  # at any number of ranks
    for step in range(first + 1, first + options.steps + 1):
        loss = model(batch_of(step, options.batch, device))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            mean = loss.detach() / dist.get_world_size()  # each rank has the loss of its own rows
            dist.all_reduce(mean)
            say(f"step {step}: loss {mean:.2f}")
    if options.checkpoint:
        checkpoint.save(options.checkpoint, model, optimizer, {"step": step}, overwrite=True)
    here = sum(parameter.numel() for parameter in model.parameters())
    total = sum(parameter.numel() for parameter in GPT().parameters())
    say(
        f"{dist.get_world_size()} ranks, {options.strategy}, {'bf16' if low else 'fp32'}: "
        f"each holds {here:,} of {total:,} parameters"
    )


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT, in fp32 or bf16, and save and resume it.")
    parser.add_argument("--steps", type=int, default=40, help="steps to train")
    parser.add_argument("--batch", type=int, default=8, help="rows for each rank and step")
    parser.add_argument("--strategy", default="FULL_SHARD", help="a name from flatparam.ShardingStrategy")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16; weights and gradients stay in fp32")
    parser.add_argument("--checkpoint", type=Path, help="the folder to resume from if it exists, and to save to")
    options = parser.parse_args()
    if "RANK" not in os.environ:  # started without torchrun: this process is the only rank
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    train(options, device)
    gc.collect()  # deletes the model, which holds the process group
    dist.destroy_process_group()


TEXT = torch.frombuffer(bytearray("\n\n".join(topics.topics.values()).encode()), dtype=torch.uint8)

if __name__ == "__main__":
    main()
