"""``torchrun --max-restarts 0 ... -m flatparam.elastic script.py``: run a training process, and a new one if it dies.

torchrun ends the whole job when one of its workers ends with an error. So its worker is this small process, the parent
of the training process. If that is killed, this process forks another one, which joins the training. It has imported
torch and nothing of ``flatparam.fsdp``, so a new process starts at once, and has no state of the one before.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import runpy
import signal
import sys
import time
from typing import TYPE_CHECKING

from .process import MEMBER, REPLACED, signal_name

if TYPE_CHECKING:
    from .epochs import Epochs

_PR_SET_PDEATHSIG = 1
_GRACE = 5.0  # seconds for the training process to end after a signal
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: list[str] | None = None) -> int:
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
    if "RANK" not in os.environ:
        parser.error("the environment has no RANK: start it with torchrun")
    return _Slot(os.environ["RANK"], [given.script, *given.args]).run(given.max_joins)


class _Slot:
    """The place of one rank, in which one process runs after another. ``argv``: the script and its arguments."""

    def __init__(self, slot: str, argv: list[str]):
        self._slot, self._argv = slot, argv
        self._child = 0

    def run(self, joins: int) -> int:
        """Return the exit status: in a child of the script; else of the last child, or of the job if it was killed."""
        for number in _ENDING:
            signal.signal(number, self._pass_on)
        member, why = self._slot, ""
        for life in range(joins + 1):
            member, before = f"{self._slot}.{life}", (f"{self._slot}.{life - 1}", why)
            if self._fork():
                return self._run_script(member, before)
            status = self._wait()
            if status >= 0 and status != REPLACED:
                return status
            why = f"{member} was killed by {signal_name(-status)}" if status < 0 else f"{member} was replaced"
            print(f"flatparam.elastic: {why}", file=sys.stderr, flush=True)
        if self._fork():
            epochs = _epochs(member)
            epochs.end(member, why)
            epochs.wait_to_join(int(os.environ["WORLD_SIZE"]))  # it does not ask, so this is the job's end
            return 0
        return self._wait()

    def _fork(self) -> bool:
        """Whether this is the new process, which ends with its parent."""
        parent = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            for number in _ENDING:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        return self._child == 0

    def _wait(self) -> int:
        """Wait for the child. Returns: its exit status; of a killed one the negative number of the signal."""
        status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        self._child = 0
        return status

    def _run_script(self, member: str, before: tuple[str, str]) -> int:
        os.environ[MEMBER] = member
        if before[1]:
            _epochs(member).end(*before)
        sys.argv = self._argv
        sys.path[0] = os.path.dirname(os.path.abspath(self._argv[0]))
        runpy.run_path(self._argv[0], run_name="__main__")
        return 0

    def _pass_on(self, number: int, frame: object) -> None:
        """The job ends: end the child, and this process, by the same signal."""
        end = time.monotonic() + _GRACE
        with contextlib.suppress(ChildProcessError):  # ``_wait`` has just seen its end
            while self._child and not os.waitpid(self._child, os.WNOHANG)[0]:
                os.kill(self._child, number if time.monotonic() < end else signal.SIGKILL)
                time.sleep(0.05)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _epochs(member: str) -> Epochs:
    """Return the epochs of the job. Not in the parent, which must not import what has a state."""
    from ..fsdp.desync.stores import connect
    from .epochs import Epochs

    return Epochs(connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), member)


if __name__ == "__main__":
    sys.exit(main())
