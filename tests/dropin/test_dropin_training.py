"""torch's FullyShardedDataParallel trains on our handle bit for bit as on torch's own: the scenarios of one axis each,
and a covering set of their combinations. Oracle: torch's handle, in the same processes, on the same seeds."""

import pytest
from dropin_scenarios import Scenario, train
from gloo import run_both
from recording import first_difference

pytestmark = pytest.mark.multiprocess

S = Scenario
SCENARIOS = [
    # each strategy, with original parameters and without, on two and on three ranks
    *(
        S(strategy=strategy, orig=orig, world=world, accumulate="sync", optimizer="adamw" if orig else "sgd")
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
        for orig in (True, False)
        for world in (2, 3)
    ),
    S(strategy="HYBRID_SHARD", world=4, model="tied"),
    S(strategy="_HYBRID_SHARD_ZERO2", world=4, orig=False, optimizer="adamw"),
    # each precision
    *(
        S(
            strategy=strategy,
            orig=orig,
            precision=precision,
            model="images" if strategy == "NO_SHARD" and orig else "conv",
            accumulate="no_sync",
            evaluate=orig,
        )
        for strategy, orig, precision in (
            ("FULL_SHARD", True, "bf16"),
            ("SHARD_GRAD_OP", False, "bf16"),
            ("NO_SHARD", True, "bf16"),
            ("NO_SHARD", False, "bf16"),
            ("SHARD_GRAD_OP", True, "bf16_params"),
            ("FULL_SHARD", False, "bf16_params"),
            ("FULL_SHARD", True, "fp32_reduce"),
            ("NO_SHARD", True, "fp32_reduce"),
            ("SHARD_GRAD_OP", False, "fp32_reduce"),
            ("FULL_SHARD", True, "bf16_reduce"),
            ("NO_SHARD", False, "bf16_reduce"),
            ("SHARD_GRAD_OP", True, "buffers"),
            ("FULL_SHARD", False, "fp64"),
            ("SHARD_GRAD_OP", True, "fp64"),
            ("FULL_SHARD", True, "bf16_model"),
            ("NO_SHARD", True, "fp64"),
        )
    ),
    S(precision="fp16", world=3),
    S(precision="kept_low"),
    S(precision="kept_low", orig=False, strategy="SHARD_GRAD_OP"),
    S(precision="bf16", strategy="HYBRID_SHARD", world=4),
    # accumulation with and without communication
    *(
        S(strategy=strategy, orig=orig, world=world, accumulate="no_sync", set_to_none=set_to_none)
        for strategy, orig, world, set_to_none in (
            ("FULL_SHARD", True, 2, True),
            ("FULL_SHARD", True, 3, False),
            ("FULL_SHARD", False, 2, False),
            ("SHARD_GRAD_OP", True, 2, True),
            ("SHARD_GRAD_OP", True, 2, False),
            ("SHARD_GRAD_OP", False, 3, True),
            ("NO_SHARD", True, 2, False),
            ("NO_SHARD", False, 2, True),
        )
    ),
    S(set_to_none=False, orig=True),
    S(set_to_none=False, orig=False, strategy="NO_SHARD"),
    # activation checkpointing, in the unit and around it
    *(
        S(checkpointing=checkpointing, orig=orig, strategy=strategy, accumulate=accumulate)
        for checkpointing, orig, strategy, accumulate in (
            ("reentrant", True, "FULL_SHARD", "none"),
            ("reentrant", False, "SHARD_GRAD_OP", "no_sync"),
            ("reentrant_outside", True, "FULL_SHARD", "no_sync"),
            ("reentrant_outside", True, "SHARD_GRAD_OP", "none"),
            ("reentrant_outside", False, "FULL_SHARD", "none"),
            ("reentrant_outside", True, "NO_SHARD", "none"),
            ("other", True, "SHARD_GRAD_OP", "sync"),
            ("other", False, "FULL_SHARD", "none"),
            ("other_outside", True, "FULL_SHARD", "sync"),
            ("other_outside", True, "SHARD_GRAD_OP", "none"),
            ("other_outside", False, "SHARD_GRAD_OP", "none"),
            ("other_outside", True, "NO_SHARD", "none"),
        )
    ),
    S(checkpointing="other_outside", precision="bf16", model="tied"),
    S(checkpointing="reentrant_outside", precision="bf16", model="conv", strategy="SHARD_GRAD_OP"),
    # shared, strided, unused, frozen parameters, modules called twice
    *(
        S(model=model, strategy=strategy, orig=orig, world=world, wrap=wrap, state_dicts=True)
        for model, strategy, orig, world, wrap in (
            ("tied", "FULL_SHARD", True, 2, "each"),
            ("tied", "FULL_SHARD", True, 3, "root"),
            ("tied", "FULL_SHARD", False, 3, "each"),
            ("tied", "SHARD_GRAD_OP", True, 2, "root"),
            ("tied", "SHARD_GRAD_OP", False, 2, "each"),
            ("tied", "NO_SHARD", True, 2, "each"),
            ("tied", "NO_SHARD", False, 2, "root"),
            ("conv", "FULL_SHARD", True, 2, "nested"),
            ("conv", "FULL_SHARD", False, 3, "root"),
            ("conv", "SHARD_GRAD_OP", True, 3, "root"),
            ("images", "NO_SHARD", True, 2, "root"),
            ("conv", "NO_SHARD", False, 2, "each"),
            ("unused", "FULL_SHARD", True, 2, "each"),
            ("unused", "FULL_SHARD", True, 3, "root"),
            ("unused", "FULL_SHARD", False, 2, "each"),
            ("unused", "SHARD_GRAD_OP", True, 2, "nested"),
            ("unused", "SHARD_GRAD_OP", False, 2, "root"),
            ("unused", "NO_SHARD", True, 2, "each"),
            ("twice", "FULL_SHARD", True, 2, "root"),
            ("twice", "FULL_SHARD", True, 2, "each"),
            ("twice", "FULL_SHARD", False, 2, "each"),
            ("twice", "SHARD_GRAD_OP", True, 2, "nested"),
            ("twice", "NO_SHARD", True, 2, "each"),
            ("twice", "NO_SHARD", False, 2, "root"),
            ("frozen", "FULL_SHARD", True, 2, "each"),
            ("frozen", "FULL_SHARD", True, 3, "root"),
            ("frozen", "SHARD_GRAD_OP", True, 2, "each"),
            ("frozen", "NO_SHARD", True, 2, "root"),
            ("frozen_blocks", "FULL_SHARD", False, 2, "each"),
            ("frozen_blocks", "SHARD_GRAD_OP", False, 2, "nested"),
            ("frozen_blocks", "NO_SHARD", False, 2, "each"),
        )
    ),
    # a forward that no backward follows
    S(abandon=True, model="tied"),
    S(abandon=True, model="conv", orig=False, strategy="SHARD_GRAD_OP"),
    S(abandon=True, model="images", strategy="SHARD_GRAD_OP", accumulate="no_sync"),
    S(abandon=True, model="twice", strategy="NO_SHARD", evaluate=True),
    # a unit for each layer, prefetching, an evaluation in between, clipping
    S(wrap="nested", world=3, prefetch="forward", evaluate=True),
    S(wrap="nested", orig=False, prefetch="post", clip=True),
    S(wrap="nested", strategy="SHARD_GRAD_OP", prefetch="none", evaluate=True, clip=True),
    S(strategy="SHARD_GRAD_OP", evaluate=True, accumulate="no_sync", precision="bf16", state_dicts=True),
    S(strategy="NO_SHARD", evaluate=True, clip=True, state_dicts=True),
    S(orig=False, evaluate=True, precision="bf16", state_dicts=True, optimizer="adamw"),
    S(model="unused", accumulate="no_sync", optimizer="adamw", set_to_none=False),
    S(model="twice", accumulate="no_sync", precision="bf16", checkpointing="other_outside"),
    S(model="frozen", accumulate="no_sync", precision="bf16", evaluate=True),
    S(model="tied", accumulate="no_sync", precision="bf16", strategy="SHARD_GRAD_OP", evaluate=True),
]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_trains_as_torchs_handle_does(scenario):
    for rank, (expected, got) in enumerate(run_both(train, scenario.world, scenario)):
        difference = first_difference(expected, got)
        assert difference is None, f"rank {rank}: {difference}"
        assert len(expected) > 100  # the run was really recorded


def test_the_scenarios_are_fit_to_be_compared():
    names = [str(scenario) for scenario in SCENARIOS]
    assert len(set(names)) == len(names)
    assert not any(scenario.torch_is_wrong for scenario in SCENARIOS)  # test_dropin_unsharded.py has these
