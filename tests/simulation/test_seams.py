"""Threads of simulated ranks in each Python that is here: waits end in virtual time, and a seed gives a run again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from simulated import build

FOLDER = Path(__file__).parent
PYTHONS = [sys.executable, *(f"python3.{minor}" for minor in range(10, 15))]


def printed(python, *seeds):
    seams = build(FOLDER / "seams.c", [FOLDER / f"{name}.h" for name in ("seams", "scheduler", "processes", "heap")])
    environment = {**os.environ, "LD_PRELOAD": str(seams)}
    command = [python, str(FOLDER / "waits.py"), *map(str, seeds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()], done


@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: Path(python).name)
def test_waits_end_in_virtual_time(python):
    if subprocess.run([shutil.which(python) or "false", "-c", ""], capture_output=True).returncode != 0:
        assert python != sys.executable
        return  # another Python, which is not on this machine
    runs, done = printed(python, 1, 1, 2)
    assert done.returncode == 0, done.stderr
    for run in runs:
        assert run["reason"] == 0
        assert run["slept"] == 5.0
        assert run["got"] == [0, 1, 2, 3, 4]
        assert run["waited"] == 3.0
        assert run["processes"] == [5000000, 5000001]
        assert run["real"] < 2.0
    assert runs[0]["digest"] == runs[1]["digest"] != runs[2]["digest"]


def test_ranks_that_wait_for_ever_are_found():
    runs, _ = printed(sys.executable, "stuck")
    assert runs == [{"reason": 1, "states": ["rank 0: a semaphore", "rank 1: a semaphore"]}]
