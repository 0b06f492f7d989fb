"""Simulated ranks that are lost, late, interrupted or raise, at random points of a seed: what the others are told.

Promises:
- wherever a rank is killed, stopped, interrupted, raises, runs out of memory or has fewer batches, no other rank waits
  for ever, and all that raise raise one text, in the promised seconds: `test_the_others_are_told_alike_and_in_time`
- the same holds for what a hook of a module, of a tensor or of an optimizer raises:
  `test_what_hooks_raise_is_told_to_the_others`
- with two faults in a run, too, all that raise raise one text, in time:
  `test_two_faults_in_one_run_are_told_alike_and_in_time`, `test_two_ranks_that_are_lost_at_one_moment_give_one_text`
- a rank that comes to the building of a unit when two ranks are lost names the one that the others have named:
  `test_of_two_lost_ranks_a_late_rank_names_the_one_that_is_named`
- the same holds where ranks are on other machines and have just begun:
  `test_ranks_of_other_machines_are_told_alike_and_in_time`
- the others are told the error of a rank that is interrupted before its first unit, too:
  `test_who_is_interrupted_at_once_tells_the_others`
- who is told ends at once: it does not wait for the reading of ranks that have ended on its machine:
  `test_nobody_waits_until_a_lost_rank_has_read`
- nor where torch refuses to begin a collective of a setup, or of units outside of a step:
  `test_a_collective_that_cannot_begin_is_explained`; the one of torch's `ShardedGradScaler` is explained, too:
  `test_a_collective_of_torchs_gradient_scaler_is_explained`
- if the killed rank has the store, the others say so: `test_a_host_that_is_killed_takes_the_store_along`
- a rank that is late, or stopped for less than the heartbeat, makes nobody raise, and changes no bit:
  `test_a_late_rank_changes_nothing`
- an exception that all ranks catch at the same point costs the step, and no later one:
  `test_what_all_ranks_catch_costs_the_step`; one that a rank catches alone, which goes on, is told to all alike:
  `test_a_rank_that_skips_a_step_alone_is_told_to_all`
"""

import random
import re

import pytest
import torch

from tests.simulation import checkers, faulty_programs
from tests.simulation.faults import LOSSES, USER, Fault, draw, kinds_of
from tests.simulation.process import simulated

# Of a rank that no fault strikes: points of the seams by strategy, and of user code
POINTS = {"FULL_SHARD": 160, "SHARD_GRAD_OP": 125, "NO_SHARD": 58}
USER_POINTS = 37
POINTS_IN_HOOKS = 93  # of user code, with hooks; five are after the last step, or behind `step()`


def runs(kind, seeds, host=False, sizes=(2, 3, 4), hooks=False, machines=False):
    """Run a training of each seed with one fault of ``kind``; ``host``: the rank that it strikes has the store."""
    for seed in seeds:
        chosen = random.Random(seed)
        size, strategy = chosen.choice(sizes), chosen.choice(faulty_programs.STRATEGIES)
        faults = draw(seed, size, 1, (POINTS[strategy], POINTS_IN_HOOKS if hooks else USER_POINTS), [kind])
        where = {"host": faults[0].rank if host else None, "machines": machines}
        yield simulated(faulty_programs.train, size, seed, strategy, 0.01, hooks, faults=faults, **where), size


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("first", [0, 5, 10, 15])
@pytest.mark.sweep(7)
def test_the_others_are_told_alike_and_in_time(kind, first):
    seen = 0
    for run, _ in runs(kind, range(first, first + 5)):
        checkers.nobody_waits_for_ever(run)
        checkers.all_are_told_in_time(run)
        checkers.all_are_told_alike(run)
        seen += bool(checkers.told(run))
    assert seen > 2, "the faults struck nobody whom others need"


@pytest.mark.parametrize("kind", ["is killed", "is stopped", "has fewer batches"])
@pytest.mark.parametrize("first", [0, 10])
@pytest.mark.sweep(3)
def test_ranks_of_other_machines_are_told_alike_and_in_time(kind, first):
    for run, _ in runs(kind, range(first, first + 10), machines=True):
        checkers.nobody_waits_for_ever(run)
        checkers.all_are_told_in_time(run, gone=checkers.STOPPED)  # some wait in the store: no connection breaks
        checkers.all_are_told_alike(run)


def test_who_is_interrupted_at_once_tells_the_others():
    for point in range(4):
        for seed in range(3):
            run = simulated(faulty_programs.train, 3, seed, faults=[Fault("is interrupted", 1, point)])
            assert set(checkers.told(run)) == {0, 2}, run.story
            for _, text, _ in checkers.told(run).values():
                assert re.match("rank 1 has raised an error of its own .* KeyboardInterrupt", text), run.story


@pytest.mark.parametrize("kind", ["is killed", "raises in user code", "has fewer batches"])
@pytest.mark.parametrize("first", [0, 10])
@pytest.mark.sweep(3)
def test_nobody_waits_until_a_lost_rank_has_read(kind, first):
    seen = 0
    for run, _ in runs(kind, range(first, first + 10)):
        checkers.nobody_waits_until_the_lost_have_read(run)
        seen += len(checkers.told(run))
    assert seen > 5


@pytest.mark.parametrize("call", ["exchange", "run", "state_dict", "clip_grad_norm_"])
def test_a_collective_that_cannot_begin_is_explained(call):
    run = simulated(faulty_programs.begin_what_fails, 3, 0, call)
    assert set(run.errors) == {0, 2}, run.story
    for kind, text, _ in run.errors.values():
        assert kind == "OrderError", run.story
        assert text.startswith("the process of rank 1 "), run.story
        assert "gloo" not in text, run.story


def test_a_collective_of_torchs_gradient_scaler_is_explained():
    run = simulated(faulty_programs.scale_a_bare_model, 3)
    assert set(run.errors) == {0, 1, 2}, run.story
    assert run.errors[0][:2] == run.errors[2][:2], run.story
    kind, text, _ = run.errors[0]
    assert kind == "OrderError", run.story
    assert text.startswith("rank 1 "), run.story
    assert "batch 0 is bad" in text, run.story


@pytest.mark.parametrize("kind", kinds_of(USER))
@pytest.mark.parametrize("first", [0, 10, 20, 30])
@pytest.mark.sweep(2)
def test_what_hooks_raise_is_told_to_the_others(kind, first):
    seen = 0
    for run, _ in runs(kind, range(first, first + 10), hooks=True):
        checkers.nobody_waits_for_ever(run)
        checkers.all_are_told_in_time(run)
        checkers.all_are_told_alike(run)
        seen += bool(checkers.told(run))
    assert seen > 5, "the faults struck nobody whom others need"


@pytest.mark.parametrize("first", [0, 20, 40])
@pytest.mark.sweep(1)
def test_two_faults_in_one_run_are_told_alike_and_in_time(first):
    seen = 0
    for seed in range(first, first + 20):
        chosen = random.Random(seed)
        size, strategy = chosen.choice([3, 4]), chosen.choice(faulty_programs.STRATEGIES)
        faults = draw(seed, size, 2, (POINTS[strategy], USER_POINTS))
        run = simulated(faulty_programs.train, size, seed, strategy, faults=faults)
        checkers.nobody_waits_for_ever(run)
        checkers.all_are_told_in_time(run)
        checkers.all_are_told_alike(run)
        seen += len(run.struck) == 2
    assert seen > 6, "seldom both have struck"


def test_two_ranks_that_are_lost_at_one_moment_give_one_text():
    for seed in [*range(2190, 2200), 8]:
        faults = [Fault("is killed", 4, 10), Fault("is interrupted", 2, 10)]
        run = simulated(faulty_programs.train, 5, seed, "SHARD_GRAD_OP", 0.01, True, faults=faults)
        checkers.nobody_waits_for_ever(run)
        checkers.all_are_told_in_time(run)
        checkers.all_are_told_alike(run)


def test_of_two_lost_ranks_a_late_rank_names_the_one_that_is_named():
    run = simulated(faulty_programs.build_beside_the_lost, 5)
    assert run.reason == 0, run.stacks
    assert set(run.results) == {0, 1, 3}, run.story
    (text,) = set(run.results.values())
    assert text.startswith("the process of rank 4 "), text


@pytest.mark.parametrize("first", [0, 10])
@pytest.mark.sweep(1)
def test_a_host_that_is_killed_takes_the_store_along(first):
    for run, _ in runs("is killed", range(first, first + 10), host=True):
        checkers.nobody_waits_for_ever(run)
        checkers.all_are_told_in_time(run)
        checkers.all_are_told_that_the_store_is_gone(run)


@pytest.mark.parametrize("first", [0, 10])
@pytest.mark.sweep(1)
def test_a_late_rank_changes_nothing(first):
    late = 0
    for run, size in runs("is late", range(first, first + 10), sizes=(2, 4)):  # halves are exact
        checkers.nobody_waits_for_ever(run)
        checkers.nobody_raises(run, size, faulty_programs.unsharded(size))
        late += len(run.struck)
    assert late > 5


def runs_that_catch(seeds, alone, hooks=False):
    """Run a training that catches exceptions, which all ranks raise at the same point, or one of them."""
    for seed in seeds:
        chosen = random.Random(seed)
        size, strategy = chosen.choice([2, 4]), chosen.choice(faulty_programs.STRATEGIES)
        who = [chosen.randrange(size)] if alone else range(size)
        point = chosen.randrange(POINTS_IN_HOOKS - 5 if hooks else USER_POINTS - 1)
        faults = [Fault("raises in user code", rank, point) for rank in who]
        yield simulated(faulty_programs.train_and_catch, size, seed, strategy, hooks, faults=faults), size


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("first", [0, 8])
@pytest.mark.sweep(2)
def test_what_all_ranks_catch_costs_the_step(hooks, first):
    for run, size in runs_that_catch(range(first, first + 8), alone=False, hooks=hooks):
        checkers.nobody_waits_for_ever(run)
        assert not run.errors, run.story
        (skipped,) = {tuple(skipped) for _, skipped in run.results.values()}
        assert len(skipped) == 1
        for params, _ in run.results.values():
            assert all(map(torch.equal, params, faulty_programs.unsharded(size, skipped))), run.story


@pytest.mark.parametrize("first", [0, 8])
@pytest.mark.sweep(1)
def test_a_rank_that_skips_a_step_alone_is_told_to_all(first):
    for run, size in runs_that_catch(range(first, first + 8), alone=True):
        checkers.nobody_waits_for_ever(run)
        checkers.all_are_told_in_time(run)
        assert len({error[:2] for error in run.errors.values()}) == 1, run.story
        finished = set(range(size)) - set(run.errors)  # with NO_SHARD the rank may end a step before the others
        assert finished <= {fault.rank for fault in run.struck}, run.story
