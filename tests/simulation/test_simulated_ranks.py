"""Simulated ranks give what real ones give: results, failures, random numbers, warnings and messages of their own.

Promises:
- a function gives the same on simulated ranks as on real processes: `test_simulated_ranks_give_what_processes_give`
"""

import ctypes
import os
import signal
import warnings

import gloo
import pytest
import torch
import torch.distributed as dist
from simulated_ranks import simulate_ranks

pytestmark = pytest.mark.multiprocess


def numbers(seed):
    """Random numbers of this rank, among collectives at which ranks take turns."""
    torch.manual_seed(seed + dist.get_rank())
    found = []
    for _ in range(5):
        found.append(torch.randn(3))
        dist.barrier()
        found.append(torch.nn.functional.dropout(torch.ones(20)))
    return found


def sums(numbers_given):
    numbers_given.append(dist.get_rank())  # each rank has a copy
    total = torch.tensor([float(sum(numbers_given))])
    dist.all_reduce(total)
    return numbers_given, total, dist.get_world_size()


def told_warnings():
    """Each rank warns as often as its number says, and has a filter of its own meanwhile."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always" if dist.get_rank() != 1 else "ignore")
        for i in range(dist.get_rank() + 1):
            dist.barrier(group=dist.new_group([dist.get_rank()], use_local_synchronization=True))
            warnings.warn(f"warning {i} of rank {dist.get_rank()}", stacklevel=1)
    dist.barrier()
    with pytest.warns(UserWarning, match=f"another of rank {dist.get_rank()}"):
        warnings.warn(f"another of rank {dist.get_rank()}", stacklevel=1)
    return [str(each.message) for each in told]


def said():
    if dist.get_rank() == 0:
        return [gloo.say("first"), gloo.say("first"), gloo.wait_until_said("answer"), "done"][-1]
    return [gloo.wait_until_said("first"), gloo.wait_until_said("first"), gloo.say("answer"), "done"][-1]


def from_the_environment():
    return os.environ["OF_THIS_TEST"], dist.get_debug_level().name


CASES = [
    (numbers, 3, (7,), None),
    (sums, 4, ([10, 20],), None),
    (told_warnings, 3, (), None),
    (said, 2, (), None),
    (from_the_environment, 1, (), {"OF_THIS_TEST": "value", "TORCH_DISTRIBUTED_DEBUG": "INFO"}),
]


@pytest.mark.parametrize(("fn", "size", "args", "environment"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_simulated_ranks_give_what_processes_give(fn, size, args, environment):
    ours = simulate_ranks(fn, size, *args, environment=environment)
    real = gloo.run_ranks(fn, size, *args, environment=environment)
    assert str(ours) == str(real)


def raise_on(rank):
    gloo.note(f"about to meet as {dist.get_rank()}")
    print(f"printed by {dist.get_rank()}", flush=True)
    if dist.get_rank() == rank:
        raise ValueError("of this test")
    dist.barrier()


def test_a_failure_tells_the_error_the_note_and_the_output():
    with pytest.raises(gloo.RankFailure) as failure:
        simulate_ranks(raise_on, 2, 1)
    told = str(failure.value)
    assert "ValueError: of this test" in told
    assert "in raise_on" in told
    assert "rank 1 ended with an error; it was doing: about to meet as 1" in told
    assert "printed by 0" in told


def wait_for_nobody():
    if dist.get_rank() == 0:
        gloo.wait_until_said("never")


def die():
    os.abort()


def test_a_rank_that_waits_for_ever_or_dies_is_a_failure():
    with pytest.raises(gloo.RankFailure, match=r"rank 0 did not end in time(?s:.*)in wait_until_said"):
        simulate_ranks(wait_for_nobody, 2, timeout=5.0)
    with pytest.raises(gloo.RankFailure, match="died with status"):
        simulate_ranks(die, 2)


def interrupt(*_):
    raise TimeoutError


def sleep_for_long():
    ctypes.CDLL(None).syscall(35, (ctypes.c_long * 2)(60, 0), None)  # nanosleep of the kernel: in real time


def test_a_run_that_is_given_up_leaves_no_answer_behind():
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    try:
        with pytest.raises(TimeoutError):
            simulate_ranks(sleep_for_long, 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
    assert simulate_ranks(dist.get_rank, 2) == [0, 1]
