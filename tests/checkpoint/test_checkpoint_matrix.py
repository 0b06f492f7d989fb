"""Checkpoints saved at any number of ranks and any strategy load at any other, bit for bit, optimizer included.

Promises:
- saved at 1, 2 and 4 ranks by six strategies, loaded at every other, bit for bit, optimizer included; tied,
  transposed, 4-D and 0-dim parameters
"""

import json

import pytest
import torch
import torch.distributed as dist
from checkpoints import STRATEGIES, adam, differing, full_state, train, wrapped
from fsdp_models import make
from gloo import note, run_ranks
from layer_zero_ranks import layer_zero
from simulated_ranks import simulate_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint

pytestmark = pytest.mark.multiprocess
WORLDS = (1, 2, 4)


def saved(folder, cases):
    """Train, save each of ``cases``; rank 0 leaves what was saved."""
    found = {}
    for strategy, use_orig_params, units in cases:
        name = f"{strategy}-{dist.get_world_size()}"
        note(f"save {name}")
        model = wrapped(strategy, use_orig_params, units)
        optimizer = adam(model)
        train(model, optimizer, 0, 2)
        checkpoint.save(f"{folder}/{name}", model, optimizer, {"rank": dist.get_rank()})
        found[name] = full_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(found, f"{folder}/{dist.get_world_size()}.pt")


def loaded(folder, worlds, cases):
    """Load every checkpoint of ``worlds`` into each of ``cases``, before and after the optimizer has a state."""
    wrong = []
    wanted = {}
    for world in worlds:
        wanted |= torch.load(f"{folder}/{world}.pt")
    for i, (strategy, use_orig_params, units) in enumerate(cases):
        model = wrapped(strategy, use_orig_params, units, seed=5)
        optimizer = adam(model)
        for name, state in wanted.items():
            note(f"load {name} into {strategy}")
            got = checkpoint.load(f"{folder}/{name}", model, optimizer)
            assert got.extra == {"rank": dist.get_rank() % int(name.split("-")[1])}
            names = differing(full_state(model, optimizer), state)
            if names:
                wrong.append((name, strategy, names))
            if i % 2:
                train(model, optimizer, 7, 1)
    return wrong


def cases_of(strategies, turn=0):
    """With and without use_orig_params and units of their own, in turn."""
    return [(strategy, (i + turn) % 2 == 0, (i + turn) % 3 != 2) for i, strategy in enumerate(strategies)]


def check(folder, saving, loading):
    for world, strategies in saving.items():
        run_ranks(saved, world, str(folder), cases_of(strategies, world))
    for world, strategies in loading.items():
        for wrong in run_ranks(loaded, world, str(folder), list(saving), cases_of(strategies), timeout=280.0):
            assert not wrong


def test_from_some_to_some(tmp_path):
    check(tmp_path, {2: ("FULL_SHARD", "LAYER_ZERO_NESTED"), 1: ("ZERO_1",)}, {2: ("NO_SHARD", "ZERO_1")})


def other_groups(folder):
    """LayerZero's checkpoints say how they were spread, and load over groups of other sizes and orders."""
    grids = [("LAYER_ZERO_NESTED", 2, True), ("LAYER_ZERO", 2, False), ("LAYER_ZERO_NESTED", 1, False)]
    grids += [("LAYER_ZERO", 4, False), ("LAYER_ZERO_NESTED", 2, False)]
    states = []
    for i, (mode, inner, strided) in enumerate(grids):
        model = layer_zero(inner, mode, strided=strided)
        optimizer = adam(model)
        train(model, optimizer, i, 1)
        checkpoint.save(f"{folder}/{i}", model, optimizer)
        states.append(full_state(model, optimizer))
    for mode, inner, strided in grids:
        model = layer_zero(inner, mode, strided=strided, module=make(7))
        optimizer = adam(model)
        for i, state in enumerate(states):
            checkpoint.load(f"{folder}/{i}", model, optimizer)
            assert not differing(full_state(model, optimizer), state), (mode, inner, strided, grids[i])


def test_layer_zero_over_other_groups(tmp_path):
    simulate_ranks(other_groups, 4, tmp_path)
    index = json.loads((tmp_path / "0" / "checkpoint.json").read_text().splitlines()[1])
    assert index["world_size"] == 4
    unit = index["units"][0]
    assert (unit["strategy"], unit["nested"], unit["parameters_over"]) == ("LAYER_ZERO_NESTED", True, 2)
    assert unit["ranks"] == [0, 1, 2, 3]  # strided rows, whose shards are nested: in the order of the world


def of_precisions(folder):
    """bf16 beside fp32 in one unit, frozen parameters, aligned shards that cut no row, fp16 computation."""
    settings = [{"segments": True}, {"segments": True, "shard_alignment": 64, "atomic": "row"}]
    states = []
    for i, arguments in enumerate((*settings, *settings)):
        torch.manual_seed(i)
        module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3).to(torch.bfloat16), nn.Linear(3, 2))
        module[2].bias.requires_grad_(False)
        model = FSDP(module, use_orig_params=i % 2 == 0, **arguments)
        optimizer = torch.optim.Adam(param for param in model.parameters() if param.requires_grad)
        for param in model.parameters():
            if param.requires_grad:
                param.grad = torch.ones_like(param)
        optimizer.step()
        if i < 2:
            checkpoint.save(f"{folder}/{i}", model, optimizer)
            states.append(full_state(model, optimizer))
        else:
            for j, state in enumerate(states):
                checkpoint.load(f"{folder}/{j}", model, optimizer)
                found = full_state(model, optimizer)
                assert not differing(found, state), (i, j, differing(found, state))


def test_segments_precisions_and_rows(tmp_path):
    run_ranks(of_precisions, 2, tmp_path)


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_from_all_to_all(tmp_path):
    check(tmp_path, dict.fromkeys(WORLDS, STRATEGIES), dict.fromkeys(WORLDS, STRATEGIES))
