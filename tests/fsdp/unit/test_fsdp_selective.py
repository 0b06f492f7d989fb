"""Selective activation checkpoints around units save results of the user's module, and no operation of flatparam."""

from collections import Counter

import pytest
import torch
from fsdp_models import SETTINGS, Averaged, Model, assert_same, data, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from layer_zero_ranks import pair
from selective import KEPT, kept
from torch.distributed.fsdp import MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode

from flatparam import ShardingStrategy

pytestmark = pytest.mark.multiprocess


class Selective(Model):
    """The blocks are in one checkpoint."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def middle(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.last(kept(self.middle, self.first(x), self.part))


class Seeing(TorchDispatchMode):
    """Counts operations."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


def trained(part):
    settings = [*((strategy, uo, {}) for strategy, uo in SETTINGS), ("LAYER_ZERO", True, {"process_group": pair(1)})]
    for strategy, uo, more in settings:
        note(f"{strategy} {uo}")
        module = make(cls=Selective, part=part)
        model = wrap_blocks(
            make(cls=Selective, part=part), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo, **more
        )
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, model)]
        oracle = Averaged(module, 2)
        for step in range(3):
            loss_of(model, data(step)).backward()
            oracle.backward(lambda rank, step=step: [data(step, rank)])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same(model, module, f"{strategy} {uo} {step}")


@pytest.mark.parametrize("part", KEPT.values(), ids=KEPT)
def test_what_is_kept_trains_as_without_units(part):
    run_ranks(trained, 2, part)


def around_the_root(part):
    """The first forward of all is in the checkpoint, and what is cast on the way."""
    low = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    losses = []
    for around in (False, True):
        model = wrap_blocks(make(), mixed_precision=low, use_orig_params=True)
        model.register_buffer("extra", torch.ones(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            output = kept(model, data(step), part) if around else model(data(step))
            loss = output.float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


@pytest.mark.parametrize("part", KEPT.values(), ids=KEPT)
def test_the_root_may_be_in_one(part):
    run_ranks(around_the_root, 2, part)


def seen():
    """The user's operations are kept as without units, and other modes see all that there is."""
    counts = []
    for model in (make(cls=Selective, part="mm"), wrap_blocks(make(cls=Selective, part="mm"), use_orig_params=True)):
        with Seeing() as forward:
            loss = loss_of(model, data(0))
        with Seeing() as backward:
            loss.backward()
        counts.append([sum(n for name, n in mode.seen.items() if "mm" in name) for mode in (forward, backward)])
    assert counts[0] == counts[1]
    assert any(name.startswith("c10d.") for name in forward.seen)
    assert any(name.startswith("c10d.") for name in backward.seen)


def test_what_is_kept_is_not_computed_again():
    run_ranks(seen, 2)
