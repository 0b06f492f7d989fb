"""Packing reaches the share of memcpy's bandwidth that benchmarks/bench_pack.py claims, on the best SIMD level."""

import json

import forked_scripts
import pytest

pytestmark = pytest.mark.multiprocess

PROGRAM = forked_scripts.as_main("benchmarks.bench_pack")
TRIES = 6  # the machine may be busy with something else; the best try counts


def test_packing_runs_at_the_speed_of_memory(tmp_path):
    missed = None
    for number in range(TRIES):
        table = tmp_path / f"{number}.json"
        folder = tmp_path / str(number)
        folder.mkdir()
        [done] = forked_scripts.run([(PROGRAM, ["--quick", "--json", str(table)])], folder)
        assert done.status == 0, done.err
        claimed = [row for row in json.loads(table.read_text())["rows"] if row["target"]]
        assert len(claimed) == 3
        missed = {row["what"]: (row["ratios"]["flatparam"], row["target"]) for row in claimed if not row["met"]}
        if not missed:
            return
    pytest.fail(f"shares of memcpy's bandwidth (median, least, most), and what is claimed: {missed}")
