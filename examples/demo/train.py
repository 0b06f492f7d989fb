"""One training step, unsharded and sharded. Both see the same batches and, with two ranks, compute the same bits."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import flatparam

from .config import STRATEGIES, Config
from .data import Corpus
from .messages import FLATPARAM
from .model import GPT, Block, loss_of

MEMBERS = {name: name.upper().replace("-", "_") for name in STRATEGIES} | {"hybrid-shard-zero2": "_HYBRID_SHARD_ZERO2"}
Wrapper = type[FullyShardedDataParallel] | type[flatparam.FullyShardedDataParallel]


class Trainer:
    """The common part of both ways: a model, AdamW, and the shares of each batch that this process computes."""

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

    def no_sync(self) -> AbstractContextManager[None]:
        """The context of the forward and backward of each micro-batch but the last."""
        return nullcontext()

    def take_micro_batch(self) -> None:
        """Called after each backward pass."""

    def take_gradients(self, share: int) -> None:
        """Called after the backward passes of one share."""

    def clip(self, norm: float) -> None:
        """Scale the gradients so that their norm over all ranks is at most ``norm``."""
        raise NotImplementedError

    def step(self, step: int) -> list[float]:
        """Train on one step's batches; returns the loss of each share."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(step)
        self.optimizer.zero_grad()
        module = self.computing()
        count = self.config.micro_batches
        losses = []
        for share in self.shares:
            total = 0.0
            for micro_batch in range(count):
                with self.no_sync() if micro_batch < count - 1 else nullcontext():
                    loss = loss_of(module, self.corpus.training_batch(step, share, micro_batch)) / count
                    torch.autograd.backward(loss)
                self.take_micro_batch()
                total += loss.item()
            self.take_gradients(share)
            losses.append(total)
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
        super().__init__(config, corpus, GPT(config).to(config.device), range(config.ranks))
        self._low = copy.deepcopy(self.model).bfloat16() if config.precision == "bf16" else None
        self._added: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._divide_first = DefaultState._get_gradient_predivide_factor(config.ranks)

    def computing(self) -> nn.Module:
        if self._low is None:
            return self.model
        with torch.no_grad():
            for low, parameter in zip(self._low.parameters(), self.model.parameters(), strict=True):
                low.copy_(parameter)
        return self._low

    def take_micro_batch(self) -> None:
        if self._low is None or not self.config.adds_in_fp32:
            return  # autograd adds, in the precision it computes in
        for i, parameter in enumerate(self._low.parameters()):
            assert parameter.grad is not None
            if i == len(self._added):
                self._added.append(parameter.grad.float())
            else:
                self._added[i].add_(parameter.grad)
            parameter.grad = None

    def take_gradients(self, share: int) -> None:
        for parameter, added in zip((self._low or self.model).parameters(), self._added, strict=False):
            parameter.grad = added.to(parameter.dtype)
        self._added = []
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
        self._sharded = shard(GPT(config), config, wrapper, config.backend)
        super().__init__(config, corpus, self._sharded, range(rank, rank + 1))

    def no_sync(self) -> AbstractContextManager[None]:
        held: AbstractContextManager[None] = self._sharded.no_sync()
        return held

    def clip(self, norm: float) -> None:
        self._sharded.clip_grad_norm_(norm)


def wrapper_of(run: str, config: Config) -> Wrapper:
    """Return the wrapper of a sharded run. With the drop-in it is torch's, on the installed handle."""
    own = run == FLATPARAM and config.runtime == "flatparam"
    return flatparam.FullyShardedDataParallel if own else FullyShardedDataParallel


def engine_of(model: nn.Module) -> str:
    """Return the name of the code that shards ``model``. It is found on the model, not in the settings."""
    if isinstance(model, flatparam.FullyShardedDataParallel):
        return "flatparam's FullyShardedDataParallel"
    if isinstance(model, FullyShardedDataParallel):
        owner = "flatparam" if isinstance(model._handle, flatparam.FlatParamHandle) else "torch"
        return f"torch's FullyShardedDataParallel on {owner}'s FlatParamHandle"
    return "nothing"


def shard(model: nn.Module, config: Config, wrapper: Wrapper, backend: str = "gloo") -> Any:
    """``model`` wrapped as ``config`` says, over new process groups of ``backend``. A collective call."""
    if wrapper is FullyShardedDataParallel:
        config = dataclasses.replace(config, strategy=config.torch_strategy)
        strategy: Any = ShardingStrategy[MEMBERS[config.strategy]]
    else:
        strategy = flatparam.ShardingStrategy[MEMBERS[config.strategy]]
    low = torch.bfloat16 if config.precision == "bf16" else None
    return wrapper(
        model,
        process_group=process_groups(config, backend),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low) if low else None,
        device_id=torch.cuda.current_device() if config.device == "cuda" else torch.device("cpu"),
        use_orig_params=config.orig_params,
    )


def process_groups(config: Config, backend: str) -> Any:
    """The group to shard over, or those of a grid of ranks.

    For the hybrid strategies, pairs to shard over and the group that replicates them; for layer-zero, a half of the
    ranks and all of them, nested also the ranks that have this one's place in the halves.
    """
    if config.kill:
        return None  # all ranks that there are
    world = list(range(config.ranks))
    hybrid = config.strategy.startswith("hybrid")
    if not hybrid and not config.is_layer_zero:
        return dist.new_group(world, backend=backend)
    me, row = dist.get_rank(), 2 if hybrid else config.ranks // 2
    rows = [dist.new_group(world[i : i + row], backend=backend) for i in world[::row]]
    columns = [dist.new_group(world[i::row], backend=backend) for i in range(row)]
    inner, outer = rows[me // row], columns[me % row]
    if hybrid:
        return inner, outer
    wide = dist.new_group(world, backend=backend)
    return (inner, wide, outer) if config.strategy == "layer-zero-nested" else (inner, wide)
