"""Pickles and averaged copies of wrapped models train on as the model that was not copied, and as unsharded.

Promises:
- pickles and averaged copies train on as the model that was copied
"""

import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    SETTINGS,
    STRATEGIES,
    Averaged,
    Model,
    assert_same,
    data,
    first_rank_warns,
    loss_of,
    make,
    wrap_blocks,
)
from gloo import note
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, Placement, ShardingStrategy, defer_init

pytestmark = pytest.mark.multiprocess


def by_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


def by_torch(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def adam(module):
    return torch.optim.Adam(module.parameters(), lr=0.01)


def train(model, ours, module, plain, steps):
    oracle = Averaged(module, 2)
    for step in steps:
        loss_of(model, data(step)).backward()
        oracle.backward(lambda rank, step=step: [data(step, rank)])
        for optimizer in (ours, plain):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, module)


def pickles(strategy, uo, way):
    note(f"{strategy} uo={uo} {way.__name__}")
    atomic = (lambda param: param.numel()) if way is by_torch else None
    module = make()
    model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo, atomic=atomic)
    fresh = way(model)
    assert_same(fresh, module)
    train(fresh, adam(fresh), again := copy.deepcopy(module), adam(again), [9])
    ours, plain = adam(model), adam(module)
    train(model, ours, module, plain, [0, 1])
    with torch.no_grad():
        loss_of(model, data(0))
    kept, kept_ours = way((model, ours))
    other, other_plain = copy.deepcopy((module, plain))
    assert kept.check_is_root()
    assert not kept.blocks[0].check_is_root()
    train(model, ours, module, plain, [2, 3])
    train(kept, kept_ours, other, other_plain, [4, 5])
    assert [p.shape for p in kept.parameters()] == [p.shape for p in model.parameters()]
    assert list(kept.state_dict()) == list(module.state_dict())
    late_ours, late_plain = way((ours, model)), copy.deepcopy((plain, module))  # the optimizer first
    train(*reversed(late_ours), *reversed(late_plain), [6])
    kept.load_state_dict(make(seed=3).state_dict())
    assert_same(kept, make(seed=3))
    assert_same(model, module)
    shallow = copy.copy(model)
    assert shallow._unit is model._unit


def refused_pickles():
    """Between forward and backward, in a summon, on another rank; and the groups of a pickle."""
    model = wrap_blocks(make(), use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    loss = loss_of(model, data(0))
    assert_same(by_pickle(model), make())  # between forward and backward: as before the step
    loss.backward()
    with FSDP.summon_full_params(model), pytest.raises(RuntimeError, match="IDLE"):
        pickle.dumps(model)
    rank = dist.get_rank()
    everyone = [None, None]
    dist.all_gather_object(everyone, pickle.dumps(model))
    with pytest.raises(RuntimeError, match=rf"pickled on rank {1 - rank} of 2 .* this is rank {rank} of 2"):
        pickle.loads(everyone[1 - rank])
    alone = dist.new_group([0, 1])
    model = FSDP(make(), placement=Placement(alone, alone, alone))
    text = pickle.dumps(model)
    assert pickle.loads(text).process_group is alone
    return everyone[rank]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("strategy", "uo", "way"), list(itertools.product(STRATEGIES, (False, True), (by_pickle, by_torch)))
)
def test_a_pickled_model_trains_on(strategy, uo, way):
    simulate_ranks(pickles, 2, strategy, uo, way)


def test_where_and_when_a_model_is_pickled():
    pickled = simulate_ranks(refused_pickles, 2)
    with pytest.raises(RuntimeError, match="no process group here"):
        pickle.loads(pickled[0])


class Odd(Model):
    """Frozen and low-precision parts, a batch norm, a tied weight, a buffer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.blocks[1].inner.weight.requires_grad_(False)
        self.blocks[2].twin = self.blocks[2].inner
        self.register_buffer("seen", torch.ones(2))

    def forward(self, x):
        return self.norm(super().forward(x))


def settings():
    """What the pickle keeps of settings: precision, buffers, segments, ties, values that were never loaded."""
    low = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for uo in (False, True):
        torch.manual_seed(0)
        with first_rank_warns("BatchNorm"):
            model = FSDP(
                Odd(), auto_wrap_policy=ModuleWrapPolicy({type(make().blocks[0])}), mixed_precision=low, segments=True
            )
        x = data(0)
        model(x).sum().backward()
        model.zero_grad()
        kept = by_pickle(model)
        assert kept.blocks[2].twin is kept.blocks[2].inner
        for one in (model, kept):
            one(x).sum().backward()
        for ours, theirs in zip(model.parameters(), kept.parameters(), strict=True):
            assert ours.requires_grad == theirs.requires_grad
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
        assert kept.seen.dtype == torch.bfloat16
        assert kept.state_dict()["seen"].dtype == torch.float32
        with torch.device("meta"):
            never = Model()
        never = by_pickle(wrap_blocks(never, param_init_fn=defer_init, use_orig_params=uo))
        never.load_state_dict(make().state_dict())
        assert_same(never, make())


def test_a_pickle_keeps_the_settings():
    simulate_ranks(settings, 2)


def averages():
    for strategy, uo in SETTINGS:
        note(f"{strategy} uo={uo}")
        module = make()
        model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        ours, plain = adam(model), adam(module)
        train(model, ours, module, plain, [0])
        for arguments in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}, {"avg_fn": lambda a, b, n: (a + b) / 2}):
            mean, wanted = AveragedModel(model, **arguments), AveragedModel(module, **arguments)
            for step in range(1, 4):
                train(model, ours, module, plain, [step])
                mean.update_parameters(model)
                wanted.update_parameters(module)
                with torch.no_grad():
                    assert torch.equal(loss_of(mean, data(step)), loss_of(wanted, data(step)))
            assert_same(mean.module, wanted.module)
            assert_same(model, module)
            got = mean.state_dict()
            assert list(got) == list(wanted.state_dict())
            assert all(torch.equal(got[name], value) for name, value in wanted.state_dict().items())
            mean.load_state_dict(wanted.state_dict())
            kept = by_pickle(mean.module)
            assert_same(kept, wanted.module)
        update_bn([data(step) for step in range(2)], mean)


@pytest.mark.thorough
def test_averaged_models():
    simulate_ranks(averages, 2)
