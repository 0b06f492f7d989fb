"""The cost of sharding on the host: a tiny batch, collectives that do nothing, the bare module in turn."""

from __future__ import annotations

import time

import torch
from torch import nn

from .config import Config
from .model import GPT, loss_of
from .train import Wrapper, shard


class HostCost:
    """A bare and a wrapped model to time in turn. Making one is a collective call; timing is not."""

    def __init__(self, config: Config, wrapper: Wrapper) -> None:
        self._repeats = config.host_repeats
        self._models = (GPT(config), shard(GPT(config), config, wrapper, backend="fake"))
        self._rows = torch.zeros(1, min(8, config.context) + 1, dtype=torch.int64)
        for model in self._models:  # the first pass makes buffers and orders
            self._seconds(model)

    def measure(self) -> list[tuple[float, float]]:
        """Seconds of forward and backward, (bare, wrapped), taken in turn."""
        return [(self._seconds(self._models[0]), self._seconds(self._models[1])) for _ in range(self._repeats)]

    def _seconds(self, model: nn.Module) -> float:
        start = time.perf_counter()
        torch.autograd.backward(loss_of(model, self._rows))
        elapsed = time.perf_counter() - start
        model.zero_grad()
        return elapsed
