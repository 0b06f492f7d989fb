"""Padding is zero in shards and gradients, so readers of flat parameters see the parameters' values alone.

The oracle is the unsharded module: its elements, none of which is 0, and its norms.

Promises:
- padding and its gradient are zero, also after loading: readers of flat parameters see the elements and norms of the
  unsharded module
"""

import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Averaged, data, loss_of, make, wrap_blocks
from gloo import fake_world, note
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision, StateDictType

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, checkpoint

LAYOUTS = {
    "torch's": {},
    "aligned": {"shard_alignment": 64},
    "rows": {"atomic": "row"},
    "whole": {"atomic": torch.Tensor.numel, "shard_alignment": 16},
}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1", "LAYER_ZERO")


def of_strategy(strategy):
    pair = {"process_group": (dist.group.WORLD, dist.group.WORLD)} if strategy == "LAYER_ZERO" else {}
    return {"sharding_strategy": ShardingStrategy[strategy], **pair}


def elements(model, value=torch.Tensor.detach):
    """All of the model's elements over all ranks, sorted, without zeros; and how many zeros there are."""
    values = map(value, model.parameters())
    mine = [one.reshape(-1) for one in values if one is not None]  # there is no gradient of what lies elsewhere
    if isinstance(model, FSDP) and model.sharding_strategy.name != "NO_SHARD":
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        mine = list(itertools.chain.from_iterable(gathered))
    found = torch.cat(mine)
    return found[found != 0].sort().values, int((found == 0).sum())


def full(model):
    """``make()`` has biases and no zeros."""
    for param in model.parameters():
        assert param.all()
    return model


def assert_no_padding_is_seen(model, module, what):
    assert torch.equal(elements(model)[0], elements(module)[0]), what


def trained(model, module, step):
    oracle = Averaged(module, 2)
    loss_of(model, data(step)).backward()
    oracle.backward(lambda rank: [data(step, rank)])
    found, wanted = (elements(m, lambda param: param.grad)[0] for m in (model, module))
    assert torch.equal(found, wanted), f"gradients of step {step}"


def reads(strategy, uo):
    paddings = 0
    for layout, settings in LAYOUTS.items():
        note(f"{strategy} uo={uo} {layout}")
        module = full(make())
        model = wrap_blocks(make(), use_orig_params=uo, **settings, **of_strategy(strategy))
        assert_no_padding_is_seen(model, module, layout)
        paddings += elements(model)[1]
        trained(model, module, 0)
        for m in (model, module):  # an L2 penalty by hand, then the norm of all gradients
            for param in (param for param in m.parameters() if param.grad is not None):
                param.grad.add_(param.detach(), alpha=0.01)
        norms = model.clip_grad_norm_(1e9), nn.utils.clip_grad_norm_(module.parameters(), 1e9)
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
        optimizers = [torch.optim.AdamW(m.parameters(), 0.1, weight_decay=0.5) for m in (model, module)]
        for step in range(1, 4):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with model.no_sync():
                loss_of(model, data(step) * 0).backward()
            assert_no_padding_is_seen(model, module, layout)
            model.zero_grad()
            trained(model, module, step)
        assert_no_padding_is_seen(copy.deepcopy(model), module, f"a copy, {layout}")
    return paddings


@pytest.mark.multiprocess
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("uo", [False, True])
def test_padding_is_not_seen_in_norms_penalties_and_steps(strategy, uo):
    shown = simulate_ranks(reads, 2, strategy, uo)
    assert min(shown) > 0 or uo  # there was padding to see


def spoilt(model, value):
    """Write ``value`` to all padding: torch's handle keeps 42 there, a step that was not finite leaves NaN."""
    for unit in FSDP.fsdp_modules(model):
        for flat_param in unit._unit.flat_params:
            mask = torch.ones(flat_param.layout.shard_numel, dtype=torch.bool)
            for start, numel in flat_param.piece_ranges():
                mask[start : start + max(numel, 0)] = False
            flat_param.flat.detach()[mask] = value


def by_state_dict(source, model, module, path):
    model.load_state_dict(module.state_dict())
    return model


def by_local_state_dict(source, model, module, path):
    with FSDP.state_dict_type(source, StateDictType.LOCAL_STATE_DICT):
        state = source.state_dict()
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.load_state_dict(state)
    return model


def by_pickle(source, model, module, path):
    file = io.BytesIO()
    torch.save(source, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_summoning(source, model, module, path):
    with FSDP.summon_full_params(model):
        for param, value in zip(model.parameters(), module.parameters(), strict=True):
            param.detach().copy_(value)
    return model


def by_checkpoint(source, model, module, path):
    checkpoint.save(path, source)
    checkpoint.load(path, model)
    return model


WAYS = (by_state_dict, by_local_state_dict, by_pickle, by_summoning, by_checkpoint)


def loads(folder):
    for (layout, settings), value, way in itertools.product(LAYOUTS.items(), (42.0, torch.nan), WAYS):
        note(f"{layout} {value} {way.__name__}")
        module = full(make(seed=3))
        source, model = (wrap_blocks(make(seed=seed), **settings) for seed in (3, 0))
        for m in (source, model):
            spoilt(m, value)
        loaded = way(source, model, module, f"{folder}/{layout}-{value}")
        assert_no_padding_is_seen(loaded, module, f"{way.__name__}, {layout}, {value}")


@pytest.mark.multiprocess
def test_what_is_loaded_brings_no_padding(tmp_path):
    simulate_ranks(loads, 2, str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_no_backward_writes_to_the_gradient_of_padding(dtype, low):
    """On a fake group, whose collectives leave what they were given: the gradient that this rank has packed."""
    with fake_world(2):
        module = nn.Linear(3, 5, dtype=dtype)
        precision = MixedPrecision(param_dtype=low, reduce_dtype=low)
        model = FSDP(module, shard_alignment=64, mixed_precision=precision)
        [flat_param] = model._unit.flat_params
        assert flat_param.gaps
        for _ in range(2):
            model(torch.ones(2, 3, dtype=dtype)).abs().sum().backward()
            for start, numel in flat_param.gaps:
                assert not flat_param.flat.grad[start : start + numel].any()
