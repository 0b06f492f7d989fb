"""The runner of torch's own tests finds lost tests, goes on after a crash, and never mixes up the two handles.

It runs here on a made-up test file in the place of torch's, so that nothing is fetched.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = ROOT / "tests" / "upstream"

TESTS = """
import os
import torch
from torch.distributed.fsdp._flat_param import FlatParamHandle

def test_of_the_handle():
    assert FlatParamHandle.__module__.split(".")[0] == os.environ["UPSTREAM_HANDLE"]

def test_rewritten():
    assert torch.device("cuda", 3) == torch.ones(1).cuda().device == torch.zeros(1, device="cuda:1").device
    assert torch.cuda.device_count() == 4 and torch.cuda.is_available()

def test_that_fails():
    assert torch.ones(1) == 2

def test_that_ends_the_process():
    os._exit(5)

def test_after_it():
    pass

def test_that_is_skipped():
    torch.cuda.memory_allocated()
"""

OUTCOMES = {
    "test_of_the_handle": "pass",
    "test_rewritten": "pass",
    "test_that_fails": "fail",
    "test_that_ends_the_process": "crash",
    "test_after_it": "pass",
    "test_that_is_skipped": "skip",
}


def named(outcomes):
    return {f"test_fsdp_core.py::{name}": outcome for name, outcome in outcomes.items()}


@pytest.fixture
def run(tmp_path):
    """A function that runs the runner on the made-up file, against a baseline with these outcomes."""
    folder = tmp_path / "tests" / "test" / "distributed" / "fsdp"
    folder.mkdir(parents=True)
    (folder / "test_fsdp_core.py").write_text(TESTS)

    def run(outcomes, *options):
        baseline, out = tmp_path / "baseline.json", tmp_path / "out.json"
        flaky = ["test_fsdp_core.py::test_that_is_flaky"]
        tests = {**named(outcomes), flaky[0]: "pass"}
        baseline.write_text(json.dumps({"torch": "2.13.0", "flaky": flaky, "tests": tests}))
        files = ["--baseline", baseline, "--out", out]
        done = subprocess.run(
            [sys.executable, UPSTREAM / "run.py", "test_fsdp_core", *files, *options],
            env={**os.environ, "UPSTREAM_TESTS": str(tmp_path / "tests")},
            capture_output=True,
            text=True,
            timeout=240,
        )
        return done, json.loads(out.read_text())

    return run


@pytest.mark.thorough
def test_what_is_lost_and_what_is_won(run):
    before = dict.fromkeys(OUTCOMES, "pass") | {"test_after_it": "fail", "test_that_was_there": "pass"}
    done, out = run(before)
    assert out["tests"] == named(OUTCOMES)
    assert out["flatparam"]
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert [line.split("::")[1] for line in lines if line.startswith("LOST")] == [
        "test_that_ends_the_process: crash",
        "test_that_fails: fail",
        "test_that_is_skipped: skip",
        "test_that_was_there: not run",
    ]
    assert "passes now, in the baseline fail: test_fsdp_core.py::test_after_it" in lines
    assert f"FlatParamHandle was that of {ROOT / 'flatparam' / 'dropin' / 'handle.py'}" in lines
    assert done.returncode == 1, done.stderr


@pytest.mark.thorough
def test_nothing_lost(run):
    done, out = run(OUTCOMES, "-k", "handle|after|fails")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass in the baseline (torch 2.13.0): 2; of these not passing now: 0" in done.stdout
    assert sorted(out["tests"].values()) == ["fail", "pass", "pass"]


@pytest.mark.thorough
def test_torchs_own_handle(run):
    done, out = run(OUTCOMES, "--stock", "-k", "handle")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch/distributed/fsdp/_flat_param.py" in done.stdout
    assert not out["flatparam"]


@pytest.mark.thorough
def test_a_handle_that_was_not_installed_stops_the_run(tmp_path):
    """Were install() to do nothing, all would pass, on torch's handle."""
    (tmp_path / "flatparam.py").write_text("def install(runtime):\n    pass\n")
    env = {"UPSTREAM_SHIM": "1", "UPSTREAM_HANDLE": "flatparam", "UPSTREAM_DEVICES": "4", "UPSTREAM_WORLD": "2"}
    paths = os.pathsep.join([str(tmp_path), str(UPSTREAM / "shim")])
    code = "import torch.distributed.fsdp, upstream_shim; upstream_shim.handle_in_use()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, **env, "UPSTREAM_START": "fork", "UPSTREAM_TESTS": str(tmp_path), "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "RuntimeError: expected the handle of flatparam everywhere in torch.distributed, got that of" in done.stderr


def test_the_baseline_is_torchs_own():
    baseline = json.loads((UPSTREAM / "baseline.json").read_text())
    assert not baseline["flatparam"]
    assert len(baseline["tests"]) == 704
    assert list(baseline["tests"].values()).count("pass") == 642
    assert set(baseline["flaky"]) < set(baseline["tests"])
