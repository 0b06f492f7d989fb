"""make test-gpu, bench-gpu and cuda-sanitize without a GPU; and what bench-gpu measures, run on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("target", ["test", "bench", "sanitize"])
def test_without_a_gpu_one_line_says_so(target):
    done = subprocess.run(
        [sys.executable, "tools/gpu.py", target], cwd=ROOT, env=NO_GPU, capture_output=True, text=True
    )
    [line] = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (3, "")
    assert line.startswith(
        f"make {dict(test='test-gpu', bench='bench-gpu', sanitize='cuda-sanitize')[target]}: nothing"
    )
    assert "torch" in line


def test_what_is_measured_on_a_gpu_runs(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=NO_GPU, check=True, timeout=300, stdout=subprocess.DEVNULL)
    tables = [json.loads((tmp_path / f"gpu-{key}.json").read_text()) for key in ("kernels", "step", "memory")]
    values = [value for table in tables for row in table["rows"] for value in row["values"].values()]
    assert min(values) > 0
    assert (tmp_path / "gpu.png").stat().st_size > 10_000


def test_the_demo_says_that_there_are_not_enough_gpus(tmp_path):
    command = [sys.executable, "-m", "flatparam", "demo", "--quick", "--device", "cuda", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=NO_GPU, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "--device cuda takes a GPU for each of 2 ranks, there are 0" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout
