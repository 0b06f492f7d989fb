"""Ranks of a real elastic job are killed at points of the loop, of recovery and of joining (tests/elastic/kills.py).

Oracle: the unsharded module, which gives each rank's loss in each step, and each checkpoint that is left.
``python -m tests.elastic.kills`` plays it at random points.

Promises:
- one rank, one of each group, one in the recovery of another, one that joins, and one as another joins are killed: the
  others train on; two of one group are killed: all ranks end with the error that names the newest checkpoint:
  `test_killed_ranks`
- what is wrong in a job is noticed: `test_what_is_wrong_is_noticed`
- a rank that goes through 50 worlds grows by less than 1 MiB in each, and by no thread and no open file:
  `test_a_rank_does_not_grow`
- random orders come to each phase: `test_random_orders_come_to_each_phase`
"""

import copy
import random

import pytest

from tests.elastic import kills
from tests.elastic.kills import strike

ORDERS = [
    ("two groups", [strike(0, "reduce", 1, 0.5), strike(3, "reduce", 1, 0.7)]),
    ("recovery", [strike(1, "load", 0, 0.5), strike(2, "recover enter", 0, 0.5), strike(1, "join enter", 0, 0.5)]),
    ("growth", [strike(3, "save", 0, 0.5), strike(0, "grow find_state", 0, 0.5)]),
    ("one group", [strike(1, "step", 0, 0.9), strike(3, "recover find_state", 0, 0.1)]),
]
NOISE = "[rank1]: RuntimeError: Connection reset by peer"


@pytest.fixture(scope="module")
def job():
    return kills.play(ORDERS, "buddy")


@pytest.mark.multiprocess
def test_killed_ranks(job):
    assert not job.problems, "\n".join([*job.problems, *job.errors])
    assert [len(struck) for _, struck in sorted(job.struck.items())] == [2, 3, 2, 2]
    assert job.status == 1
    rows = kills.table([job])[2:]
    assert [row.split(" | ")[-1] for row in rows] == ["trained on 1 |"] * 3 + ["clear end 1 |"], rows


@pytest.mark.multiprocess
def test_what_is_wrong_is_noticed(job):
    def problems(**changes):
        changed = copy.copy(job)
        vars(changed).update(changes)
        return changed.check()

    assert not problems()
    middle = [one for one in job.steps if one[0] == job.steps[-1][0] // 2]
    step, size, rank, epoch, begin, loss, member = max(middle, key=lambda one: one[3])  # not one that was repeated
    another = problems(steps=[*job.steps, (step, size, rank, epoch, begin, loss + 1, member)])
    assert another == [f"step {step}: rank {rank} has the loss {loss + 1}, expected {loss}"]
    for steps in (
        [one for one in job.steps if one[0] != step],
        [*job.steps, (step, size + 1, rank, epoch, begin, loss, member)],
    ):
        assert "was done by worlds of the sizes" in problems(steps=steps)[0]
    [(name, (of, then), params), *_] = job.saved
    assert problems(saved=[(name, [of, then], params + 1)]) == [f"wrong bits in {name}, of step {of} in epoch {then}"]
    assert "status 0, but two ranks of one group were lost" in problems(status=0)
    assert problems(errors=[*job.errors, NOISE])[0].startswith("errors: ")
    assert problems(errors=[]) == ["status 1, and no error that says what to do"]
    assert problems(hangs="it hangs") == ["it hangs"]


@pytest.mark.multiprocess
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_rank_does_not_grow():
    source = random.Random("a rank does not grow")
    job = kills.play([kills.draw(source, "parity", spared=0) for _ in range(55)], "parity")
    assert not job.problems, "\n".join([*job.problems, *job.errors])
    (size, threads, files), worlds = kills.growth(job, "0.0")
    assert worlds >= 50
    assert size < 2**20
    assert abs(threads) < 0.1
    assert abs(files) < 0.1


def test_random_orders_come_to_each_phase():
    source = random.Random("orders")
    drawn = [kills.draw(source, redundancy) for redundancy in ("parity", "buddy") for _ in range(2000)]
    phases = {strike["phase"] for _, strikes in drawn for strike in strikes}
    assert phases == {*kills.LOOP, *kills.RECOVERY, *kills.JOINING, *kills.GROWTH}
    assert {way for way, _ in drawn} == {"one", "two groups", "recovery", "one group", "joining", "growth"}
    spared = [kills.draw(source, "buddy", spared=0) for _ in range(500)]
    assert not any(strike["slot"] == 0 for _, strikes in spared for strike in strikes)
