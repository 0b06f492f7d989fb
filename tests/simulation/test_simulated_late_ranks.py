"""Ranks that live, and come late or not at all to a collective of a unit that is built: all are told which.

Promises:
- a rank that builds a unit while others live and do not is told which, one time-out and 2 s later:
  `test_ranks_that_do_not_come_are_named`
- a rank that comes after the time-out, and those that waited for it, raise one text:
  `test_a_rank_that_comes_too_late_is_named_on_all_ranks`
- a rank that has raised in an unpickled model does not come: the others are told its exception after 2 s, though no
  trace records the collectives of the first unit that is built over a group:
  `test_a_rank_that_has_raised_in_an_unpickled_model_is_told_to_those_who_build`
"""

import contextlib
import time

import pytest
import torch
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


def write_a_model(rank, folder):
    torch.save(FSDP(nn.Sequential(FSDP(nn.Linear(4, 4)))), f"{folder}/{rank}.pt")


def build_beside_an_unpickled_model(rank, folder):
    """Rank 1 raises behind the last collective of a forward, lives on, and does not come to build a unit."""
    model = torch.load(f"{folder}/{rank}.pt", weights_only=False)

    def fail(*args):
        raise ValueError("batch 17 is bad")

    if rank == 1:
        model.module.register_forward_hook(fail)
    with torch.no_grad(), contextlib.suppress(ValueError):
        model(torch.ones(2, 4))
    return build(rank, [0, None, 0])


def results(delays):
    return results_of(build, len(delays), delays)


def results_of(program, size, *arguments):
    run = simulated(program, size, 0, *arguments, timeout=TIME_OUT)
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


def test_a_rank_that_has_raised_in_an_unpickled_model_is_told_to_those_who_build(tmp_path):
    results_of(write_a_model, 3, str(tmp_path))
    found = results_of(build_beside_an_unpickled_model, 3, str(tmp_path))
    for kind, text, seconds in (found[0], found[2]):
        assert kind == "OrderError"
        assert text.startswith("rank 1 has raised an error of its own "), text
        assert "has not gone on since: ValueError: batch 17 is bad" in text
        assert 2.0 <= seconds <= 4.0
