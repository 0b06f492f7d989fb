"""``make bench``: every table in a process of its own, then a summary, JSON and pictures in build/bench.

A run of some tables (``--only``) leaves the others' JSON; pictures and ``--docs`` take what is there.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks import document, picture
from benchmarks.rows import Row, Table

ROOT = Path(__file__).parents[1]
TABLES = {  # by the letter of docs/performance.md
    "instructions": "bench_instructions",
    "step_instructions": "bench_step_instructions",
    "pack": "bench_pack",
    "views": "bench_views",
    "optimizer": "bench_optimizer",
    "step": "bench_step",
    "wrap": "bench_wrap",
    "reduce": "bench_reduce",
    "train": "bench_train",
    "gpt2": "bench_gpt2",
    "deepspeed": "bench_deepspeed",
    "traced": "bench_traced",
    "scaling": "bench_scaling",
    "whole": "bench_whole",
    "layer_zero": "bench_layer_zero",
    "checkpoint": "bench_checkpoint",
    "resize": "bench_resize",
}


def main() -> int:
    arguments = _arguments()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    tables = []
    for name in arguments.only or TABLES:
        start = time.monotonic()
        json_file = out / f"{name}.json"
        command = [sys.executable, "-m", f"benchmarks.{TABLES[name]}", "--json", str(json_file)]
        done = subprocess.run([*command, *(["--quick"] if arguments.quick else [])], cwd=ROOT, env=_environment())
        if done.returncode != 0:
            print(f"benchmarks: {name} failed with status {done.returncode}", file=sys.stderr)
            return done.returncode
        print(f"   ({time.monotonic() - start:.0f} s)\n", flush=True)
        tables.append(Table.load(json_file))
    facts = machine()
    (out / "machine.json").write_text(json.dumps(facts, indent=1) + "\n")
    missed = [(table, row) for table in tables for row in table.rows if row.met is False]
    checked = sum(row.met is not None for table in tables for row in table.rows)
    print(f"== {checked - len(missed)} of {checked} targets met; {', '.join(f'{k}: {v}' for k, v in facts.items())}")
    for table, row in missed:
        print(f"   missed: {table.key}. {row.what}, {row.size}: {_told(row)}; target {row.target}")
    kept = [Table.load(out / f"{name}.json") for name in TABLES if (out / f"{name}.json").is_file()]
    by_key = {table.key: table for table in kept}  # also those of earlier runs
    drawn = picture.draw(by_key, out)
    if arguments.docs:
        page = ROOT / "docs" / "performance.md"
        document.write(by_key, facts, page)
        picture.draw(document.read(page), page.parent)
    print(f"== {out}/*.json, {', '.join(map(str, drawn))}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TABLES, metavar="TABLE", help=f"some of: {', '.join(TABLES)}")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: about a minute")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the JSON files")
    parser.add_argument("--docs", action="store_true", help="write tables and pictures into docs too")
    return parser.parse_args()


def _environment() -> dict[str, str]:
    """One thread a process; no hint of the caller's that would change what is measured."""
    fixed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return {**{name: value for name, value in os.environ.items() if not name.startswith("FSDP_")}, **fixed}


def machine() -> dict[str, str]:
    """What figures depend on: the processor, the system, the versions."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "processor": f"{cpu}, {os.cpu_count()} cores",
        "torch": version("torch"),
        "Python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _told(row: Row) -> str:
    ratios = ", ".join(f"{name} {ratio[0]:.3g}x" for name, ratio in row.ratios.items())
    return ratios or ", ".join(f"{name} {value:.3g}" for name, value in row.values.items())


if __name__ == "__main__":
    sys.exit(main())
