"""``torchrun --max-restarts 0 ... -m flatparam.elastic script.py``: run a training process, and a new one if it dies.

torchrun ends the whole job when one of its workers ends with an error. So its worker is this small process, the
launcher, which is the parent of the training process. If the training process is killed, or an epoch goes on without
it, the launcher forks another one, which joins the training. The launcher has imported torch and flatparam, and made
nothing with them but a connection to the job's store. So a new process starts at once, and has no state of the one
before.
"""

import argparse
import contextlib
import ctypes
import functools
import math
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..common.warned import warn_user
from ..fsdp.desync.liveness import begin_process, heartbeat
from ..fsdp.desync.stores import Store
from ..fsdp.errors import StateError, StoreGoneError
from . import training  # noqa: F401
from .epochs import MEMBER, REPLACED, Epoch, Epochs, store_of_job

_PR_SET_PDEATHSIG = 1
_GRACE = 5.0  # seconds for the training process to end after a signal
_MOST_GRACE = 25.0  # at the job's end: after 30 torchrun kills this process, but not those that the script has started
_LOOKING = 1.0  # seconds from one look at the epochs to the next
_CHANGES = os.WNOHANG | os.WSTOPPED | os.WCONTINUED
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main(arguments: list[str] | None = None) -> int:
    """Run the launcher. ``arguments``: of the command line; None: the process's. Returns: the exit status."""
    parser = argparse.ArgumentParser(
        prog="torchrun --max-restarts 0 ... -m flatparam.elastic",
        description="Run a script that trains with flatparam.elastic. If its process is killed, the other ranks go on, "
        "and a new process joins them.",
    )
    parser.add_argument(
        "--max-joins", type=int, default=10, metavar="N", help="new processes for this rank; 0: none (default: 10)"
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(arguments)
    if given.max_joins < 0:
        parser.error(f"--max-joins: expected 0 or more, got {given.max_joins}")
    if "RANK" not in os.environ:
        parser.error("the environment has no RANK: start it with torchrun")
    if _may_lose_no_machine():
        warn_user(
            "flatparam.elastic: torchrun ends the job when a machine is lost, as its rendezvous is c10d: start it with "
            "`--rdzv-backend static --node-rank ... --master-addr ...` on each machine",
            (),
        )
    return _Slot(os.environ["RANK"], [given.script, *given.args]).run(given.max_joins)


def _may_lose_no_machine() -> bool:
    """Whether torchrun, which has started this process, has several agents that meet over c10d.

    If one of them is lost then, the others end the job.
    """
    given: list[str] = []
    with contextlib.suppress(OSError):
        given = os.fsdecode(Path(f"/proc/{os.getppid()}/cmdline").read_bytes()).replace("=", "\0").split("\0")
    ours = given.index("flatparam.elastic") if "flatparam.elastic" in given else 0
    is_dynamic = "c10d" in [*given[:ours], os.environ.get("PET_RDZV_BACKEND")]
    return is_dynamic and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1


def _signal_name(number: int) -> str:
    """Return the name of a signal. Real-time signals have none."""
    return next((one.name for one in signal.Signals if one == number), f"signal {number}")


class _Slot:
    """The place of one rank, in which one process runs after another. ``argv``: the script and its arguments."""

    def __init__(self, slot: str, argv: list[str]):
        self._slot, self._slots, self._argv = slot, int(os.environ["WORLD_SIZE"]), argv
        self._child, self._stopped = 0, math.inf
        # whether to look into the job's store: unless torchrun keeps it, a training process does, and may end
        self._watches, self._has_failed = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", False

    def run(self, joins: int) -> int:
        """Run the children one after another. ``joins``: how many more than the first.

        Returns: in a child the script's exit status, which is 0; in the launcher that of the last child, or 0 if that
        was killed, or replaced, and the job has ended well without it. Raises: StateError, StoreGoneError.
        """
        for number in _ENDING:
            signal.signal(number, self._pass_on)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        for life in range(joins + 1):
            member = f"{self._slot}.{life}"
            if self._fork():
                return self._run_script(member)
            status, why = self._wait(member)
            if not why:
                return status
            is_dropped = self._look(self._drops(member).__next__)
            if status < 0 and not is_dropped and self._epochs(member).has_left():
                return 128 - status  # killed after the loop: the rest of the script was not run
            print(f"flatparam.elastic: {why}", file=sys.stderr, flush=True)
            self._epochs(member).end(member, why)
        self._epochs(member).wait_to_join(self._slots)  # to the job's end, as this process has not asked to join
        return 0

    def _fork(self) -> bool:
        """Fork. Returns: whether this is the new process; the system kills that when its parent ends."""
        parent = os.getpid()
        self._stopped = math.inf
        self._child = os.fork()
        with contextlib.suppress(OSError):  # in both processes, as either may be first
            os.setpgid(self._child, 0)
        if self._child == 0:
            for number in _ENDING:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        return self._child == 0

    def _wait(self, member: str) -> tuple[int, str]:
        """Wait for the child. End it if an epoch goes on without it, or if it is stopped when the job has ended.

        Returns: its exit status, or that of the job; why another process is to follow, or nothing.
        """
        drops = self._drops(member)
        while True:
            code = self._status()
            if code is not None and code < 0:
                return code, f"{member} was killed by {_signal_name(-code)}"
            if code == REPLACED and not self._watches:
                return code, f"{member} was replaced"
            if code != 0 and (epoch := self._look(lambda: next(drops))):
                self._end(signal.SIGTERM)
                return REPLACED, f"{member} was replaced in epoch {epoch.number}: {epoch.reason}"
            if code == 0:
                self._look(lambda: self._epochs(member).finish())  # the loop may have been left early
            if code is not None:
                return code, ""
            is_long = time.monotonic() - self._stopped > (heartbeat() or math.inf)
            if is_long and (self._look(lambda: self._epochs(member).wait_for_end(0.0)) or self._has_failed):
                self._end(signal.SIGTERM)
                return int(self._has_failed), ""
            signal.sigtimedwait([signal.SIGCHLD], _LOOKING)

    def _drops(self, member: str) -> Iterator[Epoch | None]:
        yield from self._epochs(member).drops(self._slots)  # a generator: connects to the store at the first look

    def _look(self, at: Callable[[], Any]) -> Any:
        """Return ``at()``, which reads the job's store; None where no agent keeps it, and once it has failed."""
        try:
            return at() if self._watches else None
        except (StateError, StoreGoneError):
            self._watches, self._has_failed = False, True
            return None

    def _status(self) -> int | None:
        """Return the exit status of the child; None while it runs. Notes when it was stopped."""
        with contextlib.suppress(ChildProcessError):  # it has ended
            while found := os.waitid(os.P_PID, self._child, _CHANGES):
                self._stopped = time.monotonic() if found.si_code == os.CLD_STOPPED else math.inf
        return self._end_status()

    def _end_status(self) -> int | None:
        """Return the exit status of the child; None while it runs or is stopped. If it was killed, kill its group."""
        found = os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        if found.si_code != os.CLD_EXITED:
            # Its data loaders: they hold the connections that the others wait for. After waitpid() another process
            # group may have the number
            self._signal(signal.SIGKILL)
        status = os.waitpid(self._child, 0)[1]
        self._child = 0
        return os.waitstatus_to_exitcode(status)

    def _run_script(self, member: str) -> int:
        begin_process()
        os.environ[MEMBER] = member
        sys.argv = self._argv
        sys.path[0] = os.path.dirname(os.path.abspath(self._argv[0]))
        runpy.run_path(self._argv[0], run_name="__main__")
        return 0

    def _signal(self, number: int) -> None:
        """Send a signal to the child's process group: the child, and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child, number)

    def _end(self, number: int, grace: float = _GRACE) -> None:
        """End the child by the signal ``number``, also if it is stopped; after ``grace`` seconds by SIGKILL."""
        end = time.monotonic() + grace
        with contextlib.suppress(ChildProcessError):  # ``_wait`` has just seen its end
            while self._child and self._end_status() is None:
                if number:
                    self._signal(number)
                number = 0 if time.monotonic() < end else signal.SIGKILL  # once: a handler of the script may take long
                os.kill(self._child, signal.SIGCONT)
                time.sleep(0.05)
        self._child = 0

    def _pass_on(self, number: int, frame: object) -> None:
        """The job ends: end the child, and this process, by the same signal."""
        for one in _ENDING:  # torchrun, and perhaps the scheduler, send several signals: the script gets one
            signal.signal(one, signal.SIG_IGN)
        self._end(number, _MOST_GRACE)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _epochs(self, member: str) -> Epochs:
        """Return the epochs of the job, seen by ``member``. The store is connected to at the first call."""
        return Epochs(self._store, member)

    @functools.cached_property
    def _store(self) -> Store:
        return store_of_job()


if __name__ == "__main__":
    sys.exit(main())
