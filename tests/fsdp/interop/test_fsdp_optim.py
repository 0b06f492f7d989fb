"""flatparam.optim over original parameters of units: a step is one call for each unit, and equals torch's fused step.

All lengths of pieces are multiples of the processor's vectors, so the oracle, torch's optimizer over the same pieces,
rounds alike. Without such lengths `test_optim.py` has the oracle.

Promises:
- strategies, mixed precision, accumulated gradients and clipping, flat parameters: `test_units_step_as_with_torch`
- checkpoints, optimizer state dicts and resizing take the states as they take torch's, and between the two:
  `test_states_move_as_torchs`
- a state that does not fit the pieces is refused by name, as torch's: `test_a_state_that_was_not_converted_is_refused`
"""

import pytest
import torch
import torch.distributed as dist
from fsdp_models import every_setting
from gloo import note
from simulated_ranks import simulate_ranks
from torch import nn

from flatparam import _C, MixedPrecision, ShardingStrategy, StateDictType, checkpoint, elastic, optim
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp.errors import StateError

pytestmark = pytest.mark.multiprocess

PACKAGES = (optim, torch.optim)
KINDS = {
    "AdamW": ("AdamW", {"lr": 0.01, "amsgrad": True}),
    "Adam": ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": ("SGD", {"lr": 0.01, "momentum": 0.9}),
}


def wrapped(strategy="FULL_SHARD", uo=True, seed=0, **arguments):
    """Three units; each rank of two has as many elements of each, and no padding."""
    torch.manual_seed(seed)
    arguments |= {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
    blocks = [FSDP(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)), **arguments) for _ in range(2)]
    return FSDP(nn.Sequential(nn.Linear(32, 32), *blocks), **arguments)


def built(package, kind, params):
    name, settings = KINDS[kind]
    return getattr(package, name)(params, **settings, **({} if package is optim else {"fused": True}))


def train(model, optimizer, first, steps=2, clip=False):
    for step in range(first, first + steps):
        for part in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
            model(torch.randn(4, 32, generator=generator)).square().mean().backward()
        if clip:
            model.clip_grad_norm_(0.01)
        optimizer.step()
        optimizer.zero_grad()


def assert_same(model, optimizer, others, other_optimizer):
    for left, right in zip(model.parameters(), others.parameters(), strict=True):
        assert torch.equal(left, right)
        mine, theirs = optimizer.state.get(left, {}), other_optimizer.state.get(right, {})
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def runs_of(optimizer):
    """The number of runs in the step before."""
    params = optimizer.param_groups[0]["params"]
    keys = tuple(next(iter(optimizer.state.values())))
    return len(_C.runs(params, optimizer.state, keys, keys[:1] == ("step",), True, True)[-2])


def steps_units(strategy, uo):
    for kind in KINDS:
        for arguments in ({}, {"mixed_precision": MixedPrecision(torch.bfloat16)}):
            note(f"{kind} {arguments}")
            models = [wrapped(strategy, uo, **arguments) for _ in range(2)]
            optimizers = [
                built(package, kind, model.parameters()) for package, model in zip(PACKAGES, models, strict=True)
            ]
            found = []
            optimizers[0].register_step_post_hook(lambda optimizer, *_, found=found: found.append(runs_of(optimizer)))
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, 0, 3, clip=True)
            assert found == [3] * 3  # one for each unit
            assert_same(models[0], optimizers[0], models[1], optimizers[1])


@every_setting
def test_units_step_as_with_torch(strategy, uo):
    simulate_ranks(steps_units, 2, strategy, uo)


def moves(folder, kind, uo):
    pairs = []
    for number, package in enumerate(PACKAGES):
        model = wrapped(uo=uo)
        optimizer = built(package, kind, model.parameters())
        train(model, optimizer, 0)
        checkpoint.save(folder / f"{number}", model, optimizer)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            full = FSDP.optim_state_dict(model, optimizer)
        pairs.append((model, optimizer, full))
        train(model, optimizer, 2)
    (ours, mine, full), (others, theirs, expected) = pairs
    assert_same(ours, mine, others, theirs)
    assert full["state"].keys() == expected["state"].keys()
    for name, values in expected["state"].items():
        assert values.keys() == full["state"][name].keys()
        assert all(torch.equal(value, full["state"][name][key]) for key, value in values.items())
    assert full["param_groups"] == expected["param_groups"]
    for number, package in ((0, optim), (0, torch.optim), (1, optim)):
        for by_checkpoint in (False, True):
            note(f"{number} {package.__name__} {by_checkpoint}")
            model = wrapped(uo=uo, seed=1)
            optimizer = built(package, kind, model.parameters())
            checkpoint.load(folder / f"{number}", model, optimizer if by_checkpoint else None)
            if not by_checkpoint:
                state = FSDP.optim_state_dict_to_load(model, optimizer, pairs[number][2])
                optimizer.load_state_dict(state)
            train(model, optimizer, 2)
            assert_same(model, optimizer, others, theirs)
    for model, optimizer, _ in pairs:
        elastic.resize(model, optimizer, [0])
        if dist.get_rank() == 0:
            train(model, optimizer, 4)
        elastic.resize(model, optimizer, [0, 1])
        train(model, optimizer, 6)
    assert_same(ours, mine, others, theirs)


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_states_move_as_torchs(tmp_path, kind, uo):
    simulate_ranks(moves, 2, tmp_path, kind, uo)


def loads_whole():
    model = wrapped()
    optimizer = built(optim, "AdamW", model.parameters())
    train(model, optimizer, 0)
    optimizer.load_state_dict(FSDP.optim_state_dict(model, optimizer))
    with pytest.raises(StateError, match=r"AdamW.step\(\): the state `exp_avg` of `.*weight` of the unit of "):
        train(model, optimizer, 2)


def test_a_state_that_was_not_converted_is_refused():
    simulate_ranks(loads_whole, 2)
