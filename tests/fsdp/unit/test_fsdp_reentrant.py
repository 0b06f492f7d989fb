"""Reentrant checkpoints inside of units, whose other parameters come before, after or in them too; and around units.

Promises:
- parameters that a reentrant checkpoint inside of a unit uses are trained, wherever else in the unit they are used:
  `test_what_is_recomputed_inside_of_a_unit_is_trained`
- a reentrant checkpoint around a unit that it would not train, as no input requires grad, is refused:
  `test_what_would_not_be_recomputed_is_refused`
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import data, full_grads, loss_of, make, wrap_blocks
from gloo import fake_world, note, run_ranks
from layer_zero_ranks import pair
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.utils.checkpoint import checkpoint

from flatparam import BackwardPrefetch, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp.unit.summon import StateError

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1", "LAYER_ZERO", "LAYER_ZERO_NESTED")


def recomputed(function, x):
    return checkpoint(function, x, use_reentrant=True)


class Before(nn.Module):
    """All else of it is used after what is recomputed."""

    def __init__(self, width=5):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 1.5))

    def forward(self, x):
        return self.b(recomputed(lambda y: torch.tanh(self.a(y)) * self.scale, x))


class OneDimensional(Before):
    """What is recomputed is a vector, whose piece on a rank may look like the whole."""

    def forward(self, x):
        return self.b(self.a(recomputed(lambda y: torch.tanh(y * self.scale), x)))


class Both(Before):
    """A parameter is used in what is recomputed and after it; there are two of them, one in the other."""

    def forward(self, x):
        return self.b(recomputed(lambda y: recomputed(self.b, torch.tanh(self.a(y))) * self.scale, x))


class Several(Before):
    def forward(self, x):
        return self.b(recomputed(self.a, torch.tanh(self.b(recomputed(self.a, x))))) * self.scale


class Net(nn.Module):
    """Blocks, each a unit, in a root."""

    def __init__(self, block):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Around(Net):
    """What is recomputed is of the root, and units."""

    def forward(self, x):
        x = recomputed(lambda y: torch.tanh(self.first(y)), x.requires_grad_())
        for block in self.blocks:
            x = recomputed(block, x)
        return self.last(x)


class Twice(Net):
    """Units that are used twice, once in what is recomputed: gradients come in two graph tasks, in either order."""

    def forward(self, x):
        x = self.blocks[0](self.first(x))
        x = recomputed(self.blocks[1], recomputed(self.blocks[0], x))
        return self.last(self.blocks[2](self.blocks[1](x)))


def averaged(module, steps):
    """What the ranks' gradients of ``steps`` average to, each rank's added up before."""
    of_ranks = []
    for rank in range(dist.get_world_size()):
        module.zero_grad()
        for step in steps:
            loss_of(module, data(step, rank)).backward()
        of_ranks.append([param.grad for param in module.parameters()])
    return [sum(grads) / len(of_ranks) for grads in zip(*of_ranks, strict=True)]


def check(found, module, wanted, what, exact=True):
    for (name, _), grad in zip(module.named_parameters(), wanted, strict=True):
        same = torch.equal(found[name], grad) if exact else torch.allclose(found[name], grad, rtol=1e-5, atol=1e-7)
        assert same, (what, name, found[name] - grad)


def torchs_grads(model):
    with TorchFSDP.summon_full_params(model, writeback=False, with_grads=True):
        return {name: param.grad.clone() for name, param in model.named_parameters()}


def recomputation_in_units(strategy, uo):
    for block, root in (*((block, Net) for block in (Before, OneDimensional, Both, Several)), (Several, Around)):
        module = make(cls=root, block=block)
        once, twice = averaged(module, (0,)), averaged(module, (1, 0))
        what = f"{block.__name__} {root.__name__} {strategy} uo={uo}"
        note(what)
        model = wrap_blocks(
            make(cls=root, block=block),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=uo,
            process_group=pair(1) if strategy.startswith("LAYER") else None,
            backward_prefetch=list(BackwardPrefetch)[uo],
        )
        loss_of(model, data(0)).backward()
        check(full_grads(model), module, once, what)
        model.zero_grad()
        with model.no_sync():
            loss_of(model, data(1)).backward()
        loss_of(model, data(0)).backward()
        # in the same order of additions
        alike = block is not Both and (root is Net or strategy in TorchStrategy.__members__)
        check(full_grads(model), module, twice, f"{what} after no_sync", alike)
        # of two torch frees the unit after the first
        if block in (Before, OneDimensional) and uo and strategy in TorchStrategy.__members__:
            arguments = {"sharding_strategy": TorchStrategy[strategy], "device_id": torch.device("cpu")}
            model = wrap_blocks(make(cls=root, block=block), TorchFSDP, use_orig_params=uo, **arguments)
            loss_of(model, data(0)).backward()
            check(torchs_grads(model), module, once, f"torch's {what}")


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("uo", "strategy"), list(itertools.product((True, False), STRATEGIES)))
@pytest.mark.multiprocess
def test_what_is_recomputed_inside_of_a_unit_is_trained(strategy, uo):
    run_ranks(recomputation_in_units, 2, strategy, uo)


def units_used_twice():
    for strategy, uo in zip(STRATEGIES, itertools.cycle((True, False))):
        note(what := f"{strategy} uo={uo}")
        module = make(cls=Twice, block=Before)
        once, twice = averaged(module, (0,)), averaged(module, (1, 0))
        model = wrap_blocks(
            make(cls=Twice, block=Before),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=uo,
            process_group=pair(1) if strategy.startswith("LAYER") else None,
        )
        for _ in range(2):
            loss_of(model, data(0)).backward()
            check(full_grads(model), module, once, what, exact=False)
            model.zero_grad()
        with model.no_sync():
            loss_of(model, data(1)).backward()
        loss_of(model, data(0)).backward()
        check(full_grads(model), module, twice, f"{what} after no_sync", exact=False)


@pytest.mark.multiprocess
def test_units_that_are_used_beside_a_checkpoint_and_in_it():
    run_ranks(units_used_twice, 2)


class Stages(nn.Module):
    """A block that is recomputed, in a unit or not, with gradients or without, and a layer after it."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 3))
        self.last = nn.Linear(3, 1)
        self.run = recomputed

    def forward(self, x):
        return self.last(self.run(self.encoder, x))


class Inside(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return recomputed(self.block, x)


def in_two(function, x):
    return recomputed(lambda y: recomputed(function, 2 * y), x)


def without_gradients(function, x):
    with torch.no_grad():
        return function(x)


@pytest.mark.parametrize("uo", [False, True])
def test_what_would_not_be_recomputed_is_refused(uo):
    x, needs_grad = torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)
    with fake_world(2):
        model = Stages()
        model.encoder = FSDP(model.encoder, use_orig_params=uo)
        model = FSDP(model, use_orig_params=uo)
        for run in (recomputed, in_two):
            model.module.run = run
            for _ in range(2):
                with pytest.raises(StateError, match=r"the unit of Sequential at `encoder` .*use_reentrant=False"):
                    model(x)
            model(needs_grad).sum().backward()
            assert all(param.grad is not None for param in model.parameters() if param.numel())
            model.zero_grad()
            with torch.no_grad():
                model(x)
        model.encoder.requires_grad_(False)
        model(x).sum().backward()
        model.encoder.requires_grad_(True)
        model = Stages()
        inner = FSDP(nn.Linear(3, 3), use_orig_params=uo)
        model.encoder, model.run = FSDP(Inside(inner), use_orig_params=uo), without_gradients
        model = FSDP(model, use_orig_params=uo)
        model(x).sum().backward()  # who computes without gradients wants none
        alone = FSDP(nn.Linear(3, 3), use_orig_params=uo)
        with pytest.raises(StateError, match="runs in a reentrant checkpoint"):
            recomputed(alone, x)
        alone(x).sum().backward()
        recomputed(alone.eval(), x)
        model = Stages()
        model.encoder, model.run = FSDP(model.encoder, use_orig_params=uo), recomputed
        model = FSDP(model, use_orig_params=uo)
        with (
            FSDP.summon_full_params(model, recurse=False),
            pytest.raises(StateError, match="runs in a reentrant checkpoint"),
        ):
            model(x)
