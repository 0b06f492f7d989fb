"""A forward in ``no_grad`` beside the bare module: equal bits, and requires_grad, by which torch picks kernels."""

import copy
import itertools

import pytest
import torch
from gloo import note
from simulated_ranks import simulate_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatparam import FullyShardedDataParallel, ShardingStrategy

pytestmark = pytest.mark.multiprocess

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1"]


class Noting(nn.Linear):
    """Notes what requires grad of its weight, and of views of it."""

    def forward(self, x):
        weight = self.weight
        self.noted = [weight.requires_grad, weight.t().requires_grad, weight[1:].t().requires_grad]
        return super().forward(x)


class Block(nn.Module):
    """Its layers ask whether their transposed weights require grad: inputs with three dimensions are not contiguous."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Noting(8, 16), Noting(16, 8)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x.transpose(0, 1)))).transpose(0, 1)

    def noted(self):
        return self.first.noted + self.second.noted


def pair(strategy, orig):
    bare = Block()
    kept = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": orig}
    return bare, FullyShardedDataParallel(copy.deepcopy(bare), device_id=torch.device("cpu"), **kept)


def like_the_bare_module():
    torch.manual_seed(0)
    for strategy, orig in itertools.product(STRATEGIES, (True, False)):
        bare, wrapped = pair(strategy, orig)
        x = torch.randn(3, 5, 8)
        for trains, is_recorded in (
            (True, False),
            (True, True),
            (True, False),
            (False, False),
            (False, True),
            (True, False),
        ):
            note(f"{strategy} {orig} {trains} {is_recorded}")
            for model in (bare, wrapped):
                model.requires_grad_(trains)
            with torch.set_grad_enabled(is_recorded):
                assert torch.equal(wrapped(x), bare(x))
            assert wrapped.module.noted() == bare.noted() == [trains] * 6


def reentrant_checkpoints():
    for strategy, orig in itertools.product(STRATEGIES, (True, False)):
        note(f"{strategy} {orig}")
        torch.manual_seed(0)
        losses = []
        for model in pair(strategy, orig):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(step), requires_grad=True)
                loss = checkpoint(model, x, use_reentrant=True).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert losses[:3] == losses[3:]


@pytest.mark.parametrize("body", [like_the_bare_module, reentrant_checkpoints])
def test_on_two_ranks(body):
    simulate_ranks(body, 2)
