"""Ranks that are threads of one process, in virtual time: they train as real ones, and a seed gives the same run again.

Promises:
- a simulated run can be had again from its seed, in another process too: `test_the_same_seed_gives_the_same_run`
"""

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from tests.simulation.process import simulated

STEPS = 4


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))


def batch(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def train(rank):
    net = model()
    for i in range(len(net)):
        net[i] = FSDP(net[i])
    net = FSDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        net(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with FSDP.summon_full_params(net):
        return [param.detach().clone() for param in net.parameters()]


def unsharded(size):
    """The same training in one process: gradients are summed in the order of ranks."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        grads = []
        for rank in range(size):
            grads.append(torch.autograd.grad(net(batch(step, rank)).square().mean(), list(net.parameters())))
        for param, *of_ranks in zip(net.parameters(), *grads, strict=True):
            total = of_ranks[0] / size
            for grad in of_ranks[1:]:
                total = total + grad / size
            param.grad = total
        optimizer.step()
    return [param.detach() for param in net.parameters()]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_train_as_the_unsharded_module(size):
    run = simulated(train, size, seed=size)
    assert run.reason == 0, run.stacks
    assert not run.errors, run.errors
    for rank in range(size):
        assert all(map(torch.equal, run.results[rank], unsharded(size)))


def test_the_same_seed_gives_the_same_run():
    digests = {simulated(train, 4, seed=3).digest for _ in range(5)}
    assert len(digests) == 1
    assert simulated(train, 4, seed=4).digest not in digests
