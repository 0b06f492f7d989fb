"""Programs that run and end as scripts do, in forks of one process that has imported torch, which takes seconds."""

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 240.0  # seconds that the programs of a call may take

_SERVER = """
import gc, importlib, itertools, json, os, sys
import torch, torch._dynamo, torch.distributed.fsdp

def freeze():
    \"\"\"Else a script that ends would look through all of torch several times, for half of a second.\"\"\"
    gc.collect()
    gc.freeze()

def fork_for_each_call():
    \"\"\"Return, in a child, what to run. The server itself ends with its input.\"\"\"
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return fork_for_each_program(**json.loads(line))
        os.write(1, b"%d\\n" % os.waitpid(child, 0)[1])
    os._exit(0)

def fork_for_each_program(groups, folder, environment, path, imported):
    os.chdir(folder)
    os.dup2(os.open("call.err", os.O_CREAT | os.O_WRONLY), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    for name in imported:
        importlib.import_module(name)
    freeze()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    numbers = itertools.count()
    for programs in groups:
        children = {}
        for program, arguments in programs:
            i = next(numbers)
            child = os.fork()
            if child == 0:
                for number, name in (1, "out"), (2, "err"):
                    os.dup2(os.open(f"{i}.{name}", os.O_CREAT | os.O_WRONLY), number)
                sys.argv = ["", *arguments]
                return program
            children[i] = child
        for i, child in children.items():
            with open(f"{i}.status", "w") as file:
                file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    os._exit(0)

freeze()
exec(fork_for_each_call(), {"__name__": "__main__"})
"""
_server = None


class End(NamedTuple):
    status: int
    out: str
    err: str


def as_main(module):
    """Return a program that runs ``module`` as ``python -m`` does."""
    return f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"


def run(programs, folder):
    """Run each ``(program, arguments)`` after the other in ``folder``, which is empty or new; return the ends."""
    return [end for (end,) in run_side_by_side([[program] for program in programs], folder)]


def run_side_by_side(groups, folder, imported=()):
    """The same for groups of programs, one group after the other; return the ends in the same groups.

    ``imported``: modules to import before the programs are forked.
    """
    global _server
    # The tree's own build first: these processes do not preload the runtime of a sanitizer
    path = [str(ROOT), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    if _server is None:
        ways = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        _server = subprocess.Popen([sys.executable, "-c", _SERVER], env=environment, **ways)
    call = {"groups": groups, "folder": str(folder), "environment": environment, "path": path, "imported": imported}
    ended = b"not in time"
    try:
        _server.stdin.write(json.dumps(call).encode() + b"\n")
        _server.stdin.flush()
        if select.select([_server.stdout], [], [], LONGEST)[0]:
            ended = _server.stdout.readline()
    finally:
        if ended != b"0\n":  # also where an exception of pytest ends this: the next call would take this one's answer
            with contextlib.suppress(ProcessLookupError):
                os.killpg(_server.pid, signal.SIGKILL)
            _server = None
    assert ended == b"0\n", (ended, *(path.read_text() for path in Path(folder).glob("call.err")))
    numbers = itertools.count()
    return [[_end_of(folder, next(numbers)) for _ in group] for group in groups]


def _end_of(folder, number):
    status, out, err = ((folder / f"{number}.{name}").read_text() for name in ("status", "out", "err"))
    return End(int(status), out, err)
