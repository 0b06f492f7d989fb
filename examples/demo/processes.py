"""The processes of the demo, seen from the parent: started, asked, watched, and ended together.

Each is a session of its own, so that Ctrl-C in a terminal reaches the parent only; each has one socket to the parent,
and a process that ends closes it, which the parent sees at once, also while that process has nothing to do.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from .config import Config
from .messages import RUNS, UNSHARDED, Role

WORKER = "examples.demo.worker"
ANSWER_SECONDS = 300.0  # a command takes a few seconds; a process that says nothing for so long is stuck
KILLED_AFTER_SECONDS = 0.3  # a command that kill() is to interrupt has begun by then
BLAME_SECONDS = 1.0  # how long to look for a killed process behind another one's exception


class DemoFailed(Exception):
    """A process ended, raised or got stuck. The message is one line; ``details`` may be many."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Stopped(BaseException):
    """A signal asked the demo to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def stop_on_signals() -> None:
    """Let SIGINT (Ctrl-C), SIGTERM and SIGHUP raise Stopped, once: a second one does not disturb the end."""

    def stop(signum: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signum)

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, stop)


@dataclass
class Member:
    """One process."""

    role: Role
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path

    @property
    def name(self) -> str:
        """The name of the process in messages."""
        return self.role.run if self.role.run == UNSHARDED else f"{self.role.run} rank {self.role.rank}"


class Team:
    """All processes of all runs; a context manager that leaves none behind.

    Args: ``config``; ``scratch``, a folder for rendezvous files and what the processes write to stderr.
    Raises: DemoFailed, from ``start`` and ``ask``, when any process ends, raises or is silent for too long.
    """

    def __init__(self, config: Config, scratch: Path) -> None:
        self._config = config
        self._scratch = scratch
        self._members: list[Member] = []

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self._members:
            member.process.kill()  # at once: what they write is whole or absent
        for member in self._members:
            member.process.wait()
            member.connection.close()

    def start(self, runs: Iterable[str] = RUNS) -> list[Any]:
        """Start all processes of ``runs``; returns the Facts of each when all are ready."""
        members = [
            self._start_one(Role(run, rank, self._scratch))
            for run in runs
            for rank in range(1 if run == UNSHARDED else self._config.ranks)
        ]
        for member in members:
            self._send(member, (self._config, member.role))
        return self._collect(members)

    def ask(self, run: str, command: str, *arguments: object) -> list[Any]:
        """Let all processes of one run call ``Worker.command(*arguments)``. Returns: the results in rank order."""
        return self._collect(self._tell(run, command, *arguments))

    def kill(self, run: str, command: str, *arguments: object) -> None:
        """Let all processes of one run begin a long ``Worker.command(*arguments)``, and kill them in the middle."""
        members = self._tell(run, command, *arguments)
        time.sleep(KILLED_AFTER_SECONDS)
        for member in members:
            member.process.kill()
        for member in members:
            member.process.wait()
            member.connection.close()
            member.role.store.unlink(missing_ok=True)
            self._members.remove(member)

    def _tell(self, run: str, command: str, *arguments: object) -> list[Member]:
        members = [member for member in self._members if member.role.run == run]
        for member in members:
            self._send(member, (command, arguments))
        return members

    def _start_one(self, role: Role) -> Member:
        ours, theirs = socket.socketpair()
        log = self._scratch / f"{role.run}-{role.rank}.log"
        with theirs, log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", WORKER, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment(self._config.threads),
                start_new_session=True,
            )
        self._members.append(Member(role, process, Connection(ours.detach()), log))
        return self._members[-1]

    def _send(self, member: Member, message: object) -> None:
        try:
            member.connection.send(message)
        except OSError:
            raise self._failure(member) from None

    def _collect(self, members: list[Member]) -> list[Any]:
        """Return the answer of each of ``members``; meanwhile watch all processes, because any may end."""
        by_connection = {member.connection: member for member in self._members}
        answers: dict[str, Any] = {}
        while len(answers) < len(members):
            ready = wait(list(by_connection), ANSWER_SECONDS)
            if not ready:
                silent = [member.name for member in members if member.name not in answers]
                raise DemoFailed(f"no answer for {ANSWER_SECONDS:.0f} s from {', '.join(silent)}")
            for connection in ready:
                member = by_connection[connection]  # type: ignore[index]  # wait() returns what it was given
                try:
                    answer, trace = member.connection.recv()
                except (EOFError, OSError):
                    raise self._failure(member) from None
                if trace is not None:
                    raise self._failure(member, answer, trace)
                answers[member.name] = answer
        return [answers[member.name] for member in members]

    def _failure(self, member: Member, reason: str = "", trace: str = "") -> DemoFailed:
        """Return the reason for the end of the demo. A killed process comes first: it makes the others raise."""
        deadline = time.monotonic() + BLAME_SECONDS
        while time.monotonic() < deadline:
            for each in self._members:
                status = each.process.poll()
                if status is not None and status < 0:
                    asked_for = -status in (signal.SIGKILL, signal.SIGTERM)
                    killer = next((one.name for one in signal.Signals if one == -status), f"signal {-status}")
                    return DemoFailed(f"{each.name} was killed by {killer}", "" if asked_for else tail(each.log))
            time.sleep(0.05)
        if reason:
            return DemoFailed(f"{member.name} failed: {reason}", trace)
        return DemoFailed(f"{member.name} ended early, with status {member.process.poll()}", tail(member.log))


def environment(threads: int) -> dict[str, str]:
    """The environment of a process: its number of threads, no spinning between parallel regions, gloo on loopback."""
    fixed = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **fixed}


def tail(log: Path, lines: int = 20) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
