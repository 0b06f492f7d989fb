"""How one benchmark is run by itself: ``python -m benchmarks.bench_views [--quick] [--json FILE]``."""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.rows import Table


def run_one(measure: Callable[[bool], Table]) -> None:
    """Measure, print the table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    arguments = parser.parse_args()
    table = measure(arguments.quick)
    print("\n".join(table.lines()), flush=True)
    if arguments.json is not None:
        table.save(arguments.json)
