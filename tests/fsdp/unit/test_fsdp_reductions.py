"""Collectives of the runtime's reductions on gloo, and their sums beside arithmetic.

Promises:
- two gloo ranks send each other the part of a gradient that the other keeps, half of an all-reduce's bytes, and get the
  bits of the sum: `test_two_ranks_exchange_parts_and_more_reduce_in_place`
- a failed or forgotten exchange leaves nothing to add: `test_gradients_that_are_forgotten_are_not_added_later`
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardingStrategy

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZE = 34  # elements of a unit, which 2, 3 and 4 ranks pad in other ways


class Sent(TorchDispatchMode):
    """Notes the name of each collective, and the number of elements of its tensors."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            tensors = args[1] if isinstance(args[1], torch.Tensor) else args[0][0]
            self.found.append((function.overloadpacket.__name__, tensors.numel()))
        return function(*args, **(kwargs or {}))


def values(rank, dtype):
    """Gradients of a rank: random, with infinities, NaNs, zeros of both signs and denormals."""
    made = torch.randn(SIZE, generator=torch.Generator().manual_seed(rank)).to(dtype)
    tiny = torch.finfo(dtype).smallest_normal / 4
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, tiny, -tiny, torch.finfo(dtype).max])
    made[:7] = special.to(dtype)
    made[7:14] = special.to(dtype).roll(1 + rank)
    return made


class Weighted(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE, dtype=dtype))

    def forward(self, factors):
        return (self.weight * factors).sum()


def reduced(dtype, strategy):
    """The collectives of a backward, and this rank's part of the mean of the gradients."""
    module = Weighted(dtype)
    mixed = MixedPrecision(keep_low_precision_grads=True)
    model = FSDP(module, sharding_strategy=ShardingStrategy[strategy], mixed_precision=mixed)
    with Sent() as sent:
        model(values(dist.get_rank(), dtype)).backward()
    (param,) = model.parameters()
    return sent.found, param.grad.clone()


def in_strategies():
    return {
        (dtype, strategy): reduced(dtype, strategy)
        for dtype, strategy in itertools.product(DTYPES, ("FULL_SHARD", "SHARD_GRAD_OP"))
    }


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", [2, 3])
def test_two_ranks_exchange_parts_and_more_reduce_in_place(world_size):
    results = run_ranks(in_strategies, world_size)
    for (dtype, strategy), (found, _) in results[0].items():
        part = -(-SIZE // world_size)
        expected = ("alltoall_base_", part) if world_size == 2 else ("allreduce_", part * world_size)
        assert [each for each in found if "gather" not in each[0]] == [expected], (dtype, strategy, found)
        if world_size == 2:
            whole = torch.cat([result[dtype, strategy][1] for result in results])
            mean = values(0, dtype) / 2 + values(1, dtype) / 2  # divided before the sum, as in torch
            torch.testing.assert_close(whole, mean, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(whole.signbit() | whole.isnan(), mean.signbit() | mean.isnan())


def forgotten():
    """The gradients of a backward, after one whose last hook has raised while reductions were under way."""
    model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), auto_wrap_policy={nn.Linear}, sync_module_states=True)

    def grads(batch):
        model.zero_grad()
        model(batch).sum().backward()
        return [param.grad.clone() for param in model.parameters()]

    def refuse(gradient):
        raise ValueError("refused")

    first, batch = grads(torch.ones(2, 4)), torch.ones(2, 4, requires_grad=True)
    batch.register_hook(refuse)
    with pytest.raises(ValueError, match="refused"):
        grads(batch)
    return all(map(torch.equal, first, grads(torch.ones(2, 4))))


@pytest.mark.multiprocess
def test_gradients_that_are_forgotten_are_not_added_later():
    assert run_ranks(forgotten, 2) == [True, True]
