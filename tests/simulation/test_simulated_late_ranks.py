"""Ranks that live, and come late or not at all to a collective of a unit that is built: all are told which.

Promises:
- a rank that builds a unit while others live and do not is told which, one time-out and 2 s later:
  `test_ranks_that_do_not_come_are_named`
- a rank that comes after the time-out, and those that waited for it, raise one text:
  `test_a_rank_that_comes_too_late_is_named_on_all_ranks`
"""

import time

import pytest
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from tests.simulation.process import simulated

TIME_OUT = 60.0


def build(rank, delays):
    """Build a unit after a delay; return the error and the virtual seconds until then. None: never."""
    if delays[rank] is None:
        time.sleep(4 * TIME_OUT)
        return None
    time.sleep(delays[rank])
    begin, found = time.monotonic(), "built"
    try:
        FSDP(nn.Linear(4, 4))
    except Exception as error:
        found = type(error).__name__, str(error), time.monotonic() - begin
    time.sleep(10)  # its end is no reason
    return found


def results(delays):
    run = simulated(build, len(delays), 0, delays, timeout=TIME_OUT)
    assert run.reason == 0, run.stacks
    assert not run.errors, run.errors
    return run.results


@pytest.mark.parametrize(("size", "absent"), [(2, [1]), (3, [1]), (4, [1, 2])])
def test_ranks_that_do_not_come_are_named(size, absent):
    found = results([None if rank in absent else 0 for rank in range(size)])
    for rank in set(range(size)) - set(absent):
        kind, text, seconds = found[rank]
        assert kind == "OrderError"
        assert text.startswith(f"ranks {absent} live, but came late or not at all to a collective; others waited 60 s")
        assert TIME_OUT <= seconds <= TIME_OUT + 2.5


def test_a_rank_that_comes_too_late_is_named_on_all_ranks():
    found = results([0, TIME_OUT + 1, 0.5])
    assert len({text for _, text, _ in found.values()}) == 1
    assert found[1][1].startswith("ranks [1] live, but came late")


def test_a_rank_that_comes_in_time_is_waited_for():
    assert set(results([0, TIME_OUT - 1, 0.5]).values()) == {"built"}
