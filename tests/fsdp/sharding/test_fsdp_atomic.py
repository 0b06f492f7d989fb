"""Training on shards that cut no row, matrix or block: as unsharded, with optimizers that need them whole."""

import copy
import itertools

import pytest
import torch
from fsdp_models import (
    Averaged,
    Blockwise,
    assert_same,
    assert_same_grads,
    data,
    loss_of,
    make,
    wrap_blocks,
)
from gloo import note
from simulated_ranks import simulate_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardingStrategy

pytestmark = pytest.mark.multiprocess

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "ZERO_1")
WHOLE = torch.Tensor.numel


def blocks_of_7(param):
    return 7


def train(model, module, ours, plain, steps=3, base=0):
    oracle = Averaged(module, 2)
    for step in range(base, base + steps):
        loss_of(model, data(step)).backward()
        oracle.backward(lambda rank, step=step: [data(step, rank)])
        for optimizers in (ours, plain):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same(model, module)


def adam(model):
    return [torch.optim.Adam(model.parameters(), lr=0.01)]


def layouts(strategy, atomic, uo):
    """Each strategy and kind of block: steps, no_sync, clipping, state dicts, summoned gradients, copies."""
    note(f"{strategy} {atomic} uo={uo}")
    arguments = {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": uo,
        "atomic": atomic,
        "shard_alignment": 64 if atomic in (None, "row") else None,
    }
    module, model = make(), wrap_blocks(make(), **arguments)
    assert_same(model, module)
    ours, plain = adam(model), adam(module)
    train(model, module, ours, plain)
    with model.no_sync():
        loss_of(model, data(7)).backward()
    loss_of(model, data(8)).backward()
    oracle = Averaged(module, 2)
    oracle.backward(lambda rank: [data(7, rank), data(8, rank)])
    assert_same_grads(model, module)
    with FSDP.summon_full_params(model, with_grads=True):
        for param in model.parameters():
            param.grad.mul_(2.0)
    for param in module.parameters():
        param.grad.mul_(2.0)
    assert_same_grads(model, module)
    norm, wanted = model.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0)
    for optimizer in (*ours, *plain):
        optimizer.zero_grad()
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in model.state_dict().items())
    copied, again = copy.deepcopy(model), copy.deepcopy(module)
    train(copied, again, adam(copied), adam(again), steps=1)
    model.load_state_dict(make(seed=3).state_dict())
    assert_same(model, make(seed=3))


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("strategy", "atomic", "uo"), list(itertools.product(STRATEGIES, ("row", WHOLE, blocks_of_7, None), (False, True)))
)
def test_training_on_every_layout(strategy, atomic, uo):
    simulate_ranks(layouts, 2, strategy, atomic, uo)


class Rows(torch.optim.Optimizer):
    """Steps by rows of unit length: it needs whole ones."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad = param.grad.view(param.shape[0], -1)
                    param.sub_(0.1 * (grad / grad.norm(dim=1, keepdim=True).clamp(min=1e-6)).view_as(param))


def matrices(model):
    return [param for param in model.parameters() if param.ndim == 2]


def vectors(model):
    return [param for param in model.parameters() if param.ndim < 2]


def muon(model):
    return [
        torch.optim.Muon(matrices(model), lr=0.02, weight_decay=0.1),
        torch.optim.SGD(vectors(model), lr=0.05, momentum=0.9),
    ]


def optimizers(strategy, low):
    """Muon on whole matrices, an optimizer of rows on whole rows, 8-bit state on whole blocks."""
    note(f"{strategy} low={low}")
    precision = MixedPrecision(reduce_dtype=torch.float32) if low else None
    shared = {"sharding_strategy": ShardingStrategy[strategy], "mixed_precision": precision}
    module, model = make(), wrap_blocks(make(), use_orig_params=True, atomic=WHOLE, **shared)
    shapes = {tuple(param.shape) for param in module.parameters()}
    assert all(tuple(p.shape) in shapes or p.shape[0] == 0 for p in model.parameters())
    assert len(matrices(model)) == len(matrices(module))
    train(model, module, muon(model), muon(module), steps=4)

    module, model = make(), wrap_blocks(make(), use_orig_params=True, atomic="row", **shared)
    train(model, module, [Rows(model.parameters())], [Rows(module.parameters())])

    for uo in (False, True):
        module, model = make(), wrap_blocks(make(), use_orig_params=uo, atomic=blocks_of_7, **shared)
        if uo:
            train(model, module, [Blockwise(model.parameters(), 7)], [Blockwise(module.parameters(), 7)])


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("strategy", "low"), list(itertools.product(STRATEGIES, (False, True))))
def test_optimizers_that_need_whole_blocks(strategy, low):
    simulate_ranks(optimizers, 2, strategy, low)


def agreement():
    """Another block on one rank is found at construction."""
    rank = torch.distributed.get_rank()
    with pytest.raises(ValueError, match=r"`weight`.*blocks of 3.*blocks of 4"):
        FSDP(nn.Linear(3, 3), atomic=lambda param: 3 + rank)
    with pytest.raises(ValueError, match=r"shard_alignment=16.*shard_alignment=32"):
        FSDP(nn.Linear(3, 3), shard_alignment=16 << rank)
    with pytest.raises(ValueError, match=r"atomic=False.*atomic=True"):
        FSDP(nn.Linear(3, 3), atomic="row" if rank else None)


def test_ranks_that_ask_for_other_blocks():
    simulate_ranks(agreement, 2)
