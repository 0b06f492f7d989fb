"""Simulated ranks that are lost, late, interrupted or raise, at random points of a seed: what the others are told.

Promises:
- wherever a rank is killed, stopped, interrupted, raises, runs out of memory or has fewer batches, no other rank waits
  for ever, and all that raise raise one text, in the promised seconds: `test_the_others_are_told_alike_and_in_time`
- if the killed rank has the store, the others say so: `test_a_host_that_is_killed_takes_the_store_along`
- a rank that is late at any point makes nobody raise, and changes no bit: `test_a_late_rank_changes_nothing`
"""

import random

import pytest

from tests.simulation import checkers, faulty_programs
from tests.simulation.faults import KINDS, draw
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
