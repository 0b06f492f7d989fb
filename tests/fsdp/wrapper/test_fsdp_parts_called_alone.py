"""A part of a unit that is called while the unit is sharded gets an error that names it; shards can still be used.

With ``use_orig_params=True``, where modules have this rank's pieces of parameters; else they have freed tensors, which
``test_fsdp_storages.py`` is about. No processes: a fake group of two, as either rank.

Promises:
- parts of a sharded unit that are called alone, and layers' functions that get a shard, raise an error that names it;
  optimizers and loops over shards work as on any tensor
"""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from gloo import fake_world
from torch import nn
from torch.nn.utils import parameters_to_vector

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy


class Parts(nn.Module):
    """One part of each kind. Both ranks have a piece of the linear, the longest, and one of them of each other part."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(40, 40)
        self.norm = nn.LayerNorm(4)
        self.batch = nn.BatchNorm1d(4)
        self.table = nn.Embedding(5, 4)
        self.conv = nn.Conv1d(2, 2, 3)
        self.turned = nn.ConvTranspose2d(2, 2, 3)
        self.lstm = nn.LSTM(4, 4)
        self.cell = nn.GRUCell(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.scale = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return self.linear(x)


ONES = torch.ones
CALLS = {
    "linear.weight": lambda m: m.linear(ONES(2, 40)),
    "norm.weight": lambda m: m.norm(ONES(2, 4)),
    "batch.weight": lambda m: m.batch(ONES(2, 4)),
    "table.weight": lambda m: m.table(torch.tensor([1])),
    "conv.weight": lambda m: m.conv(ONES(1, 2, 5)),
    "turned.weight": lambda m: m.turned(ONES(1, 2, 5, 5)),
    "lstm.weight_ih_l0": lambda m: m.lstm(ONES(1, 1, 4)),
    "cell.weight_ih": lambda m: m.cell(ONES(1, 4)),
    "attention.in_proj_weight": lambda m: m.attention(*[ONES(2, 1, 4)] * 3, need_weights=False),
}
FORMULAS = (
    lambda w: F.linear(ONES(2, 40), w.detach()),
    lambda w: ONES(2, 40) @ w,
    lambda w: torch.addmm(ONES(2, 40), ONES(2, 40), w),
    lambda w: w.reshape(40, 40),
    lambda w: w.view(40, 40),
    lambda w: w * ONES(3, 40, 40),
)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "ZERO_1")


def wrapped(strategy="FULL_SHARD"):
    torch.manual_seed(0)
    return FSDP(Parts(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True)


def refused(name):
    what = f" was used while it is sharded: `{name}`."
    return pytest.raises(
        RuntimeError, match="the unit of Parts.*" + re.escape(what) + ".*summon_full_params.*call the wrapped module"
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_part_of_a_sharded_unit_that_is_called_is_named(strategy, rank):
    with fake_world(2, rank):
        model = wrapped(strategy)
        for name, call in CALLS.items():
            with refused(name):
                call(model.module)
        for formula in FORMULAS:
            with refused("linear.weight"):
                formula(model.linear.weight)
        with FSDP.summon_full_params(model):
            wanted = model.linear(ONES(2, 40))
        for _ in range(2):
            assert torch.equal(model(ONES(2, 40)), wanted)
        model(ONES(2, 40)).sum().backward()
        with refused("linear.weight"):
            model.linear(ONES(2, 40))
        copied = copy.deepcopy(model)
        with refused("norm.weight"):
            copied.module.norm(ONES(2, 4))


def test_without_shards_parts_can_be_called():
    with fake_world(2):
        model = wrapped("NO_SHARD")
        for call in CALLS.values():
            call(model.module)


class Outer(nn.Module):
    """Uses the weight of another unit in its own forward."""

    def __init__(self):
        super().__init__()
        self.inner = FSDP(nn.Linear(4, 4), use_orig_params=True)
        self.own = nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(self.own(x), self.inner.weight)


def test_the_weight_of_another_unit_is_named():
    with fake_world(2), pytest.raises(RuntimeError, match=r"unit of Linear at `inner` .* sharded: `weight`"):
        FSDP(Outer(), use_orig_params=True)(ONES(2, 4))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_fits_shards_is_as_of_any_tensor(rank):
    """Optimizers of every kind, averages, vectors, loops over parameters: equal to those over plain copies."""
    with fake_world(2, rank):
        model = wrapped()
        mine = list(model.parameters())
        plain = [nn.Parameter(param.detach().clone()) for param in mine]
        assert all(type(param) is nn.Parameter for param in mine)
        kinds = (
            lambda params: torch.optim.SGD(params, 0.1, weight_decay=0.1, momentum=0.9),
            lambda params: torch.optim.SGD(params, 0.1, weight_decay=0.1, foreach=True),
            lambda params: torch.optim.AdamW(params, 0.1, foreach=True),
            lambda params: torch.optim.Adam(params, 0.1, fused=True),
            lambda params: torch.optim.Adagrad(params, 0.1),
        )
        for make in kinds:
            optimizers = [make(params) for params in (mine, plain)]
            for params, optimizer in zip((mine, plain), optimizers, strict=True):
                for param in params:
                    param.grad = torch.ones_like(param)
                nn.utils.clip_grad_value_(params, 0.5)
                optimizer.step()
        for params in (mine, plain):
            with torch.no_grad():
                for param in params:
                    param.mul_(0.5).add_(param * 0.1 + param.square().mean())
                    param.data.copy_(param.detach().clone().view(-1).view_as(param))
        assert torch.equal(parameters_to_vector(mine), parameters_to_vector(plain))
        loss = sum((param * param).sum() for param in mine)
        grads = torch.autograd.grad(loss, mine)
        assert all(torch.equal(grad, 2 * param) for grad, param in zip(grads, plain, strict=True))
