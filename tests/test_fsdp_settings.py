"""Settings and modules that are out of the ordinary: optimizers in backward, modules without a forward."""

import copy

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Averaged, assert_same, data, loss_of, make, wrap_blocks
from gloo import fake_world, note, run_ranks
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy


def optimizers_in_backward():
    """They step each unit when its gradient is reduced, and leave none: training is that of optimizers afterwards."""
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1"):
        note(strategy)
        module = make()
        model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9})
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        oracle = Averaged(module, 2)
        for step in range(3):
            with model.no_sync():
                loss_of(model, data(10 + step)).backward()
            loss_of(model, data(step)).backward()
            oracle.backward(lambda rank, step=step: [data(10 + step, rank), data(step, rank)])
            optimizer.step()
            optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        assert_same(model, module, strategy)
        fresh = copy.deepcopy(model)  # has no optimizers
        loss_of(fresh, data(0)).backward()
        assert_same(fresh, module, strategy)
    model = wrap_blocks(make(), use_orig_params=False)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(RuntimeError, match="optimizer in backward is only supported with use_orig_params=True"):
        model(data(0))
    dist.barrier()


@pytest.mark.multiprocess
def test_optimizers_in_backward():
    run_ranks(optimizers_in_backward, 2)


@pytest.mark.parametrize("module", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})])
def test_modules_without_a_forward_warn(module):
    with fake_world(2), pytest.warns(UserWarning, match=f"a {type(module).__name__} has no forward"):
        FSDP(module)
