"""Random combinations of all the ways to train, bit for bit as on torch's handle; more with FLATPARAM_RANDOM_RUNS."""

import os
import random

import pytest
from dropin_models import MODELS
from dropin_scenarios import PRECISIONS, Scenario, train
from gloo import run_both
from recording import first_difference

pytestmark = pytest.mark.multiprocess

RUNS = int(os.environ.get("FLATPARAM_RANDOM_RUNS", "12"))
FIRST = int(os.environ.get("FLATPARAM_RANDOM_FIRST", "0"))
# what torch's FSDP does not support, whichever the handle
UNSUPPORTED = (
    lambda s: s.model == "frozen" and not s.orig,  # parameters of one unit must agree in requires_grad
    lambda s: s.model == "twice" and s.wrap == "nested",  # a unit in a unit that is called twice
    lambda s: s.clip and s.precision not in ("fp32", "fp64"),
    lambda s: s.wrap == "root" and s.checkpointing.startswith("reentrant"),  # recomputes with freed parameters
    lambda s: s.model in ("conv", "images") and s.precision not in ("fp32", "fp64", "bf16_model"),  # BatchNorm
)


def scenario_of(seed):
    """Return a random scenario that torch supports and in which torch is right."""
    source = random.Random(seed)
    while True:
        scenario = Scenario(
            model=source.choice(sorted(MODELS)),
            strategy=source.choice(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")),
            orig=source.random() < 0.6,
            world=source.choice((2, 2, 3)),
            precision=source.choice(("fp32", "fp32", *sorted(PRECISIONS))),
            optimizer=source.choice(("sgd", "adamw")),
            wrap=source.choice(("each", "root", "nested")),
            accumulate=source.choice(("none", "no_sync", "sync")),
            checkpointing=source.choice(
                ("none", "none", "reentrant", "reentrant_outside", "other", "other_outside"),
            ),
            evaluate=source.random() < 0.4,
            set_to_none=source.random() < 0.6,
            state_dicts=source.random() < 0.4,
            prefetch=source.choice(("pre", "post", "none", "forward")),
            clip=source.random() < 0.2,
            abandon=source.random() < 0.2,
        )
        if not scenario.torch_is_wrong and not any(unsupported(scenario) for unsupported in UNSUPPORTED):
            return scenario


def train_if_torch_can(kind, scenario):
    """Return the events; where torch raises on every rank alike, the type of its error."""
    try:
        return train(kind, scenario)
    except Exception as error:
        return [("raised", type(error).__name__)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
def test_a_random_way_to_train(seed):
    scenario = scenario_of(seed)
    for rank, (expected, got) in enumerate(run_both(train_if_torch_can, scenario.world, scenario)):
        if expected[0][0] == "raised" != got[0][0]:
            continue  # no worse than torch
        difference = first_difference(expected, got)
        assert difference is None, f"{scenario}, rank {rank}: {difference}"


def test_most_random_ways_are_different():
    assert len({str(scenario_of(seed)) for seed in range(100)}) > 95
