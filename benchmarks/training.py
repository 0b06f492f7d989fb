"""One rank of one contestant's training run: a process that does what it is told, and waits in a read in between."""

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import memory
from benchmarks.contestants import CONTESTANTS, STAGES, Wrapping, with_deepspeed
from examples.demo.config import Config


class Rank:
    """A model and AdamW, wrapped as ``name`` says. ``module`` has a ``build(config, rank)`` that makes the model.

    DeepSpeed's engine is a model and its optimizer in one.
    """

    def __init__(self, module: str, name: str, config: Config) -> None:
        memory.reset_peak()
        self._base = memory.resident()
        model, block, self._loss = importlib.import_module(module).build(config, dist.get_rank())
        self._model: Any = model if name in STAGES else CONTESTANTS[name](model, Wrapping((block,)))
        optimizer: Any = torch.optim.AdamW(self._model.parameters(), lr=config.learning_rate, fused=True)
        self._backward: Any = torch.autograd.backward
        if name in STAGES:
            self._model = optimizer = with_deepspeed(model, optimizer, STAGES[name], config.batch)
            self._backward = self._model.backward
        self._optimizer = optimizer

    def train(self, first: int, count: int) -> tuple[list[float], float, float, float]:
        """The losses of some steps; their seconds in all, and those of this thread and process on processors."""
        start, worked, all_worked = time.perf_counter(), time.thread_time(), time.process_time()
        losses = [self._step(step) for step in range(first, first + count)]
        return losses, time.perf_counter() - start, time.thread_time() - worked, time.process_time() - all_worked

    def peak(self) -> float:
        """MiB of peak resident memory over what was resident before the model was made."""
        return (memory.peak() - self._base) / memory.MIB

    def in_collectives(self, first: int, count: int) -> float:
        """The share of some steps' time in which a collective was under way."""
        with _silent_stderr(), profile(activities=[ProfilerActivity.CPU]) as taken:
            _, seconds, *_ = self.train(first, count)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in taken.events()
            if event.name.startswith("gloo:") and event.device_type == DeviceType.CPU
        )
        covered, reached = 0.0, float("-inf")
        for start, end in spans:
            covered += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return covered / 1e6 / seconds

    def _step(self, step: int) -> float:
        self._optimizer.zero_grad()
        loss = self._loss(self._model, step)
        self._backward(loss)
        self._optimizer.step()
        return float(loss.detach())


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """The profiler tells when it starts and stops."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def serve(connection: Connection, folder: Path, *arguments: Any) -> None:
    """Answer each command, the name of a method of ``Rank`` and its arguments, for ever."""
    rank = Rank(*arguments)
    connection.send(None)
    while True:
        name, *given = connection.recv()
        connection.send(getattr(rank, name)(*given))
