"""Checkpoints saved at any number of ranks and any strategy load at any other, bit for bit, optimizer included."""

import pytest
import torch
import torch.distributed as dist
from checkpoints import STRATEGIES, adam, differing, full_state, train, wrapped
from gloo import note, run_ranks

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


@pytest.mark.thorough
@pytest.mark.parametrize("world", WORLDS)
def test_from_all_to_all(tmp_path, world):
    check(tmp_path, dict.fromkeys(WORLDS, STRATEGIES), {world: STRATEGIES})
