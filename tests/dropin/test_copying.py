"""A copy of a wrapped model, by deepcopy, pickle or torch.save, trains on by itself as the original would have done.

The oracle is a run with torch's own handle that nobody copied; bit for bit, on two gloo processes.
"""

import itertools

import pytest
from copies import (
    MOMENTS,
    OPTIMIZER_FIRST,
    WAYS,
    Run,
    differences,
    pickled_after_two_steps,
    pickled_parameters,
    trained_on,
)
from gloo import run_ranks

pytestmark = pytest.mark.multiprocess

SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
RUNS = [
    *(Run(strategy=strategy, orig=orig) for strategy, orig in itertools.product(SHARDED, (True, False))),
    Run(model="tied"),
    Run(model="tied", orig=False, strategy="SHARD_GRAD_OP"),
    Run(model="frozen"),
    Run(model="frozen_blocks", orig=False),
    Run(model="images", each=False),
    Run(model="strided", strategy="SHARD_GRAD_OP"),
    Run(precision="bf16"),
    Run(precision="fp32_reduce", orig=False),
    Run(precision="bf16", strategy="NO_SHARD"),
    Run(precision="kept_low", strategy="SHARD_GRAD_OP"),
    Run(offload=True),
    Run(offload=True, orig=False),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("number", range(len(RUNS)), ids=map(str, RUNS))
def test_trains_on_as_the_original(number):
    run = RUNS[number]
    ways = itertools.islice(itertools.cycle(WAYS), number, None)  # each moment with each way, over all the runs
    cases = list(zip(MOMENTS, ways, strict=False))
    if run.model == "images":  # its batch norm counts the forwards: no more of them than the oracle has
        cases = [case for case in cases if case[0] in ("before the first forward", "after the step")]
    for rank, (found, compared) in enumerate(run_ranks(differences, 2, run, cases)):
        assert not found, f"rank {rank}: " + "\n".join(found[:4])
        assert compared >= 10


@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", WAYS)
def test_every_moment_in_every_way(way):
    for found, compared in run_ranks(differences, 2, Run(), [(moment, way) for moment in MOMENTS]):
        assert not found, "\n".join(found[:4])
        assert compared >= 10


@pytest.mark.parametrize("run", [Run(), Run(orig=False, strategy="HYBRID_SHARD", model="tied")], ids=str)
def test_other_processes_load_a_pickle_and_train_on(run):
    results = run_ranks(pickled_after_two_steps, 2, run)
    for found, compared in run_ranks(trained_on, 2, run, results):
        assert not found, found[:4]
        assert compared >= 10


@pytest.mark.parametrize("orig", [False, True])
def test_an_optimizer_is_pickled_before_its_model(orig):
    for found, compared in run_ranks(differences, 2, Run(orig=orig), [(moment, OPTIMIZER_FIRST) for moment in MOMENTS]):
        assert not found, "\n".join(found[:4])
        assert compared >= 10


@pytest.mark.parametrize("run", [Run(orig=False), Run(orig=False, precision="bf16"), Run()], ids=str)
def test_parameters_are_pickled_by_themselves(run):
    torchs = run_ranks(pickled_parameters, 2, run, "torch", "pickle")  # torch.load() fails on what it saves
    for way in ("pickle", "torch_save"):
        ours = run_ranks(pickled_parameters, 2, run, "flatparam", way)
        assert ours == torchs
        for sharded, copied, full, full_copied in ours:
            assert copied == sharded
            assert full_copied == full != sharded
