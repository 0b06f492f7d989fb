"""Programs that run and end as scripts do, in forks of one process that has imported torch, which takes seconds."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

IMPORTED = ("torch", "torch._dynamo", "torch.distributed.fsdp")
_STARTER = """
import gc, importlib, itertools, json, os, sys
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
gc.collect()
gc.freeze()  # a script that ends would look through all of torch several times, for half of a second

def start_all():
    \"\"\"Return the program of a child, and nothing in the parent.\"\"\"
    numbers = itertools.count()
    for programs in json.loads(sys.argv[1]):
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

if program := start_all():
    exec(program, {"__name__": "__main__"})
"""


class End(NamedTuple):
    status: int
    out: str
    err: str


def run(programs, folder, imported=IMPORTED):
    """Run each ``(program, arguments)`` after the other in ``folder``, which is empty or new; return the ends.

    ``imported``: the modules that the process has imported of which they are forks.
    """
    return [end for (end,) in run_side_by_side([[program] for program in programs], folder, imported)]


def run_side_by_side(groups, folder, imported=IMPORTED):
    """The same for groups of programs, one group after the other; return the ends in the same groups."""
    command = [sys.executable, "-c", _STARTER, json.dumps(groups), json.dumps(imported)]
    # The tree's own build first: these processes do not preload the runtime of a sanitizer
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=240)
    numbers = itertools.count()
    return [[_end_of(folder, next(numbers)) for _ in group] for group in groups]


def _end_of(folder, number):
    status, out, err = ((folder / f"{number}.{name}").read_text() for name in ("status", "out", "err"))
    return End(int(status), out, err)
