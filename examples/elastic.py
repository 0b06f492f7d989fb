"""Train on when a rank is killed: the others go on at once, and a new process takes its place.

    torchrun --max-restarts 0 --nproc-per-node 3 -m flatparam.elastic examples/elastic.py --kill-at 5
    torchrun --max-restarts 0 --nproc-per-node 3 -m flatparam.elastic examples/elastic.py --pause 1    # kill one

All ranks compute on the CPU. In step 5 of the first command the last rank kills its own process. The last lines:

    step 40: loss 2.86, ... ranks
    40 steps: ... on 2 ranks, ... on 3 ranks
"""

import argparse
import os
import signal
import time
from pydoc_data import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel, ModuleWrapPolicy, elastic

WIDTH, HEADS, BLOCKS, CONTEXT = 64, 2, 2, 32
BATCH = 24  # rows of a step, on all ranks together


class Net(nn.Module):
    """Bytes ``[batch, time]`` in, the loss of each next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        seen, next_bytes = text[:, :-1], text[:, 1:]
        x = self.bytes(seen) + self.places.weight
        for block in self.blocks:
            x = block(x, src_mask=nn.Transformer.generate_square_subsequent_mask(CONTEXT), is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), next_bytes.flatten())


class Sizes:
    """The number of ranks of each step. It goes back with the model, and to a process that joins."""

    def __init__(self) -> None:
        self.of_step: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"of_step": list(self.of_step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.of_step = list(state["of_step"])


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same model in each process, also in one that joins later."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Net(), auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def train(options: argparse.Namespace) -> None:
    data = torch.frombuffer(bytearray("\n\n".join(topics.topics.values()).encode()), dtype=torch.uint8)
    rows = data.unfold(0, CONTEXT + 1, CONTEXT)
    model, optimizer = elastic.start(build)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.steps)
    sizes, first = Sizes(), None
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    for step in elastic.steps(model, optimizer, options.steps, {"schedule": schedule, "sizes": sizes}):
        first = step if first is None else first  # above 0 in a process that has joined
        with elastic.survive():
            time.sleep(options.pause)
            text = rows[elastic.samples(step, BATCH, len(rows))].long()
            loss = model(text)
            if is_last and (step, first) == (options.kill_at, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            mean = loss.detach() * len(text) / BATCH
            dist.all_reduce(mean)
            sizes.of_step.append(elastic.size())
            if step % 10 == 9 or sizes.of_step[-2:-1] != [elastic.size()]:
                say(f"step {step + 1}: loss {mean:.2f}, {elastic.size()} ranks")
    counted = ", ".join(f"{sizes.of_step.count(size)} on {size} ranks" for size in sorted(set(sizes.of_step)))
    say(f"{len(sizes.of_step)} steps: {counted}")


def say(text: str) -> None:
    if elastic.rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on when a rank is killed, and let a new process join.")
    parser.add_argument("--steps", type=int, default=40, help="steps to train")
    parser.add_argument("--kill-at", type=int, help="the step, above 0, in which the last rank kills itself")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds in a step, as if the model were larger")
    train(parser.parse_args())
    os._exit(0)  # the world ends with the process


if __name__ == "__main__":
    main()
