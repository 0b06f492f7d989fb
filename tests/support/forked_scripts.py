"""Programs that run and end as scripts do, in forks of one process that has imported torch, which takes seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

_STARTER = """
import json, os, sys
import torch

for i, (program, arguments) in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if child == 0:
        for number, name in (1, "out"), (2, "err"):
            os.dup2(os.open(f"{i}.{name}", os.O_CREAT | os.O_WRONLY), number)
        sys.argv = ["", *arguments]
        exec(program, {"__name__": "__main__"})
        break
    with open(f"{i}.status", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


class End(NamedTuple):
    status: int
    out: str
    err: str


def run(programs, folder):
    """Run each ``(program, arguments)`` after the other in ``folder``, which is empty or new; return the ends."""
    command = [sys.executable, "-c", _STARTER, json.dumps(programs)]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=240)
    parts = [[(folder / f"{i}.{name}").read_text() for name in ("status", "out", "err")] for i in range(len(programs))]
    return [End(int(status), out, err) for status, out, err in parts]
