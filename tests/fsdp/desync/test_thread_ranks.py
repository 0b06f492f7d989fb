"""Ranks that are threads of one process, each with its own world: the state that one changes is not another's.

Promises:
- the end of a rank, its error and its destroyed world concern its world alone:
  `test_the_end_of_a_rank_is_told_to_its_world`, `test_a_destroyed_world_finishes_no_other`,
  `test_a_destroyed_world_leaves_the_beginning_of_others`
- a rank that goes on withdraws its own report of an exception, and no other's:
  `test_a_rank_that_goes_on_withdraws_no_report_of_another`
- a rank whose backward fails reports that in its own name alone: `test_a_backward_that_fails_is_reported_by_its_rank`
"""

import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from thread_ranks import forget_world, in_threads, make_world
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp import OrderError
from flatparam.fsdp.desync import liveness
from flatparam.fsdp.desync.checked_collectives import trace_of, troubled

pytestmark = pytest.mark.multiprocess


def end_one(rank, ranks, how):
    """Rank 1 ends; return what rank 0's board says of it, and what each place in the store ends with."""
    world = dist.group.WORLD
    liveness.enter()
    ranks.meet()

    def place_of(each):
        return ranks.store.get(f"flatparam board/place of {each}").decode()

    def has_ended():
        native = liveness.board().native
        return native.look(0.0, False) and (native.said() or place_of(1).endswith(" finished"))

    if rank == 1:
        error = ValueError("batch 17 is bad")
        if how == "end_rank":
            liveness.end_rank(world, error)
        elif how == "excepthook":
            sys.excepthook(ValueError, error, None)
        else:
            liveness.end_rank(world, None)
    else:
        liveness.wait_until(has_ended, 5.0)
    ranks.meet()
    places = [place_of(each) for each in range(2)]
    said = liveness.board().native.said()
    ranks.meet()
    return said, [place.endswith(" finished") for place in places]


def each_ending(how):
    """Each thread has another process number, as a simulation of processes gives it."""
    main, getpid = threading.main_thread(), os.getpid
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            os, "getpid", lambda: getpid() if threading.current_thread() is main else threading.get_native_id()
        )
        return in_threads(end_one, 2, how)


@pytest.mark.parametrize("how", ["end_rank", "excepthook"])
def test_the_end_of_a_rank_is_told_to_its_world(how):
    """Rank 0's hook would tell rank 1's error as its own if the hook took the last board of the process."""
    ((said, finished), (own, _)) = run_ranks(each_ending, 1, how)[0]
    assert said == {1: "rank 1 has raised an error of its own and has ended: ValueError: batch 17 is bad"}
    assert own == {}
    assert finished == [False, False]


def test_a_rank_that_has_finished_is_no_other():
    _, finished = run_ranks(each_ending, 1, "finish")[0][0]
    assert finished == [False, True]


def destroy_one(rank, ranks):
    """Rank 1 destroys its world; return which places in the store end with " finished"."""
    ranks.meet()
    if rank == 1:
        forget_world()
    ranks.meet()
    places = [ranks.store.get(f"flatparam board/place of {each}").decode() for each in range(2)]
    ranks.meet()
    return [place.endswith(" finished") for place in places]


def test_a_destroyed_world_finishes_no_other():
    assert run_ranks(in_threads, 1, destroy_one, 2)[0] == [[False, True]] * 2


def begin_apart(rank, ranks):
    """Rank 0 destroys its world before rank 1 makes its own; return which ranks rank 1 knows."""
    if rank == 1:
        ranks.meet()
    make_world(rank, 2, ranks.store, connects=False)
    if rank == 1:
        return list(liveness.board().native.entered())
    forget_world()
    ranks.meet()
    return None


def all_beginning_apart():
    return in_threads(begin_apart, 2, has_world=False)


def test_a_destroyed_world_leaves_the_beginning_of_others():
    """Rank 1 began with the process. What rank 0 has said since then is of rank 1's world."""
    assert run_ranks(all_beginning_apart, 1)[0][1] == [0, 1]


def catch_one(rank, ranks):
    """Rank 1 catches an exception in its forward and does not go on; return the message that rank 0's step raises."""
    model = FSDP(nn.Linear(4, 4), check_values=False)  # one generator draws the values of both ranks
    if rank == 1:

        def fail(*args):
            raise ValueError("batch 17 is bad")

        model.module.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="batch 17"):
            model(torch.ones(2, 4))
    else:
        model(torch.ones(2, 4))  # both ranks gather the unit
    ranks.meet()
    if rank == 0:
        with pytest.raises(OrderError) as told:
            model(torch.ones(2, 4)).sum().backward()
        ranks.meet()
        return str(told.value)
    ranks.meet()
    return None


def test_a_rank_that_goes_on_withdraws_no_report_of_another():
    message = run_ranks(in_threads, 1, catch_one, 2)[0][0]
    assert "rank 1 has raised an error of its own" in message
    assert "has not gone on since: ValueError: batch 17 is bad" in message


def fail_one(rank, ranks):
    """A backward of rank 1 fails behind a checkpoint, which may lead to any model; return whether this rank reports."""
    model = FSDP(nn.Linear(4, 4), check_values=False)  # as above
    model(torch.ones(2, 4)).sum().backward()
    ranks.meet()
    if rank == 1:

        def fail(*args):
            raise ValueError("batch 17 is bad")

        loss = checkpoint(torch.tanh, torch.ones(2, requires_grad=True), use_reentrant=True).sum()
        loss.register_hook(fail)
        with pytest.raises(ValueError, match="batch 17"):
            loss.backward()
    ranks.meet()
    reports = trace_of(model.process_group, torch.device("cpu")) in troubled
    ranks.meet()
    return reports


def test_a_backward_that_fails_is_reported_by_its_rank():
    assert run_ranks(in_threads, 1, fail_one, 2)[0] == [False, True]
