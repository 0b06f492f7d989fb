"""i. Instructions of the core's hot calls, counted by callgrind, against those that are kept in instructions.json.

``python -m benchmarks.bench_instructions --check`` ends with status 1 if a count has grown by more than 10 %; without
valgrind it says so and ends with 0. ``--keep`` writes what was counted into instructions.json, with the compiler.
Counts of another compiler or processor family are compared and told, never judged.
"""

import argparse
import ast
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, Table

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).with_name("instructions.json")
DRIVER = Path(__file__).with_name("instructions.c")
SLACK = 1.10
# One memcpy whatever the processor: what the C library would choose counts differently
BASIC_MEMCPY = "glibc.cpu.hwcaps=" + ",".join(
    f"-{feature}" for feature in ("AVX", "AVX2", "AVX512F", "AVX512VL", "ERMS", "FSRM", "SSSE3")
)


def measure(quick: bool) -> Table:
    """Each call's instructions over the kept ones; no rows where there is no valgrind."""
    table = Table("i", "instructions of the core's hot calls (callgrind)", "the core compiled as for the extension")
    if shutil.which("valgrind") is None:
        table.note = "not measured: no valgrind here"
        return table
    kept = json.loads(KEPT.read_text())
    counts, here = count(), compiler()
    comparable = (kept["compiler"], kept["machine"]) == (here, platform.machine())
    if not comparable:
        table.note = f"kept counts are of {kept['compiler']} on {kept['machine']}, here it is {here}: not judged"
    for name, number in counts.items():
        row = Row(name, "", "", "kept", {"counted": number}, {})
        if name in kept["counts"]:
            share = number / kept["counts"][name]
            row.values["kept"] = kept["counts"][name]
            row.ratios["counted"] = (share, share, share)
        if comparable:
            row.target, row.met = f"<= {SLACK}", name in kept["counts"] and share <= SLACK
        table.rows.append(row)
    return table


def count() -> dict[str, int]:
    """Compile the driver with the core and run it under callgrind; returns instructions by phase."""
    with tempfile.TemporaryDirectory(prefix="flatparam-instructions-") as folder:
        program, out = Path(folder, "driver"), Path(folder, "callgrind.out")
        sources = [str(path) for path in sorted((ROOT / "csrc" / "core").glob("*.c"))]
        flags = [*_flags("C_FLAGS"), *_flags("FLAGS")]
        run([*compiler_command(), *flags, str(DRIVER), *sources, "-lm", "-o", str(program)])
        options = ["--collect-atstart=no", "--toggle-collect=phase_*", f"--callgrind-out-file={out}"]
        run(["valgrind", "--tool=callgrind", *options, str(program)], GLIBC_TUNABLES=BASIC_MEMCPY, LD_BIND_NOW="1")
        return _inclusive(out.read_text())


def _inclusive(profile: str) -> dict[str, int]:
    """The instructions of each phase_* function and all that it calls, from callgrind's file."""
    names: dict[str, str] = {}  # of functions, by the number that stands for a name after its first use
    counts: dict[str, int] = {}
    phase = None
    for line in profile.splitlines():
        if function := re.match(r"(c?fn)=\((\d+)\)(?: (.*))?", line):
            kind, number, name = function.groups()
            names.setdefault(number, name or "")
            if kind == "fn":
                phase = names[number].removeprefix("phase_") if names[number].startswith("phase_") else None
        elif phase is not None and re.match(r"[+\-*\d]", line):  # a position and a cost; behind calls=, the call's
            counts[phase] = counts.get(phase, 0) + int(line.split()[1])
    return dict(sorted(counts.items()))


def _flags(name: str) -> list[str]:
    """A list of flags as setup.py has it."""
    found = re.search(rf"^{name} = (\[[^\]]*\])", (ROOT / "setup.py").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"benchmarks: setup.py has no {name}")
    flags: list[str] = ast.literal_eval(found[1])
    return flags


def compiler_command() -> list[str]:
    """The C compiler, as the command that CC says."""
    return shlex.split(os.environ.get("CC", "")) or [shutil.which("gcc") or "cc"]


def compiler() -> str:
    """The line in which the compiler tells its name and version."""
    return run([*compiler_command(), "--version"]).partition("\n")[0]


def run(command: list[str], **settings: str) -> str:
    """Run ``command`` with ``settings`` as environment variables. Returns: its output. Raises: SystemExit with that."""
    environment = {**os.environ, **settings}
    environment.pop("LD_PRELOAD", None)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"benchmarks: {shlex.join(command)} failed:\n{done.stdout}")
    return done.stdout


def keep(counts: dict[str, int]) -> None:
    """Write the counts, with the compiler and the kind of processor that they are of."""
    kept: dict[str, Any] = {"compiler": compiler(), "machine": platform.machine(), "counts": counts}
    KEPT.write_text(json.dumps(kept, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="end with status 1 if a count has grown")
    parser.add_argument("--keep", action="store_true", help="keep what is counted now")
    parser.add_argument("--quick", action="store_true", help="no difference here")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    arguments = parser.parse_args()
    if arguments.keep:
        keep(count())
    table = measure(arguments.quick)
    print("\n".join(table.lines()), flush=True)
    if arguments.json is not None:
        table.save(arguments.json)
    grown = [row for row in table.rows if row.met is False]
    for row in grown:
        print(f"{row.what}: {row.values['counted']:.0f} instructions, kept {row.values.get('kept', 0):.0f}")
    if grown:
        print("Make them fewer, or keep the new counts with a reason: python -m benchmarks.bench_instructions --keep")
    return 1 if grown and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
