"""A rank of ``benchmarks.elastic``, under torchrun: ``elastic_worker.py WAY FOLDER``. It prints events as JSON lines.

A step waits in the place of a device that computes, so that ranks do not compete for the processors.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from examples.demo.config import Config
from examples.demo.data import Corpus, load_text
from examples.demo.model import GPT, Block, loss_of
from flatparam import FullyShardedDataParallel, ModuleWrapPolicy, checkpoint, elastic

CONFIG = Config(width=64, depth=2)
STEPS, ROWS, PAUSE = 160, 24, 0.4  # PAUSE: seconds, shared by the ranks
SAVED_EVERY = 25  # steps
ELASTIC, RESTARTS = "flatparam.elastic", "restarts from checkpoints"


class Rank:
    """The model, its optimizer, and a step that tells what rank 0 has done."""

    def __init__(self) -> None:
        self._rows = Corpus(CONFIG, load_text()).training

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        self.model = FullyShardedDataParallel(GPT(CONFIG), auto_wrap_policy=ModuleWrapPolicy({Block}))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        return self.model, self.optimizer

    def train(self, step: int) -> None:
        begin = time.monotonic()
        rows = self._rows[elastic.samples(step, ROWS, len(self._rows))]
        time.sleep(PAUSE * len(rows) / ROWS)
        loss_of(self.model, rows).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if dist.get_rank() == 0:
            tell(step=step, ranks=dist.get_world_size(), begin=begin, end=time.monotonic())


def tell(**event: object) -> None:
    print(json.dumps(event) + "\n", end="", flush=True)  # one write: other ranks print, too


def train_on(rank: Rank) -> None:
    """With ``elastic``."""
    for step in elastic.steps(*elastic.start(rank.build), until=STEPS):
        with elastic.survive():
            rank.train(step)


def restarted(rank: Rank, path: Path) -> None:
    """From the last checkpoint."""
    dist.init_process_group("gloo")
    rank.build()
    first = checkpoint.load(path, rank.model, rank.optimizer).extra["step"] if path.exists() else 0
    for step in range(first, STEPS):
        rank.train(step)
        if (step + 1) % SAVED_EVERY == 0:
            checkpoint.save(path, rank.model, rank.optimizer, {"step": step + 1}, overwrite=True)
    dist.barrier()


def main(way: str, folder: Path) -> None:
    torch.set_num_threads(1)
    tell(slot=int(os.environ["RANK"]), process=os.getpid())
    rank = Rank()
    if way == ELASTIC:
        train_on(rank)
    else:
        restarted(rank, folder / "checkpoint")
    os._exit(0)  # the world ends with the process


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
