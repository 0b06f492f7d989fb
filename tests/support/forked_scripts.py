"""Processes of Python that are forks of one that has imported torch, which takes seconds (forked_server.py)."""

import contextlib
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from forked_server import MOST

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 240.0  # seconds that the programs of a call may take
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")  # as subprocess names them
_begin = subprocess.Popen  # also where a test has put the class below in its place
_servers = {}  # by the modules that they have imported: the sockets that take requests


class Popen(subprocess.Popen):
    """A process as subprocess has it, of a command ``[sys.executable, ...]``: no ``exec``, but a fork of the server.

    So are those that it starts with Popen. Tests of how a process starts, or of what it imports, start one for real.
    ``imported``: modules that it has imported, found on today's ``sys.path``; ``is_finalized``: whether it ends with
    all that Python does, which takes 0.3 s.
    """

    def __init__(self, command, *, imported=(), is_finalized=False, **settings):
        self._imported, self._is_finalized = tuple(imported), is_finalized
        super().__init__(command, **settings)

    def _execute_child(self, *given):
        made = inspect.signature(super()._execute_child).bind(*given).arguments
        program, *arguments = map(os.fspath, made["args"])
        assert program == sys.executable
        environment = dict(os.environ if made["env"] is None else made["env"])
        request = {"arguments": arguments, "folder": str(made["cwd"] or os.getcwd()), "environment": environment}
        request |= {"is_session": made["start_new_session"], "passed": made["pass_fds"]}
        request["is_finalized"] = self._is_finalized
        streams = [made["p2cread"], made["c2pwrite"], made["errwrite"]]
        files = [number if fd == -1 else fd for number, fd in enumerate(streams)]
        self._told = _ask(_server(self._imported), request, [*files, *made["pass_fds"]])
        self.pid = int(self._told.readline())
        self._child_created = True
        self._close_pipe_fds(*(made[name] for name in PIPES))

    def _try_wait(self, wait_flags):
        if wait_flags & os.WNOHANG and not select.select([self._told], [], [], 0)[0]:
            return 0, 0
        with self._told:
            return self.pid, int(self._told.readline() or signal.SIGKILL)

    def _internal_poll(self, _deadstate=None):
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                pid, status = (0, 0) if self.returncode is not None else self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def completed(command, timeout=LONGEST, **settings):
    """Run a command as ``subprocess.run`` does, and return its status, its output and its errors as text."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **settings}
    with Popen(command, **settings) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


class End(NamedTuple):
    status: int
    out: str
    err: str


def as_main(module):
    """Return a program that runs ``module`` as ``python -m`` does."""
    return f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"


def _ask(server, request, files):
    """Give a server a request; return what tells of the process: a line with its pid, and one with its status."""
    text = json.dumps(request).encode()
    assert len(text) <= MOST, "a larger environment than a request may have"
    ours, theirs = os.pipe()
    try:
        socket.send_fds(server, [text], [theirs, *files])
    finally:
        os.close(theirs)
    return os.fdopen(ours, "rb", buffering=0)


def _server(imported=()):
    """The server whose forks have imported these modules."""
    if imported not in _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if imported:
                request = {"arguments": [], "folder": os.getcwd(), "is_session": False, "passed": []}
                request |= {"environment": environment_of_the_tree(), "imported": imported}
                _ask(_server(), request, [theirs.fileno()]).close()
            else:
                command = [sys.executable, Path(__file__).with_name("forked_server.py"), str(theirs.fileno())]
                environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
                ways = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "start_new_session": True}
                _begin(command, env=environment, pass_fds=[theirs.fileno()], **ways)
        _servers[imported] = ours
    return _servers[imported]


def run(programs, folder):
    """Run each ``(program, arguments)`` after the other in ``folder``, which is empty or new; return the ends."""
    return [end for (end,) in run_side_by_side([[program] for program in programs], folder)]


def run_side_by_side(groups, folder, imported=()):
    """The same for groups of programs, one group after the other; return the ends in the same groups.

    ``imported``: modules to import before the programs are forked.
    """
    end = time.monotonic() + LONGEST
    found = []
    for group in groups:
        with contextlib.ExitStack() as started:
            settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            settings |= {"cwd": folder, "env": environment_of_the_tree(), "imported": imported, "is_finalized": True}
            running = []
            for program, arguments in group:
                running.append(started.enter_context(Popen([sys.executable, "-c", program, *arguments], **settings)))
                started.callback(running[-1].kill)
            told = [process.communicate(timeout=end - time.monotonic()) for process in running]
        found.append([End(process.returncode, *texts) for process, texts in zip(running, told, strict=True)])
    return found


def environment_of_the_tree():
    """The environment with the tree's own build first: these processes do not preload the runtime of a sanitizer."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
