"""Simulated ranks that are lost, late, interrupted or raise, at random points of a seed: what the others are told.

Promises:
- wherever a rank is killed, stopped, interrupted, raises, runs out of memory or has fewer batches, no other rank waits
  for ever, and all that raise raise one text, in the promised seconds: `test_the_others_are_told_alike_and_in_time`
- if the killed rank has the store, the others say so: `test_a_host_that_is_killed_takes_the_store_along`
- a rank that is late, or stopped for less than the heartbeat, makes nobody raise, and changes no bit:
  `test_a_late_rank_changes_nothing`
- an exception that all ranks catch at the same point costs the step, and no later one:
  `test_what_all_ranks_catch_costs_the_step`; one that a rank catches alone, which goes on, is told to all alike:
  `test_a_rank_that_skips_a_step_alone_is_told_to_all`
"""

import random

import pytest
import torch

from tests.simulation import checkers, faulty_programs
from tests.simulation.faults import KINDS, Fault, draw
from tests.simulation.process import simulated

# Of a rank that no fault strikes: points of the seams by strategy, and of user code
POINTS = {"FULL_SHARD": 160, "SHARD_GRAD_OP": 125, "NO_SHARD": 58}
USER_POINTS = 37


def runs(kind, seeds, host=False, sizes=(2, 3, 4)):
    """Run a training of each seed with one fault of ``kind``; ``host``: the rank that it strikes has the store."""
    for seed in seeds:
        chosen = random.Random(seed)
        size, strategy = chosen.choice(sizes), chosen.choice(faulty_programs.STRATEGIES)
        faults = draw(seed, size, 1, (POINTS[strategy], USER_POINTS), [kind])
        where = {"host": faults[0].rank} if host else {}
        yield simulated(faulty_programs.train, size, seed, strategy, faults=faults, **where), size


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "is late"])
def test_the_others_are_told_alike_and_in_time(kind):
    seen = 0
    for run, size in runs(kind, range(20)):
        checkers.nobody_waits_for_ever(run, size)
        checkers.all_are_told_in_time(run)
        checkers.all_are_told_alike(run)
        seen += bool(checkers.told(run))
    assert seen > 10, "the faults struck nobody whom others need"


def test_a_host_that_is_killed_takes_the_store_along():
    for run, size in runs("is killed", range(20), host=True):
        checkers.nobody_waits_for_ever(run, size)
        checkers.all_are_told_in_time(run)
        checkers.all_are_told_that_the_store_is_gone(run)


def test_a_late_rank_changes_nothing():
    late = 0
    for run, size in runs("is late", range(20), sizes=(2, 4)):  # halves are exact
        checkers.nobody_waits_for_ever(run, size)
        checkers.nobody_raises(run, size, faulty_programs.unsharded(size))
        late += len(run.struck)
    assert late > 10


def runs_that_catch(seeds, alone):
    """Run a training that catches exceptions, which all ranks raise at the same point, or one of them."""
    for seed in seeds:
        chosen = random.Random(seed)
        size, strategy = chosen.choice([2, 4]), chosen.choice(faulty_programs.STRATEGIES)
        who = [chosen.randrange(size)] if alone else range(size)
        point = chosen.randrange(USER_POINTS - 1)
        faults = [Fault("raises in user code", rank, point) for rank in who]
        yield simulated(faulty_programs.train_and_catch, size, seed, strategy, faults=faults), size


def test_what_all_ranks_catch_costs_the_step():
    for run, size in runs_that_catch(range(15), alone=False):
        checkers.nobody_waits_for_ever(run, size)
        assert not run.errors, run.story
        (skipped,) = {tuple(skipped) for _, skipped in run.results.values()}
        assert len(skipped) == 1
        for params, _ in run.results.values():
            assert all(map(torch.equal, params, faulty_programs.unsharded(size, skipped))), run.story


def test_a_rank_that_skips_a_step_alone_is_told_to_all():
    for run, size in runs_that_catch(range(15), alone=True):
        checkers.nobody_waits_for_ever(run, size)
        checkers.all_are_told_in_time(run)
        assert len({error[:2] for error in run.errors.values()}) == 1, run.story
        finished = set(range(size)) - set(run.errors)  # with NO_SHARD the rank may end a step before the others
        assert finished <= {fault.rank for fault in run.struck}, run.story
