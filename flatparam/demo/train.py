"""One training step, unsharded and sharded. Both see the same batches and, with two ranks, compute the same bits."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import flatparam
from flatparam.demo.config import Config
from flatparam.demo.data import Corpus
from flatparam.demo.messages import FLATPARAM
from flatparam.demo.model import GPT, Block, loss_of

Wrapper = type[FullyShardedDataParallel] | type[flatparam.FullyShardedDataParallel]


class Trainer:
    """What the two ways have in common: a model, AdamW, and the shares of each batch that this process computes."""

    def __init__(self, config: Config, corpus: Corpus, model: nn.Module, shares: range) -> None:
        self.config = config
        self.corpus = corpus
        self.model = model
        self.shares = shares
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )

    def computing(self) -> nn.Module:
        """The module that runs forward and backward."""
        return self.model

    def take_gradients(self, share: int) -> None:
        """Called after the backward pass of one share."""

    def clip(self, norm: float) -> None:
        """Scale the gradients so that their norm over all ranks is at most ``norm``."""
        raise NotImplementedError

    def step(self, step: int) -> list[float]:
        """Train on one step's batches; returns the loss of each share."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(step)
        self.optimizer.zero_grad()
        module = self.computing()
        losses = []
        for share in self.shares:
            loss = loss_of(module, self.corpus.training_batch(step, share))
            torch.autograd.backward(loss)
            self.take_gradients(share)
            losses.append(loss.item())
        if self.config.clip is not None:
            self.clip(self.config.clip)
        self.optimizer.step()
        return losses

    @torch.no_grad()
    def validate(self) -> list[float]:
        """The validation loss of each share."""
        module = self.computing()
        module.eval()
        losses = []
        for share in self.shares:
            batches = self.corpus.validation_batches(share)
            losses.append(sum(loss_of(module, rows).item() for rows in batches) / len(batches))
        module.train()
        return losses


class Unsharded(Trainer):
    """The oracle: a plain module that averages the shares' gradients in rank order, as the collectives do.

    FSDP divides before and after its sum; so does this. In bf16 it computes with a cast copy of the fp32 weights.
    """

    def __init__(self, config: Config, corpus: Corpus) -> None:
        super().__init__(config, corpus, GPT(config), range(config.ranks))
        self._low = copy.deepcopy(self.model).bfloat16() if config.precision == "bf16" else None
        self._sums: list[Tensor] = []
        self._divide_first = DefaultState._get_gradient_predivide_factor(config.ranks)

    def computing(self) -> nn.Module:
        if self._low is None:
            return self.model
        with torch.no_grad():
            for low, parameter in zip(self._low.parameters(), self.model.parameters(), strict=True):
                low.copy_(parameter)
        return self._low

    def take_gradients(self, share: int) -> None:
        gradients = []
        for parameter in (self._low or self.model).parameters():
            assert parameter.grad is not None  # every weight takes part in every batch
            gradients.append(parameter.grad.div_(self._divide_first))
            parameter.grad = None
        self._sums = gradients if share == 0 else [a.add_(b) for a, b in zip(self._sums, gradients, strict=True)]
        if share == self.shares[-1]:
            for parameter, total in zip(self.model.parameters(), self._sums, strict=True):
                parameter.grad = total.div_(self.config.ranks / self._divide_first).to(parameter.dtype)
            self._sums = []

    def clip(self, norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), norm)


class Sharded(Trainer):
    """A wrapper's units: one a block, and the root."""

    def __init__(self, config: Config, corpus: Corpus, rank: int, wrapper: Wrapper) -> None:
        self._sharded = shard(GPT(config), config, wrapper)
        super().__init__(config, corpus, self._sharded, range(rank, rank + 1))

    def clip(self, norm: float) -> None:
        self._sharded.clip_grad_norm_(norm)


def wrapper_of(run: str, config: Config) -> Wrapper:
    """Whose wrapper a sharded run uses; with the drop-in it is torch's, on whichever handle is installed."""
    own = run == FLATPARAM and config.runtime == "flatparam"
    return flatparam.FullyShardedDataParallel if own else FullyShardedDataParallel


def engine_of(model: nn.Module) -> str:
    """Whose code shards ``model``: found on the model, not in the settings."""
    if isinstance(model, flatparam.FullyShardedDataParallel):
        return "flatparam's FullyShardedDataParallel"
    if isinstance(model, FullyShardedDataParallel):
        owner = "flatparam" if isinstance(model._handle, flatparam.FlatParamHandle) else "torch"
        return f"torch's FullyShardedDataParallel on {owner}'s FlatParamHandle"
    return "nothing"


def shard(model: nn.Module, config: Config, wrapper: Wrapper, backend: str = "gloo") -> Any:
    """``model`` wrapped as ``config`` says, over new process groups of ``backend``. A collective call."""
    strategies = {
        "full-shard": ShardingStrategy.FULL_SHARD,
        "shard-grad-op": ShardingStrategy.SHARD_GRAD_OP,
        "no-shard": ShardingStrategy.NO_SHARD,
        "hybrid-shard": ShardingStrategy.HYBRID_SHARD,
        "hybrid-shard-zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,
    }
    low = torch.bfloat16 if config.precision == "bf16" else None
    return wrapper(
        model,
        process_group=process_groups(config, backend),
        sharding_strategy=strategies[config.strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low) if low else None,
        device_id=torch.device("cpu"),
        use_orig_params=config.orig_params,
    )


def process_groups(config: Config, backend: str) -> Any:
    """The group to shard over; for the hybrid strategies, pairs to shard over and the group that replicates them."""
    world = range(config.ranks)
    if not config.strategy.startswith("hybrid"):
        return dist.new_group(list(world), backend=backend)
    me = dist.get_rank()
    pairs = [dist.new_group([i, i + 1], backend=backend) for i in world[::2]]
    replicas = [dist.new_group(list(world[i::2]), backend=backend) for i in (0, 1)]
    return pairs[me // 2], replicas[me % 2]
