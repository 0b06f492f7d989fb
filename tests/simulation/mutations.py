"""Undo mended bugs one at a time, and play random programs until one fails: ``python -m tests.simulation.mutations``.

The bugs are those of order, liveness, ownership and interruption in ``mutation_table.py``. Each is undone in a copy of
the tree, which is removed afterwards. The table in tests/README.md has the results.
"""

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import process
from .__main__ import last_line, play_alone
from .mutation_table import MUTATIONS
from .programs import draw

SECONDS = 300  # for the test of a mutation


def undo(mutation, root):
    """Undo a mended bug in the tree ``root``. Returns: whether C is to be compiled."""
    for file, mended, broken in mutation.edits:
        text = (root / file).read_text()
        if text.count(mended) != 1:
            raise ValueError(f"{mutation.name}: expected once in {file}, got {text.count(mended)} times: {mended!r}")
        (root / file).write_text(text.replace(mended, broken))
    return any(file.startswith("csrc/") for file, _, _ in mutation.edits)


def find(mutation, seeds, seconds):
    """Return what shows the bug, a seed or a test, and its error; or that nothing does, and None."""
    with tempfile.TemporaryDirectory(prefix="flatparam-mutation") as folder:
        root = Path(folder)
        shutil.copytree(process.ROOT, root, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)
        if undo(mutation, root):
            build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--strict"]
            subprocess.run(build, cwd=root, check=True)
        return _run_test(root, mutation.test) if mutation.test else _play(root, mutation, seeds, seconds)


def _run_test(root, test):
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    try:
        ran = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "a test that hangs", f"{test} did not end within {SECONDS} s"
    failed = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", ran.stdout, re.MULTILINE)  # ERROR: in a fixture
    return (failed[1], ran.stdout) if failed else ("no test", None)


def _play(root, mutation, seeds, seconds):
    begin, played, error, kind = time.monotonic(), 0, None, mutation.kind
    with contextlib.closing(process._Server(root)) as server:
        for seed in range(seeds):
            if not eval(mutation.only, {"program": draw(seed, kind)}):
                continue
            if time.monotonic() - begin > seconds:
                seeds = seed
                break
            played += 1
            error = play_alone(server, seed, kind)[3]
            if error is not None:
                break
    if error is None:
        return f"no seed below {seeds}, of which {played} can show it", None
    with contextlib.closing(process._Server()) as server:
        without = play_alone(server, seed, kind)[3]
    if without is not None:
        raise RuntimeError(f"seed {seed} fails without the bug, too: {without}")
    return f"seed {seed}", error


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutations", description=__doc__.split(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutation_table.py; none: all")
    parser.add_argument("--seeds", type=int, default=5000, help="how many to play, at most, for each")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no seeds after that, for each")
    arguments = parser.parse_args()
    of_name = {each.name: each for each in MUTATIONS}
    missed = 0
    print("| bug | mended in | found by | seconds | error |\n|---|---|---|---|---|")
    for name in arguments.names or of_name:
        begin = time.monotonic()
        found, error = find(of_name[name], arguments.seeds, arguments.seconds)
        missed += error is None
        took = time.monotonic() - begin
        print(f"| {name} | {of_name[name].commit} | {found} | {took:.0f} | {error and last_line(error)} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
