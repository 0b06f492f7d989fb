"""Run a program on ranks that are processes, in virtual time, from a seed: a rank may exit, and be killed, for real.

As ``ranks.py``, where ranks are threads. The run's process forks one for each rank; one of them runs at a time. A rank
ends as a script does: by ``sys.excepthook``, ``atexit``, the end of Python, or without them.
"""

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import io
import os
import pickle
import random
import resource
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import _simulated_world as world  # process.py builds it
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from flatparam.fsdp.desync import liveness

from . import ranks
from .faults import Fault, Finished, coming
from .ranks import SECOND, Run, seams

PR_SET_PDEATHSIG = 1

for _name in ("now", "ended_at"):
    getattr(seams, f"fp_sim_{_name}").restype = ctypes.c_int64


class _Report:
    """Files in memory for the facts and the output of a rank. The controller reads them, also after a kill."""

    def __init__(self, rank: int):
        self.said = os.memfd_create(f"said by rank {rank}")
        self.output = os.memfd_create(f"output of rank {rank}", 0)
        self._length = 0

    def say(self, **facts: Any) -> None:
        """``pwrite``: ``write`` would be a point of the simulated disk."""
        self._length += os.pwrite(self.said, pickle.dumps(facts), self._length)

    def read(self) -> tuple[list[dict[str, Any]], str]:
        """Return all facts, and the output. Call it once."""
        facts, file = [], io.BytesIO(_content(self.said))
        with contextlib.suppress(EOFError):
            while True:
                facts.append(pickle.load(file))
        return facts, _content(self.output).decode(errors="replace")


def _content(file: int) -> bytes:
    """Read a file to its end, and close it."""
    try:
        return os.pread(file, os.fstat(file).st_size, 0)
    finally:
        os.close(file)


def simulate(
    program: Callable[[int], Any],
    size: int,
    seed: int = 0,
    *,
    timeout: float = 60.0,
    faults: Sequence[Fault] = (),
    prepare: Callable[[int], Any] = lambda rank: None,
    finalized: bool = True,
    **settings: Any,
) -> Run:
    """Do as ``ranks.simulate``, with the same arguments but the device. Later runs of this process must be forked, too.

    ``finalized``: at the end of a rank Python takes down its modules, too, which lasts 0.3 s and longer.
    """
    seams.fp_sim_share()
    native = ranks.begin_run(size, seed, faults, **settings)
    reports = [_Report(rank) for rank in range(size)]
    lives = [_Rank(rank, size, timeout, report, faults) for rank, report in enumerate(reports)]
    processes = _fork(lives, lambda rank: rank.live(seed, prepare, program, finalized))
    run = Run(size, seams.fp_sim_run(), 0.0, 0, 0)
    left = [rank for rank in range(size) if not ranks.has_ended(rank)]
    for rank in left:  # its output has its stacks then
        os.kill(processes[rank], signal.SIGABRT)
        os.waitpid(processes[rank], 0)
    for rank, report in enumerate(reports):
        _take(run, rank, *report.read(), rank in left)
    ranks.note_end(run, native)
    return run


def _fork(lives: Sequence["_Rank"], live: Callable[["_Rank"], None]) -> list[int]:
    """Fork a process for each rank, which calls ``live`` and does not return from it. Return the process numbers."""
    gc.collect()
    gc.freeze()  # a rank that ends need not look at all that its parent had
    sys.stdout.flush()
    sys.stderr.flush()
    processes = []
    for rank, each in enumerate(lives):
        seams.fp_sim_expect(rank)
        process = os.fork()
        if process == 0:
            live(each)
        seams.fp_sim_born(rank, process)
        processes.append(process)
    return processes


def _take(run: Run, rank: int, facts: list[dict[str, Any]], output: str, is_left: bool) -> None:
    """Note what became of a rank."""
    for each in facts:
        if "fault" in each:
            run.struck[each["fault"]] = each["at"]
        elif "error" in each:
            kind, text, where = each["error"]
            run.errors[rank] = type(kind, (Exception,), {})(text)
            run.errors[rank].add_note(where)
            run.raised[rank], run.points[rank] = each["at"], each["points"]
        else:
            run.results[rank], run.points[rank] = pickle.loads(each["result"]), each["points"]
    run.outputs[rank] = output
    if is_left:
        run.stacks += f"rank {rank}:\n{output}"
        return
    run.statuses[rank] = os.waitstatus_to_exitcode(seams.fp_sim_status(rank))
    if run.statuses[rank] >= 0:
        run.ended[rank] = seams.fp_sim_ended_at(rank) / SECOND


class _Rank:
    """One rank of a run, in its process."""

    def __init__(self, rank: int, size: int, timeout: float, report: _Report, faults: Sequence[Fault]):
        self._rank, self._size, self._report = rank, size, report
        self._faults = {fault.point: fault for fault in faults if fault.rank == rank and fault.native() is None}
        self._patience = datetime.timedelta(seconds=timeout)
        self._points = 0  # of user code

    def live(self, seed: int, prepare: Callable[[int], Any], program: Callable[[int], Any], finalized: bool) -> None:
        """Live when the run has begun, and end the process."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for standard in (1, 2):
            os.dup2(self._report.output, standard)
        faulthandler.enable(file=2)
        for finalizer in weakref.finalize._registry:  # of the controller, such as of its temporary folders
            finalizer.atexit = False
        random.seed(f"{seed} {self._rank}")  # Python gives each process another seed
        coming[:] = [self._come_to_user_code]
        c10d.ProcessGroupGloo = dist.ProcessGroupGloo = ranks._Gloo
        seams.fp_sim_live(self._rank)
        liveness.begin_process()
        status = self._status(prepare, program)
        if finalized:
            ctypes.pythonapi.Py_Exit(status)
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)

    def _status(self, prepare: Callable[[int], Any], program: Callable[[int], Any]) -> int:
        """Run the program as Python runs a script; return the status of the process."""
        try:
            self._report.say(result=pickle.dumps(self._run(prepare, program)), points=self._all_points())
        except Finished:
            self._report.say(result=pickle.dumps(None), points=self._all_points())
        except SystemExit as ends:
            if ends.code is None or isinstance(ends.code, int):
                return (ends.code or 0) & 255
            print(ends.code, file=sys.stderr)
            return 1
        except BaseException as error:
            told = type(error).__name__, str(error), "".join(traceback.format_exception(error))
            self._report.say(error=told, at=ranks.now(), points=self._all_points())
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
            sys.excepthook(type(error), error, error.__traceback__)
            return 1
        return 0

    def _run(self, prepare: Callable[[int], Any], program: Callable[[int], Any]) -> Any:
        ranks.enter_world(self._rank, self._size, self._patience)
        return ranks.run_program(self._rank, self._size, prepare, program)

    def _all_points(self) -> tuple[int, int, int]:
        return seams.fp_sim_points(self._rank), self._points, world.disk_points(self._rank)

    def _come_to_user_code(self) -> None:
        fault = self._faults.get(self._points)
        self._points += 1
        if fault is not None:
            self._report.say(fault=fault, at=ranks.now())
            raise ranks.error_of(fault)
