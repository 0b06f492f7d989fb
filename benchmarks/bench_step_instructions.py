"""n. Instructions of a forward and backward over the bare module's (callgrind), with collectives that do nothing.

Time shows no small change on a busy machine; counts do. ``python -m benchmarks.bench_step_instructions --check``
counts the bare module and the runtime alone, and ends with status 1 if a target is missed. Without valgrind and its
headers it says so and ends with 0.
"""

import argparse
import ctypes
import functools
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from benchmarks.bench_instructions import compiler_command, run
from benchmarks.bench_step import wrapped
from benchmarks.contestants import BARE, FSDP1, OURS, RUNTIME, SMALL
from benchmarks.models import SHAPE
from benchmarks.rows import Row, Table, Target
from benchmarks.worlds import fake_world

SOURCE = Path(__file__).with_name("counting.c")
NAMES = (BARE, RUNTIME, SMALL, OURS, FSDP1)
SIZES = ((1, 400), (24, 12), (48, 10))  # (units, parameters of each)
BOUNDS = {(1, 400): 0.7, (24, 12): 0.82, (48, 10): 0.82}  # of the runtime over the bare module
WARM_UP, STEPS = 2, 2
GROUP = "c10d::FakeProcessGroup::"  # its copies are not counted: a group of a device makes none on the host


def measure(quick: bool, names: Sequence[str] = NAMES) -> Table:
    """A row for each size; none where there is no valgrind."""
    table = Table(
        "n",
        "instructions of forward + backward over the bare module (callgrind), process group that does nothing",
        "parameters of 32 elements, one elementwise kernel each; thousands of instructions a unit",
    )
    sizes = SIZES[-1:] if quick else SIZES
    with tempfile.TemporaryDirectory(prefix="flatparam-counting-") as folder:
        library = _library(Path(folder))
        if library is None:
            table.note = "not measured: no valgrind here, or no valgrind/callgrind.h"
            return table
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(pool.map(lambda name: _counts(name, sizes, library), names))
    for units, n in sizes:
        counts = {name: [of[units, n] / 1e3] for name, of in zip(names, found, strict=True)}
        targets = [Target(RUNTIME, BOUNDS[units, n])]
        table.rows.append(Row.of("fp32", f"{units} x {n}", "k", BARE, counts, 1.0, targets, units=units, parameters=n))
    return table


def _library(folder: Path) -> Path | None:
    """Compile SOURCE into ``folder``; None if there is no valgrind."""
    library = folder / "counting.so"
    if shutil.which("valgrind") is None:
        return None
    command = [*compiler_command(), "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    done = subprocess.run(command, capture_output=True)
    return library if done.returncode == 0 else None


def _counts(name: str, sizes: Sequence[tuple[int, int]], library: Path) -> dict[tuple[int, int], float]:
    """Count the instructions of one contestant, a unit and step, in a process of its own under callgrind."""
    out = library.with_name(f"{name.replace(' ', '-')}.out")
    given = [f"{units}x{n}" for units, n in sizes]
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
    command += [sys.executable, "-m", "benchmarks.bench_step_instructions", "--under", str(library), name, *given]
    run(command, PYTHONHASHSEED="0", OMP_NUM_THREADS="1")
    profiles = (out.with_name(f"{out.name}.{i + 1}").read_text() for i in range(len(sizes)))
    return {
        (units, n): instructions(profile) / (STEPS * units) for (units, n), profile in zip(sizes, profiles, strict=True)
    }


def instructions(profile: str, without: str = GROUP) -> int:
    """All instructions of callgrind's ``profile``, without those of calls to functions whose name begins so."""
    names: dict[str, str] = {}  # of functions, by the number that stands for a name after its first use
    total = left_out = 0
    is_inside = is_called = is_call = False
    for line in profile.splitlines():
        if function := re.match(r"(c?fn)=\((\d+)\)(?: (.*))?", line):
            kind, number, name = function.groups()
            names.setdefault(number, name or "")
            if kind == "fn":
                is_inside = names[number].startswith(without)
            else:
                is_called = names[number].startswith(without)
        elif line.startswith("calls="):
            is_call = True
        elif line.startswith("summary: "):
            total = int(line.split()[1])
        elif is_call:  # a position, and the cost of those calls
            left_out += int(line.split()[1]) if is_called and not is_inside else 0
            is_call = False
    return total - left_out


def run_under(library: str, name: str, sizes: Sequence[str]) -> None:
    """Take the steps of one contestant, and have those of each size counted."""
    torch.set_num_threads(1)
    count = ctypes.CDLL(library).count
    with fake_world(2):
        for size in sizes:
            units, n = map(int, size.split("x"))
            model = wrapped(name, units, n, None)
            _take_steps(model, WARM_UP)
            gc.collect()
            gc.disable()
            count(size.encode(), ctypes.CFUNCTYPE(None)(functools.partial(_take_steps, model, STEPS)))
            gc.enable()


def _take_steps(model: nn.Module, number: int) -> None:
    x = torch.ones(SHAPE)
    for _ in range(number):
        model(x).sum().backward()
        for param in model.parameters():
            param.grad = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="count the bare module and the runtime alone, and judge")
    parser.add_argument("--quick", action="store_true", help="one size")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--under", nargs="+", help=argparse.SUPPRESS)  # library, contestant, sizes: run by callgrind
    arguments = parser.parse_args()
    if arguments.under:
        run_under(arguments.under[0], arguments.under[1], arguments.under[2:])
        return 0
    table = measure(arguments.quick, NAMES[:2] if arguments.check else NAMES)
    print("\n".join(table.lines()), flush=True)
    if arguments.json is not None:
        table.save(arguments.json)
    return 1 if arguments.check and any(row.met is False for row in table.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
