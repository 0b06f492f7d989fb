"""Simulated ranks that are processes: they exit, crash and are killed for real, in virtual time, from a seed.

Promises:
- a seed gives the same run again, in another process too, and the run that ranks give which are threads:
  `test_the_same_seed_gives_the_same_run`, `test_ranks_that_are_processes_do_what_threads_do`
- the store and the backend behave across processes as TCPStore and gloo: `test_processes_behave_as_gloo`
- whether a rank is killed, exits, crashes or raises, the others are told alike and in time, and its process is gone:
  `test_the_others_are_told_how_a_process_has_ended`, `test_real_endings_are_told_in_the_simulation_too`
- random training programs, half of them with faults, compute what the unsharded module does, on processes too:
  `test_random_programs_train_on_processes`
"""

import atexit
import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from flatparam.fsdp.errors import OrderError
from tests.fsdp.desync import test_fsdp_lost_ranks as lost_ranks
from tests.simulation import checkers, faulty_programs, process, training
from tests.simulation.conformance_table import ROWS, differences
from tests.simulation.conformance_words import DIED, STOPPED
from tests.simulation.faults import HEARTBEAT, KINDS, USER, Fault
from tests.simulation.process import SimulatedError, simulated
from tests.simulation.programs import draw

pytestmark = pytest.mark.multiprocess

SEEDS = 8
LATE = 2  # the reason of a run that has reached its limit


def forked(program, *args, **options):
    """Run on processes. What Python takes down at their end, most tests do not need."""
    return simulated(program, *args, **{"forked": True, "finalized": False, **options})


def story_of(run):
    """Without the process numbers, which are the kernel's, and places in sources."""
    return re.sub(r"(rank \d+) \(\d+\)|in /\S*, line \d+", r"\1", run.story)


def alike(run):
    """What two runs must have in common."""
    return run.digest, run.steps, run.seconds, story_of(run), run.statuses


def test_the_same_seed_gives_the_same_run():
    faults = [Fault("is killed", 2, 40)]
    runs = [forked(faulty_programs.train, 4, 3, faults=faults) for _ in range(3)]
    server = process._Server()  # another one, which has run nothing
    try:
        arguments = __name__, faulty_programs.__name__, "train", 4, 3, (), {"faults": faults, "forked": True}
        runs.append(server.ask(__name__, process.__name__, "_run", arguments[1:], 120.0))
    finally:
        server.close()
    runs[-1] = SimpleNamespace(**runs[-1])
    assert len({str(alike(run)) for run in runs}) == 1, [run.story for run in runs]
    assert alike(forked(faulty_programs.train, 4, 4, faults=faults)) != alike(runs[0])


def test_a_training_gives_the_bits_of_the_unsharded_module():
    run = simulated(faulty_programs.train, 4, 1, forked=True)  # with all that Python does at the end
    assert run.statuses == dict.fromkeys(range(4), 0), run.outputs
    for rank in range(4):
        assert all(map(torch.equal, run.results[rank], faulty_programs.unsharded(4))), run.story


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sweep(3)
def test_ranks_that_are_processes_do_what_threads_do(kind):
    """Threads that share the GIL give it up even if their rank is stopped. A training does not touch the disk."""
    seconds = {"is stopped": 2 * HEARTBEAT, "is late": 0.5}.get(kind, 0.0)
    faults = [Fault(kind, 1, 5 if KINDS[kind][0] == USER else 33, seconds)]
    ours, threads = (simulate(faulty_programs.train, 3, 5, faults=faults) for simulate in (forked, simulated))
    assert story_of(ours) == story_of(threads)
    assert seconds or ours.digest == threads.digest
    for rank, result in threads.results.items():
        assert all(map(torch.equal, ours.results[rank] or [], result or []))
    assert ours.statuses == {rank: -9 if rank not in ours.ended else int(rank in ours.errors) for rank in range(3)}


def program_of(rank, i):
    """Run a program of the table, then live on until each rank has its facts."""
    facts = ROWS[i].program()
    time.sleep(60.0)
    return facts


# Facts that differ, by row. Ranks add in their order; processes read inputs at once, and write outputs at the wait
UNLIKE_GLOO = {"sums, ": "all_reduce in order", "when read": ", (before the wait|after): "}


@pytest.mark.parametrize("i", range(len(ROWS)), ids=lambda i: ROWS[i].id)
@pytest.mark.sweep(12)
def test_processes_behave_as_gloo(i):
    row = ROWS[i]
    run = forked(program_of, row.world_size, i, i, host=0)
    assert run.reason == int(row.processes), run.stacks  # what is stopped for ever is stuck
    assert not run.errors, next(iter(run.errors.values()))[2]
    lost = {rank: DIED if rank in run.statuses else STOPPED for rank in range(row.world_size)}
    told = differences(row, [run.results.get(rank, lost[rank]) for rank in range(row.world_size)])
    unlike = next((words for name, words in UNLIKE_GLOO.items() if row.id.startswith(name)), None)
    assert [line for line in told if unlike is None or not re.search(unlike, line)] == []


def say_at_exit(seconds):
    time.sleep(seconds)
    dist.distributed_c10d._get_default_store().set("rank 1", "says good-bye")


def exit_after_an_error(status):
    try:
        raise ValueError("batch 17 is bad")
    except ValueError:
        sys.exit(status)


def fail():
    raise ValueError("batch 17 is bad")


GONE = r"the process of rank 1 \(\d+\) has ended without a word: killed, or done"
RAISED = r"rank 1 has raised an error of its own in .* and has ended: ValueError: batch 17 is bad"
FINISHED = r"rank 1 has finished, and comes to no collective any more: .* or it has called sys\.exit\(\), see its"
ENDINGS = {  # how rank 1 ends: its status, and what the others are told
    "is killed by itself": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL, GONE),
    "is killed by rank 0": (lambda: time.sleep(1000.0), -signal.SIGKILL, GONE),
    "os._exit(3)": (lambda: os._exit(3), 3, GONE),
    "os.abort()": (os.abort, -signal.SIGABRT, GONE),
    "reads no memory": (lambda: ctypes.string_at(0), -signal.SIGSEGV, GONE),
    "raises": (fail, 1, RAISED),
    "sys.exit(0)": (lambda: sys.exit(0), 0, FINISHED),
    # Python tells the functions of atexit of no SystemExit, and of no status
    "sys.exit(3)": (lambda: sys.exit(3), 3, FINISHED),
    "sys.exit(3) in the handler of an error": (lambda: exit_after_an_error(3), 3, FINISHED),
}


def end(rank, how):
    """Rank 1 ends as ``how``; what the others are told, after how many seconds, and whether its process is there."""
    model, processes = faulty_programs.wrapped("FULL_SHARD"), [None] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    model(faulty_programs.batch(0, rank)).sum().backward()
    dist.barrier()
    began = time.monotonic()
    if rank == 1:
        ENDINGS[how][0]()
    if rank == 0 and how == "is killed by rank 0":
        os.kill(processes[1], signal.SIGKILL)
        assert not Path(f"/proc/{processes[1]}").exists()
    with pytest.raises(OrderError) as error:
        model(faulty_programs.batch(1, rank)).sum().backward()
    took = time.monotonic() - began
    with contextlib.suppress(ProcessLookupError):
        time.sleep(5.0)  # Python ends
        os.kill(processes[1], 0)
        raise AssertionError("the process is there")
    return str(error.value), took


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.sweep(4)
def test_the_others_are_told_how_a_process_has_ended(how):
    _, status, text = ENDINGS[how]
    run = simulated(end, 4, 2, how, forked=True)
    assert run.reason == 0, run.stacks
    assert run.statuses == {0: 0, 1: status, 2: 0, 3: 0}, run.outputs
    assert set(run.results) == {0, 2, 3}, run.story
    (told,) = {told for told, _ in run.results.values()}
    assert re.match(text, told), told
    assert all(took <= checkers.AT_ONCE for _, took in run.results.values()), run.results


def run_in(environment, *arguments):
    os.environ.update(environment)
    dist.set_debug_level_from_env()
    return process._run(*arguments)


def lose(rank, how, who):
    """The program of test_fsdp_lost_ranks.py; what it notes is printed."""
    lost_ranks.meet_in_a_server = lambda: None
    lost_ranks.note = lambda text: print(f"noted: {text}", flush=True)
    lost_ranks.lose(how, who)


@pytest.mark.parametrize(("how", "who", "debug"), lost_ranks.LOST)
@pytest.mark.sweep(3)
def test_real_endings_are_told_in_the_simulation_too(how, who, debug):
    environment = {"TORCH_DISTRIBUTED_DEBUG": debug, "FLATPARAM_HEARTBEAT": "2" if how.startswith("stops") else "10"}
    given = __name__, "lose", 3, 1, (how, who), {"host": 0, "limit": 60.0, "forked": True}
    run = SimpleNamespace(**process.ask(__name__, run_in, environment, *given))
    assert run.reason == 0, run.stacks
    told = {}
    for rank in range(3):
        if rank != who or how == "does another thing":
            assert run.statuses[rank] == 3, run.outputs[rank]
            told[rank], seconds, _ = json.loads(run.outputs[rank].rpartition("noted: ")[2].partition("\n")[0])
            assert seconds < (6.0 if how.startswith("stops") else checkers.AT_ONCE), told
    assert re.search(lost_ranks.LOST[how, who, debug], told[1 if who == 0 else 0]), told
    assert (how, who) == ("dies", 0) or len(set(told.values())) == 1, told


class Left:
    def __del__(self, write=os.write):  # modules have no more names then
        write(1, b"taken down\n")


def end_slowly(rank):
    """Rank 1 ends while a thread of it sleeps, another waits for ever, and functions of ``atexit`` are left."""
    if rank == 1:
        atexit.register(say_at_exit, 3.0)
        threading.Thread(target=time.sleep, args=(1.0,)).start()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        sys.left = Left()
        return None
    dist.distributed_c10d._get_default_store().wait(["rank 1"])
    began = time.monotonic()
    dist.all_reduce(torch.ones(1))
    return began


@pytest.mark.parametrize("finalized", [True, False])
def test_a_process_ends_as_python_does_while_the_others_wait(finalized):
    run = simulated(end_slowly, 3, 1, forked=True, finalized=finalized)
    assert run.reason == 0, run.stacks
    assert run.statuses == {0: 1, 1: 0, 2: 1}, run.outputs  # gloo has lost it
    assert run.ended[1] == pytest.approx(4.0, abs=0.1)
    for rank in (0, 2):
        assert run.raised[rank] - run.ended[1] < 0.1, run.story
        assert "Connection closed by peer" in str(run.errors[rank]), run.story
    assert run.outputs[1] == "taken down\n" * finalized


def wait_for_ever(rank):
    print(os.getpid(), flush=True)
    if rank == 1:
        threading.Event().wait()


def test_a_rank_that_waits_for_ever_is_shown_and_its_process_ended():
    run = forked(wait_for_ever, 2, limit=30.0)
    assert run.reason == LATE  # its thread that answers other ranks goes on
    assert run.statuses == {0: 0}
    assert "in wait_for_ever" in run.stacks
    for rank in range(2):
        assert not Path(f"/proc/{run.outputs[rank].split()[0]}").exists()


def test_random_programs_train_on_processes():
    first = 0
    while first < SEEDS:
        *_, (last, _, _, error) = process.ask(training.__name__, training.play_seeds, first, SEEDS, "forked")
        assert error is None, (last, error)
        first = last + 1


def test_a_random_program_on_processes_has_the_digests_of_threads():
    seed = next(seed for seed in range(100) if len(draw(seed, "forked")["phases"]) == 2)
    program = draw(seed, "forked")
    ours, threads = (process.ask(training.__name__, training.play, program, forked) for forked in (True, False))
    assert ours == threads


def test_processes_have_no_device():
    with pytest.raises(SimulatedError, match="unexpected keyword argument 'device'"):
        simulated(end_slowly, 2, device="others", forked=True)
