"""Train with Lightning's Fabric on flatparam: one line is new.

    torchrun --nproc-per-node 2 examples/lightning_fabric.py

`flatparam.install(runtime=True)` puts flatparam's class in the place of torch's FullyShardedDataParallel. Fabric wraps,
trains, clips and saves as before. Needs lightning. The last lines:

    step 40: loss 0.00
    each of 2 ranks holds 10,512 of 21,024 parameters
    the checkpoint has 21,024 parameters in 15 tensors
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy
from torch import Tensor, nn

import flatparam

TOKENS, WIDTH, BLOCKS = 32, 64, 2


class Block(nn.Module):
    """A feed-forward layer. FSDP gathers one block at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.feed(x)
        return out


class OnAnyDevice(FSDPStrategy):
    """Fabric takes its own class for GPUs alone, and a class derived from it for a CPU too."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with Lightning's Fabric on flatparam.")
    parser.add_argument("--steps", type=int, default=40, help="steps to train")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine, as torchrun has them")
    parser.add_argument("--precision", default="32-true", help="a precision of Fabric's, as bf16-mixed")
    parser.add_argument("--out", type=Path, default=Path("run/fabric.ckpt"), help="file of the checkpoint")
    options = parser.parse_args()
    flatparam.install(runtime=True)  # the new line, before setup()
    strategy = OnAnyDevice(auto_wrap_policy={Block}, state_dict_type="full")
    on_gpu = torch.cuda.is_available()
    fabric = Fabric(
        accelerator="cuda" if on_gpu else "cpu", devices=options.ranks, strategy=strategy, precision=options.precision
    )
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    module = nn.Sequential(nn.Embedding(TOKENS, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, TOKENS))
    total = sum(parameter.numel() for parameter in module.parameters())
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True))
    for step in range(1, options.steps + 1):
        tokens = torch.randint(TOKENS, (32,), device=fabric.device)
        loss = F.cross_entropy(model(tokens), (tokens + 3) % TOKENS)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            fabric.print(f"step {step}: loss {loss.item():.2f}")
    held = sum(parameter.numel() for parameter in model.parameters())
    fabric.print(f"each of {fabric.world_size} ranks holds {held:,} of {total:,} parameters")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    fabric.save(options.out, {"model": model, "optimizer": optimizer, "step": options.steps})
    if fabric.is_global_zero:
        saved = torch.load(options.out, weights_only=True)["model"]
        print(
            f"the checkpoint has {sum(value.numel() for value in saved.values()):,} parameters in {len(saved)} tensors"
        )


if __name__ == "__main__":
    main()
