"""Train LoRA adapters on a frozen, sharded base, and save the adapters without the base.

    torchrun --nproc-per-node 2 examples/lora.py

`segments=True` puts frozen parameters into flat parameters of their own: they are sharded, and take no memory for
gradients or optimizer state. The adapters are 15 lines here; examples/qlora.py takes PEFT's. The last lines:

    step 40: loss 0.01
    each rank holds 35,216 frozen and 3,072 trained elements, 3,072 elements of gradients
    adapters.safetensors: 24,576 bytes, without the base's 281,728
"""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel, ModuleWrapPolicy, checkpoint

TOKENS, WIDTH, BLOCKS = 32, 64, 4


class Block(nn.Module):
    """A feed-forward layer. FSDP gathers one block at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(F.gelu(self.first(F.layer_norm(x, (WIDTH,)))))
        return out


class Base(nn.Module):
    """Stands for a pretrained model: tokens ``[batch]`` to logits ``[batch, TOKENS]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return logits


class LoRA(nn.Module):
    """A frozen linear layer, and a trained product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # the adapted model begins as the base

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def train(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    module = Base().requires_grad_(False)  # yours: from_pretrained()
    base_bytes = sum(parameter.nbytes for parameter in module.parameters())
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.Linear) and name.startswith("blocks"):
            module.set_submodule(name, LoRA(layer, options.rank))
    model = FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        segments=True,
        use_orig_params=True,  # the optimizer gets the adapters' own parameters
        device_id=device,
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    for step in range(1, options.steps + 1):
        tokens = torch.randint(TOKENS, (64,), device=device)
        loss = F.cross_entropy(model(tokens), (tokens + 3) % TOKENS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            say(f"step {step}: loss {loss.item():.2f}")
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    gradients = sum(parameter.grad.numel() for parameter in model.parameters() if parameter.grad is not None)
    elements = sum(parameter.numel() for parameter in trained)
    say(f"each rank holds {frozen:,} frozen and {elements:,} trained elements, {gradients:,} elements of gradients")
    optimizer.zero_grad()  # a checkpoint would have the gradients, too
    checkpoint.save(options.out, model, optimizer, trainable_only=True, overwrite=True)
    if dist.get_rank() == 0:
        file = options.out / "adapters.safetensors"
        written = checkpoint.export(options.out, file)
        say(f"{file.name}: {written.bytes:,} bytes, without the base's {base_bytes:,}")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train LoRA adapters on a frozen, sharded base.")
    parser.add_argument("--steps", type=int, default=40, help="steps to train")
    parser.add_argument("--rank", type=int, default=4, help="width of the thin matrices")
    parser.add_argument("--out", type=Path, default=Path("run/lora"), help="folder of the adapters' checkpoint")
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
