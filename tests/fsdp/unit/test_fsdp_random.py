"""Random trees of modules and random programs over them: as the unsharded module; more with FLATPARAM_RANDOM_RUNS.

Promises:
- trees of any shape, with sharing, frozen parts, several dtypes, unused branches: `test_random_trees_and_programs`
"""

import os
import random

import pytest
import torch
from fsdp_models import data, full_grads, full_params
from gloo import note, run_ranks
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.utils.checkpoint import checkpoint

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy

pytestmark = pytest.mark.multiprocess

RUNS = int(os.environ.get("FLATPARAM_RANDOM_RUNS", "25"))
PARTS = 3
FIRST = int(os.environ.get("FLATPARAM_RANDOM_FIRST", "0"))
WIDTH = 3


class Node(nn.Module):
    """Some parameters of its own, some children, and a recipe of what forward does with them."""

    def __init__(self, source, depth, shared):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        for i in range(source.randrange(3)):
            shape = source.choice([(WIDTH,), (1,), (2, WIDTH), (WIDTH, 1)])
            setattr(self, f"extra{i}", nn.Parameter(torch.randn(shape)))
        self.dtype = torch.float64 if source.random() < 0.2 else torch.float32
        self.children_of = nn.ModuleList()
        if depth > 0:
            for _ in range(source.randint(1, 3)):
                self.children_of.append(Node(source, depth - 1, shared))
        if self.dtype == torch.float64:
            for param in self._parameters.values():
                param.data = param.data.double()
        if source.random() < 0.2:
            shared.append(self)
        self.twin = source.choice(shared) if shared and source.random() < 0.2 else None
        if self.twin is self or (self.twin is not None and any(m is self for m in self.twin.modules())):
            self.twin = None
        if source.random() < 0.2:
            for param in self._parameters.values():
                param.requires_grad_(False)
        elif source.random() < 0.15:
            self.weight.requires_grad_(False)
        self.calls = [
            (i, source.choice(("call", "call", "call", "call", "twice", "skip", "unused", "checkpoint", "reentrant")))
            for i in range(len(self.children_of))
        ]
        self.uses = [source.random() < 0.8 for _ in range(3)]

    def forward(self, x):
        y = torch.tanh(x.to(self.weight.dtype) @ self.weight)
        for i, used in enumerate(self.uses):
            extra = getattr(self, f"extra{i}", None)
            if extra is not None and used:
                y = y + extra.sum() * 0.1
        y = y.to(x.dtype)
        if self.twin is not None:
            y = y + self.twin(x)
        for i, how in self.calls:
            child = self.children_of[i]
            if how == "twice":
                y = child(child(y))
            elif how == "unused":
                child(y)
            elif how in ("checkpoint", "reentrant") and self.training:
                y = checkpoint(child, y, use_reentrant=how == "reentrant")
            elif how != "skip":
                y = y + child(y)
        return y


class Root(Node):
    def forward(self, x):
        return super().forward(x.requires_grad_())


def build(seed):
    source = random.Random(seed)
    torch.manual_seed(seed)
    root = Root(source, source.randint(1, 3), [])
    root.weight.requires_grad_(True)
    return root


def wrap(model, seed, arguments):
    """Random modules become units, children first; wherever a module stands, its unit does."""
    source = random.Random(seed + 1)
    places = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if isinstance(child, Node):
                places.setdefault(child, []).append((parent, name))
    for child in reversed(list(places)):
        if source.random() < 0.6:
            unit = FSDP(child, **arguments)
            for parent, name in places[child]:
                setattr(parent, name, unit)
    return FSDP(model, **arguments)


def expected_grads(module, batches):
    """Add to ``.grad`` the mean over ranks of the summed gradients; None where no rank has any."""
    before = [param.grad for param in module.parameters()]
    module.zero_grad()
    for rank in range(2):
        for batch in batches:
            (module(data(batch, rank)).square().mean() / 2).backward()
    for param, old in zip(module.parameters(), before, strict=True):
        if old is not None:
            param.grad = old if param.grad is None else old + param.grad


def shared_between_units(seed, arguments):
    """Whether a module below one unit is reached without it: such trees are refused."""
    try:
        wrap(build(seed), seed, arguments)
    except ValueError as error:
        if "shared" in str(error):
            return True
        raise
    return False


def layout_of(source):
    """What may not be cut between ranks, and to how many bytes shards are aligned."""
    atomic = source.choice([None, None, "row", torch.Tensor.numel, lambda param: 2])
    return {"atomic": atomic, "shard_alignment": source.choice([None, None, 16, 64])}


def programs(seeds):
    tried = 0
    for seed in seeds:
        source = random.Random(seed + 2)
        strategy = source.choice(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1"])
        arguments = {
            "sharding_strategy": ShardingStrategy[strategy],
            "use_orig_params": source.random() < 0.5,
            "backward_prefetch": source.choice([None, *BackwardPrefetch]),
            "forward_prefetch": source.random() < 0.5,
            "segments": True,
            **layout_of(random.Random(seed + 3)),
        }
        note(f"seed {seed}: {arguments}")
        if shared_between_units(seed, arguments):
            continue
        tried += 1
        module, model = build(seed), wrap(build(seed), seed, arguments)
        optims = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05) for m in (module, model)]
        for step in range(3):
            pending = []
            for batch in range(source.randint(1, 3)):
                pending.append(10 * step + batch)
                if source.random() < 0.4:
                    with model.no_sync():
                        model(data(pending[-1])).square().mean().backward()
                else:
                    model(data(pending[-1])).square().mean().backward()
                    expected_grads(module, pending)
                    pending = []
                if source.random() < 0.3:
                    with torch.no_grad():
                        model(data(99))
            if pending:
                model(data(50)).square().mean().backward()
                expected_grads(module, [*pending, 50])
            grads = full_grads(model)
            for name, param in module.named_parameters():
                if param.grad is None:
                    assert grads[name] is None or not grads[name].any(), (seed, name)
                else:
                    torch.testing.assert_close(grads[name], param.grad, rtol=1e-4, atol=1e-6, msg=f"{seed} {name}")
            for optim in optims:
                optim.step()
                optim.zero_grad()
        for name, param in full_params(model).items():
            wanted = dict(module.named_parameters())[name]
            torch.testing.assert_close(param, wanted, rtol=1e-4, atol=1e-6, msg=f"{seed} {name}")
    return tried


@pytest.mark.sweep(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_random_trees_and_programs(part):
    seeds = range(FIRST + part, FIRST + RUNS, PARTS)
    tried = run_ranks(programs, 2, seeds)
    assert min(tried) > len(seeds) // 2
