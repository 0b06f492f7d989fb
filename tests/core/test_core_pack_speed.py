"""Packing reaches the share of memcpy's bandwidth that benchmarks/bench_pack.py claims, on the best SIMD level."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flatparam

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
TRIES = 6  # the machine may be busy with something else; the best try counts


def test_packing_runs_at_the_speed_of_memory(tmp_path):
    package = str(Path(flatparam.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, str(ROOT), os.environ.get("PYTHONPATH", "")])}
    table = tmp_path / "pack.json"
    command = [sys.executable, "-m", "benchmarks.bench_pack", "--quick", "--json", str(table)]
    missed = None
    for _ in range(TRIES):
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE)
        claimed = [row for row in json.loads(table.read_text())["rows"] if row["target"]]
        assert len(claimed) == 3
        missed = {row["what"]: (row["ratios"]["flatparam"], row["target"]) for row in claimed if not row["met"]}
        if not missed:
            return
    pytest.fail(f"shares of memcpy's bandwidth (median, least, most), and what is claimed: {missed}")
