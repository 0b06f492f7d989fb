"""A training process of ``make demo ARGS=--kill``: ``torchrun ... -m flatparam.elastic killed_worker.py CONFIG``.

It prints events, a JSON object a line: its process; each step that rank 0 begins; at the end the losses of all steps.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.demo.config import Config
from examples.demo.data import Corpus, load_text
from examples.demo.messages import FLATPARAM
from examples.demo.train import Sharded, Unsharded, wrapper_of
from flatparam import elastic

PAUSE = 0.25  # seconds in each step while a rank is missing, so that a new process joins before the end


class Record:
    """The losses of each step's shares, one from each rank. It goes back with the model, and to a new process."""

    def __init__(self) -> None:
        self.losses: list[list[float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def tell(**event: object) -> None:
    """Print an event."""
    print(json.dumps(event) + "\n", end="", flush=True)  # one write: other ranks print, too


def train(config: Config, corpus: Corpus) -> list[list[float]]:
    """Train to the end, with the ranks that are there. Returns: the losses of each step."""
    trainers = []

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        trainers.append(Sharded(config, corpus, 0, wrapper_of(FLATPARAM, config)))
        return trainers[-1].model, trainers[-1].optimizer

    model, optimizer = elastic.start(build)
    trainer, record, is_told = trainers[-1], Record(), False
    for step in elastic.steps(model, optimizer, config.steps, record):
        with elastic.survive():
            rank, size = elastic.rank(), elastic.size()
            if not is_told:
                tell(slot=int(os.environ["RANK"]), process=os.getpid())
                is_told = True
            if rank == 0:
                tell(step=step, ranks=size, begin=time.monotonic(), last=record.losses[-1:])
            time.sleep(PAUSE if size < config.ranks else 0)
            trainer.shares = range(rank, rank + 1)
            losses = [torch.empty(1, dtype=torch.float64) for _ in range(size)]
            dist.all_gather(losses, torch.tensor(trainer.step(step), dtype=torch.float64))
            record.losses.append([loss.item() for loss in losses])
    return record.losses


def uninterrupted(config: Config, corpus: Corpus, sizes: list[int]) -> list[list[float]]:
    """The losses of one unsharded process that takes, in each step, the shares of so many ranks."""
    first = Unsharded(dataclasses.replace(config, ranks=1, kill=False), corpus)
    of_size = {1: first}
    for size in {*sizes} - {1}:
        of_size[size] = Unsharded(dataclasses.replace(config, ranks=size, kill=False), corpus)
        of_size[size].model, of_size[size].optimizer = first.model, first.optimizer
    return [of_size[size].step(step) for step, size in enumerate(sizes)]


def main(path: Path) -> None:
    config: Config = pickle.loads(path.read_bytes())
    torch.set_num_threads(config.threads)
    corpus = Corpus(config, load_text())
    losses = train(config, corpus)
    if elastic.rank() == 0:
        tell(losses=losses, uninterrupted=uninterrupted(config, corpus, [len(row) for row in losses]))
    os._exit(0)  # the world ends with the process


if __name__ == "__main__":
    main(Path(sys.argv[1]))
