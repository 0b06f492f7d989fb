"""Elastic training on simulated ranks: a rank is killed at a random point of a seed, or a process joins.

Oracle: the unsharded module, trained on the batches of the ranks that each step had in the end, gradients summed by
hand, bit for bit: losses, parameters, the scheduler's and the generator's state.

Promises:
- wherever a rank is killed, also while the world is made, the model is built, or the state moves, the others go on and
  train as the unsharded module: `test_a_killed_rank_changes_no_bit`
- on devices, too, which wait until the communicator is aborted: `test_a_rank_that_is_killed_on_devices_changes_no_bit`;
  there a live rank that leaves the world after an error of the transport tells the others, whose devices wait for it:
  `test_devices_do_not_wait_for_a_rank_that_has_left`
- the same holds if two are killed; if that was too much for the parities, all others raise one error that names whose
  state is lost: `test_two_killed_ranks_change_no_bit_or_all_are_told`
- if the world fails and no rank is lost, the others go on from a step whose parities are not whole; a rank that is
  killed before the next commit costs the step before, and no more:
  `test_a_rank_that_is_killed_after_a_failed_world_costs_one_more_step`
- a rank keeps three states at most, however many worlds have failed in a step:
  `test_worlds_that_fail_one_after_another_keep_no_copy_more`
- new processes that join at a random time change no bit, also if a rank is killed meanwhile:
  `test_processes_that_join_change_no_bit`
- the others repeat the step of a loss without a new process, for which they would wait:
  `test_the_step_of_a_loss_waits_for_no_new_process`
- a rank that was stopped for longer than the heartbeat is replaced and ends quietly: `test_a_stopped_rank_is_replaced`
- a corrupt copy or parity, or one of an older step, is refused by all ranks alike: they go on from the newest state of
  which all pieces are sound, or all raise one error that names the piece, its rank and step, and the newest checkpoint:
  `test_a_corrupt_piece_is_refused_by_all`, `test_with_no_sound_state_all_are_told_what_is_corrupt`
- an error of user code is no loss: it ends the rank, and the others are told of it:
  `test_an_error_of_user_code_passes`
"""

import random

import pytest
import torch

from tests.simulation import checkers, elastic_programs
from tests.simulation.faults import HEARTBEAT, Fault
from tests.simulation.process import simulated
from tests.simulation.programs import HARMS

POINTS = 240  # of the seams, of a rank that no fault strikes


def train(seed, size, faults, redundancy="parity", joins=()):
    return simulated(
        elastic_programs.train, size + len(joins), seed, size, redundancy, joins, faults=faults, limit=300.0
    )


def struck(run):
    return {fault.rank for fault in run.struck}


def killed(chosen, size):
    return Fault("is killed", chosen.randrange(size), chosen.randrange(POINTS))


def was_too_early(run):
    """Whether a rank was lost before the first commit: all others say so."""
    errors = {error[:2] for rank, error in run.errors.items() if rank not in struck(run)}
    told = ("StateError", "elastic.start: ranks are lost, and no state is committed yet: start the job again")
    assert told not in errors or (errors == {told} and not run.results), run.story
    return told in errors


def agrees_with_the_unsharded_module(run, alive):
    """Return the number of ranks of each step."""
    assert run.reason == 0, run.story
    assert not run.errors, run.story
    assert set(run.results) >= alive, run.story
    results = {rank: run.results[rank] for rank in alive if run.results[rank] is not None}  # None: came too late
    sizes = []
    for step in range(elastic_programs.UNTIL):
        found = {log[step][0] for log, _, _ in results.values() if step in log}
        assert len(found) == 1, (step, found, run.story)
        sizes += found
    losses, params, at_end = elastic_programs.unsharded(sizes)
    for log, theirs, end in results.values():
        for step, (_, loss) in log.items():
            assert loss in losses[step], (step, run.story)
        assert theirs is None or all(map(torch.equal, theirs, params)), run.story
        assert end == at_end, run.story
    return sizes


def train_on_as_if_unsharded(runs):
    """``runs``: pairs of a run in which a rank may be killed, and its number of ranks."""
    seen = 0
    for run, size in runs:
        if was_too_early(run):
            continue
        sizes = agrees_with_the_unsharded_module(run, set(range(size)) - struck(run))
        seen += sizes[-1] < size
    assert seen > 3, "seldom a rank was killed"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("first", [0, 12])
@pytest.mark.sweep(3)
def test_a_killed_rank_changes_no_bit(size, first):
    chosen = [(seed, random.Random(seed)) for seed in range(first, first + 13)]
    train_on_as_if_unsharded((train(seed, size, [killed(source, size)]), size) for seed, source in chosen)


@pytest.mark.parametrize("late", ["others", "computing"])
def test_a_rank_that_is_killed_on_devices_changes_no_bit(late):
    def run(seed):
        chosen = random.Random(seed)
        size = chosen.choice([2, 3, 4])
        where = {"faults": [killed(chosen, size)], "device": late, "limit": 300.0}
        return simulated(elastic_programs.train_on_device, size, seed, size, **where), size

    train_on_as_if_unsharded(map(run, range(10)))


@pytest.mark.parametrize("late", ["others", "computing"])
@pytest.mark.parametrize("size", [2, 3])
def test_devices_do_not_wait_for_a_rank_that_has_left(size, late):
    run = simulated(
        elastic_programs.train_on_device, size, 0, size, [(2, 1, "loses a connection")], device=late, limit=300.0
    )
    assert agrees_with_the_unsharded_module(run, set(range(size))) == [size] * elastic_programs.UNTIL
    assert run.seconds < HEARTBEAT, run.story


def harmed(size, redundancy, events, folder=None):
    return simulated(elastic_programs.train, size, 1, size, redundancy, (), 0.05, events, folder, limit=300.0)


@pytest.mark.parametrize("what", HARMS)
@pytest.mark.parametrize(("size", "redundancy"), [(3, "parity"), (4, "parity"), (4, "buddy")])
def test_a_corrupt_piece_is_refused_by_all(size, redundancy, what):
    for rank in (0, 1):
        run = harmed(size, redundancy, [(3, rank, what), (3, 2, "is killed")])
        sizes = agrees_with_the_unsharded_module(run, set(range(size)) - {2})
        is_of_other_group = redundancy == "buddy" and rank == 1
        first = 3 if is_of_other_group else 2
        assert sizes == [size] * first + [size - 1] * (6 - first)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (HARMS[0], "the copy of rank 0's state of step {} is corrupt: its checksum does not fit"),
        (HARMS[1], "rank 0's parity of step {} is corrupt: its checksum does not fit"),
        (HARMS[2], "the copy of rank 2's state of step {} is corrupt: its checksum does not fit, when it is rebuilt"),
    ],
)
def test_with_no_sound_state_all_are_told_what_is_corrupt(tmp_path, what, told):
    events = [(1, None, "saves"), (2, 0, what), (3, 0, what), (3, 2, "is killed")]
    run = harmed(3, "parity", events, str(tmp_path / "checkpoint"))
    assert run.reason == 0, run.story
    assert set(run.errors) == {0, 1}, run.story
    ((kind, text),) = {error[:2] for error in run.errors.values()}
    assert kind == "CheckpointError"
    assert told.format(2) in text
    assert told.format(3) in text
    assert text.endswith(f"start again from the newest checkpoint, {tmp_path}/checkpoint")


@pytest.mark.parametrize("redundancy", ["parity", "buddy"])
@pytest.mark.parametrize("first", [0, 15])
@pytest.mark.sweep(2)
def test_two_killed_ranks_change_no_bit_or_all_are_told(redundancy, first):
    went_on = told = 0
    for seed in range(first, first + 15):
        chosen = random.Random(seed)
        faults = [Fault("is killed", rank, chosen.randrange(300)) for rank in chosen.sample(range(5), 2)]
        run = train(seed, 5, faults, redundancy)
        errors = {error[:2] for rank, error in run.errors.items() if rank not in struck(run)}
        if was_too_early(run):
            continue
        if errors and len(run.struck) == 2:
            assert run.reason == 0, run.story
            ((kind, text),) = errors
            assert kind == "CheckpointError", run.story
            assert text.endswith("start again from the newest checkpoint"), run.story
            assert any(f"{rank}.0" in text for rank in struck(run)), run.story
            told += 1
        else:
            sizes = agrees_with_the_unsharded_module(run, set(range(5)) - struck(run))
            went_on += sizes[-1] == 3
    assert went_on > 4
    assert told > 1


@pytest.mark.parametrize(("size", "redundancy"), [(3, "parity"), (4, "buddy")])
def test_a_rank_that_is_killed_after_a_failed_world_costs_one_more_step(size, redundancy):
    at_begin = [(3, 1, "loses a connection"), (3, 2, "is killed")]
    run = simulated(elastic_programs.train, size, 1, size, redundancy, (), 0.05, (), None, at_begin, limit=300.0)
    sizes = agrees_with_the_unsharded_module(run, set(range(size)) - {2})
    assert sizes == [size] * 2 + [size - 1] * 4


@pytest.mark.parametrize("redundancy", ["parity", "buddy"])
def test_worlds_that_fail_one_after_another_keep_no_copy_more(redundancy):
    at_begin = [(3, 1, "loses a connection")] * 2
    run = simulated(elastic_programs.train, 4, 1, 4, redundancy, (), 0.05, (), None, at_begin, limit=300.0)
    assert agrees_with_the_unsharded_module(run, set(range(4))) == [4] * 6


@pytest.mark.parametrize("first", [15, 0])
@pytest.mark.sweep(1)
def test_processes_that_join_change_no_bit(first):
    most, joined = 0, 0
    for seed in range(first, first + 15):
        chosen = random.Random(seed)
        size, joiners = chosen.choice([3, 4]), chosen.choice([1, 2])
        joins = [(size + i, chosen.uniform(0.0, 0.5)) for i in range(joiners)]
        faults = [Fault("is killed", chosen.randrange(size + joiners), chosen.randrange(POINTS))][: seed % 2]
        run = train(seed, size, faults, joins=joins)
        if was_too_early(run):
            continue
        sizes = agrees_with_the_unsharded_module(run, set(range(size + joiners)) - struck(run))
        most, joined = max(most, *sizes), joined + (max(sizes) > size)
    assert most == (6 if first else 5)
    assert joined > 5


@pytest.mark.parametrize("second", [0.2, 0.22, 0.25, 0.3])
def test_the_step_of_a_loss_waits_for_no_new_process(second):
    run = simulated(elastic_programs.train, 4, 1, 3, "parity", [(2, second)], 0.05, [(3, 2, "is killed")], limit=300.0)
    assert agrees_with_the_unsharded_module(run, {0, 1, 3}) == [3, 3, 3, 2, 3, 3]


@pytest.mark.parametrize("first", [1, 0])
@pytest.mark.sweep(1)
def test_a_stopped_rank_is_replaced(first):
    replaced, chosen = 0, random.Random(0)
    drawn = [(chosen.randrange(3), chosen.randrange(POINTS)) for _ in range(20)]
    at_end = [(rank, point) for point in (202, 204, 206) for rank in range(3)]  # the others end without it meanwhile
    for seed, (rank, point) in [*enumerate([*drawn, *at_end])][first::2]:
        run = train(seed, 3, [Fault("is stopped", rank, point, 3 * HEARTBEAT)])
        if was_too_early(run):
            continue
        if not run.struck or not run.errors:
            agrees_with_the_unsharded_module(run, {0, 1, 2})
            continue
        (stopped,) = struck(run)
        kind, text, _ = run.errors.pop(stopped)
        assert kind == "Replaced", run.story
        assert f"{stopped}.0 was replaced in epoch" in text, run.story
        agrees_with_the_unsharded_module(run, {0, 1, 2} - {stopped})
        replaced += 1
    assert replaced > 5


def test_an_error_of_user_code_passes():
    for seed in range(10):
        chosen = random.Random(seed)
        size = chosen.choice([2, 3])
        fault = Fault("raises in user code", chosen.randrange(size), chosen.randrange(elastic_programs.UNTIL))
        run = train(seed, size, [fault])
        checkers.nobody_waits_for_ever(run)
        assert run.errors[fault.rank][0] == "UserError", run.story
        assert set(run.errors) == set(range(size)), run.story
        for _, text, _ in checkers.told(run).values():
            assert text.startswith(f"rank {fault.rank} has raised an error of its own"), run.story
