"""Simulated ranks that save on a disk that is full, or are killed in the midst of a write: which checkpoint is there.

Promises:
- wherever the disk is full, all ranks raise in the same save, the checkpoint before stays, and the next save succeeds:
  `test_a_full_disk_keeps_the_checkpoint_before`
- wherever a rank is killed while it changes the disk, the checkpoint is the one before or the new one, whole, all
  others are told alike and in time, and the next job saves over it:
  `test_a_torn_write_leaves_the_old_checkpoint_or_the_new_one`
- nobody waits for ever for a rank of another machine that is lost before it has answered a call:
  `test_a_save_does_not_wait_for_ever_for_a_rank_that_never_answered`
"""

import random

import pytest

from tests.simulation import checkers
from tests.simulation.faults import Fault, draw
from tests.simulation.faulty_programs import STEPS, STRATEGIES
from tests.simulation.process import simulated
from tests.simulation.saving_programs import leftovers, save_at_once, steps_on_disk, train_and_save

POINTS = (0, 0, 120)  # of the disk; the first rank has 164, others have 96


def runs(kind, seeds, in_background, folder):
    """Run a training of each seed that saves into a folder of its own, with one fault of ``kind``."""
    for seed in seeds:
        chosen = random.Random(seed)
        size, strategy = chosen.choice([2, 4]), chosen.choice(STRATEGIES)  # halves are exact
        own = folder / str(seed)
        own.mkdir()
        faults = draw(seed, size, 1, POINTS, [kind])
        yield simulated(train_and_save, size, seed, str(own), strategy, in_background, faults=faults), size, own


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("first", [0, 5, 10, 15])
@pytest.mark.sweep(2)
def test_a_full_disk_keeps_the_checkpoint_before(tmp_path, in_background, first):
    failed = 0
    for run, size, folder in runs("finds the disk full", range(first, first + 5), in_background, tmp_path):
        checkers.nobody_waits_for_ever(run)
        assert not run.errors, run.story
        for errors in zip(*run.results.values(), strict=True):
            assert len({error is None for error in errors}) == 1, run.results
            for error in filter(None, errors):
                assert "No space left on device" in error[1], error
                failed += 1
        saved = [step + 1 for step, error in enumerate(run.results[0]) if error is None]
        assert steps_on_disk(folder, size) == (saved[-1] if saved else 0)
        assert STEPS - len(saved) == len(run.struck)
        assert not leftovers(folder), leftovers(folder)
    assert failed > 5


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("first", [0, 5, 10, 15])
@pytest.mark.sweep(2)
def test_a_torn_write_leaves_the_old_checkpoint_or_the_new_one(tmp_path, in_background, first):
    struck = 0
    for run, size, folder in runs("is killed in a write", range(first, first + 5), in_background, tmp_path):
        struck += len(run.struck)
        checkers.nobody_waits_for_ever(run)
        checkers.all_are_told_in_time(run)
        steps_on_disk(folder, size)
        again = simulated(train_and_save, size, 0, str(folder), "FULL_SHARD", in_background)
        assert again.reason == 0, again.stacks
        assert not again.errors, again.errors
        assert all(error is None for errors in again.results.values() for error in errors), again.results
        assert steps_on_disk(folder, size) == STEPS
        assert not leftovers(folder), leftovers(folder)
    assert struck > 2


def test_a_save_does_not_wait_for_ever_for_a_rank_that_never_answered(tmp_path):
    seen = 0
    for seed in range(12):
        fault = Fault("is killed", 1, 0)
        run = simulated(save_at_once, 3, seed, str(tmp_path), faults=[fault], machines=True)
        checkers.nobody_waits_for_ever(run)
        assert len({error[:2] for error in run.errors.values()}) == 1, run.story
        assert set(run.errors) == {0, 2}, run.story
        seen += "ranks [1] have not come" in run.errors[0][1]
    assert seen > 1
