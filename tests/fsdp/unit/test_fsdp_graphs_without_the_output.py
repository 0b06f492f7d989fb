"""Graphs that reach a unit by another way than its returned tensor. The oracle: the unsharded model, on all data."""

import pytest
import torch
import torch.distributed as dist
from fsdp_models import every_setting
from gloo import fake_world
from simulated_ranks import simulate_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy

pytestmark = pytest.mark.multiprocess
WIDTH = 512  # a gather takes its time
STEPS = 3


class InPlace(nn.Module):
    """A linear layer of a 3-D input gives a view: a change in place of that has a graph of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        y = self.second(x)
        y += x
        return torch.relu_(self.last(y.tanh())).square().mean()


class Head(nn.Module):
    """Keeps a loss of its own, as experts do."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.loss = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), None

    def forward(self, x):
        x = torch.tanh(self.inner(x))
        self.loss = self.outer(x).square().mean()
        return x


class Aside(InPlace):
    def __init__(self):
        super().__init__()
        self.second = Head()

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x)))
        return self.last(x).square().mean() + self.second.loss


class Ahead(InPlace):
    """Looks at a unit before its forward."""

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x)))
        return self.last.weight.norm() * self.last(x).square().mean()


def made(cls, strategy, use_orig_params, **settings):
    torch.manual_seed(0)
    model = cls()
    settings |= {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": use_orig_params}
    for name in ("second", "last"):
        setattr(model, name, FSDP(getattr(model, name), **settings))
    return FSDP(model, **settings)


def data(rank, step):
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def trains_as_unsharded(cls, strategy, use_orig_params):
    model = made(cls, strategy, use_orig_params, backward_prefetch=None)
    torch.manual_seed(0)
    whole = cls()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, whole)]
    for step in range(STEPS):
        model(data(dist.get_rank(), step)).backward()
        for rank in range(2):
            (whole(data(rank, step)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with FSDP.summon_full_params(model):
        values = {name.replace("_fsdp_wrapped_module.", ""): param for name, param in model.named_parameters()}
        for name, param in whole.named_parameters():
            torch.testing.assert_close(values[name], param, msg=name)


@every_setting
def test_an_output_that_is_a_view_is_changed_in_place(strategy, uo):
    simulate_ranks(trains_as_unsharded, 2, InPlace, strategy, uo)


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "ZERO_1"])
def test_a_loss_that_a_unit_keeps_where_it_is_not_freed(strategy):
    simulate_ranks(trains_as_unsharded, 2, Aside, strategy, True)


def is_refused(cls, prefetch):
    """On every rank, whether its gather has been begun by then or not."""
    model = made(
        cls, "FULL_SHARD", False, forward_prefetch=prefetch, **({} if prefetch else {"backward_prefetch": None})
    )
    for _ in range(STEPS):
        with pytest.raises(RuntimeError, match="was used while it is sharded"):
            model(data(dist.get_rank(), 0)).backward()


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("cls", [Aside, Ahead])
def test_what_is_not_there_yet_is_refused_and_not_computed_with(cls, prefetch):
    simulate_ranks(is_refused, 2, cls, prefetch)


class Returned(nn.Module):
    """A unit that gives its parameter away."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        return x @ self.weight, self.weight


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_a_unit_that_returns_its_parameter_is_called_once_in_each_backward(strategy):
    with fake_world(2 if strategy == "SHARD_GRAD_OP" else 1):
        model = FSDP(Returned(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True)
        calls = []
        for _ in range(4):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                product, weight = model(torch.ones(2, 3))
                (product.sum() + weight.sum()).backward()
            calls.append(sum("pre_backward" in event.name for event in profile.events()))
    assert calls[0] > 0
    assert calls == calls[:1] * len(calls)
