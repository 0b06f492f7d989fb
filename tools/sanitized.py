"""Run pytest on the sanitizer build of the package: errors end the run, leaks of memory that csrc allocated fail it.

Usage: python tools/sanitized.py FOLDER [argument of pytest...]    FOLDER: where the package's sanitizer build is

The sanitizers' run-time library and libstdc++ are loaded before all else, and Python takes every object from malloc:
its own allocator would hide small overruns. Python and torch keep some memory for ever, so of the leaks that are
reported when the process ends only those count whose stack of calls has a line of csrc. Standard library only.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

CSRC = re.compile(r"^ +#\d+ \S+ in .* csrc/", re.MULTILINE)

# Processes that the tests start run as they would anywhere: compilers leak, and our own build of them is the plain one.
# Several such runs side by side take whole files, the next one that none has taken, those with the most tests first.
RUN_PYTEST = """
import itertools, os, sys, pytest
del os.environ["LD_PRELOAD"], os.environ["PYTHONMALLOC"]
status_file, taken = sys.argv[1:3]

def take(index):
    try:
        open(os.path.join(taken, str(index)), "x").close()
    except FileExistsError:
        return False
    return True

class Part:
    def pytest_runtestloop(self, session):
        files = [list(items) for _, items in itertools.groupby(session.items, lambda item: item.path)]
        files.sort(key=lambda items: (-len(items), items[0].path))
        mine = (item for index, items in enumerate(files) if take(index) for item in items)
        item = next(mine, None)
        while item is not None:
            following = next(mine, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

status = int(pytest.main(sys.argv[3:], plugins=[Part()]))
open(status_file, "w").write(str(status))
sys.exit(status)
"""
PARTS = min(4, os.cpu_count() or 1)
NONE_COLLECTED = 5  # pytest's exit status


def libraries(compiler: str) -> str:
    """Return the libraries to load first, as LD_PRELOAD takes them; they must be those of the compiler that built."""
    names = ("libasan.so", "libstdc++.so")
    paths = [
        subprocess.check_output([*shlex.split(compiler), f"-print-file-name={name}"], text=True).strip()
        for name in names
    ]
    missing = [name for name, path in zip(names, paths, strict=True) if not os.path.isabs(path)]
    if missing:
        raise SystemExit(f"the sanitizer run needs GCC's {' and '.join(missing)}, which {compiler} does not have")
    return " ".join(paths)


def problems(report: str) -> list[str]:
    """Return the parts of a sanitizer's report that are ours to answer for."""
    parts = re.split(r"\n(?=(?:Direct|Indirect) leak of )", report)
    errors = [parts[0]] if "ERROR: AddressSanitizer" in parts[0] else []
    return errors + [part for part in parts[1:] if CSRC.search(part)]


def main(folder: Path, arguments: list[str]) -> int:
    """Run pytest; return its exit status, or 1 if it passed and a sanitizer has something to report."""
    taken = folder / "taken"
    taken.mkdir(exist_ok=True)
    for old in [*folder.glob("status*"), *folder.glob("report.*"), *taken.iterdir()]:
        old.unlink()
    env = {
        **os.environ,
        "LD_PRELOAD": libraries(os.environ.get("CC", "gcc")),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": f"detect_leaks=1:log_path={folder.resolve() / 'report'}",
        "UBSAN_OPTIONS": "print_stacktrace=1",  # UBSan writes to standard error, which pytest must not keep to itself
        "FLATPARAM_TEST_CFLAGS": "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
    }
    pytest = ["--capture=sys", "-o", f"pythonpath={folder} tests/support .", "-m", "not multiprocess", *arguments]
    runs = [(folder / f"status{part}", folder / f"output{part}") for part in range(PARTS)]
    processes = []
    for status, output in runs:
        command = [sys.executable, "-c", RUN_PYTEST, str(status), str(taken), *pytest]
        with output.open("w") as file:
            processes.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))
    for process, (_, output) in zip(processes, runs, strict=True):
        process.wait()
        print(output.read_text(errors="replace"), flush=True)
    found = [part for path in sorted(folder.glob("report.*")) for part in problems(path.read_text(errors="replace"))]
    if found:
        print("\n".join(found), file=sys.stderr)
        print(f"sanitizers: {len(found)} problem(s) in csrc, see above", file=sys.stderr)
        return 1
    ended = [int(status.read_text()) for status, _ in runs if status.is_file()]
    if len(ended) < len(runs):
        exits = [process.returncode for process in processes]
        print(f"sanitizers: pytest did not come to its end (exit status {exits})", file=sys.stderr)
        return 1
    failed = [status for status in ended if status not in (0, NONE_COLLECTED)]
    return failed[0] if failed else min(ended)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
