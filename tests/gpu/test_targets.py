"""make test-gpu, bench-gpu and cuda-sanitize without a GPU; and what bench-gpu measures, run on the CPU."""

import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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


def test_ranks_of_a_machine_with_gpus_see_them():
    code = "from gloo import run_ranks; import os; print(run_ranks(os.getenv, 1, 'CUDA_VISIBLE_DEVICES'))"
    for device, seen in (("cuda", "3"), ("sim", "")):
        environment = {**NO_GPU, "FLATPARAM_TEST_DEVICE": device, "CUDA_VISIBLE_DEVICES": "3"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT / "tests/support", env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == f"['{seen}']", done.stderr


def test_ranks_run_from_any_folder(tmp_path):
    environment = {name: value for name, value in NO_GPU.items() if name != "PYTHONPATH"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command = [*launch, str(ROOT / "tests/gpu/ranks.py"), "one_communicator"]
    environment["FLATPARAM_TEST_DEVICE"] = "sim"
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert "rank 0 of 1: one_communicator passed" in done.stdout, done.stderr


def test_the_sanitizer_is_found_beside_nvcc_and_looks_at_our_kernels_alone(tmp_path):
    for name in ("nvcc", "compute-sanitizer"):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "on-path").mkdir()
    (tmp_path / "on-path" / "nvcc").symlink_to(tmp_path / "bin" / "nvcc")
    code = "import runpy; print(runpy.run_path('tools/gpu.py')['commands']('sanitize', ()))"
    ways = {"CUDA_HOME": str(tmp_path)}, {"PATH": str(tmp_path / "on-path")}
    for way in ways:
        environment = {name: value for name, value in NO_GPU.items() if not name.startswith("CUDA_")} | way
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        commands = ast.literal_eval(done.stdout)
        assert [command[:5] for command in commands] == [
            [str(tmp_path / "bin/compute-sanitizer"), "--tool", tool, "--kernel-name", "kns=fp_"]
            for tool in ("memcheck", "racecheck")
        ], done.stderr


def test_the_kernels_that_are_tested_are_told(tmp_path):
    code = (
        "import pathlib, runpy; of = runpy.run_path('tools/gpu.py')['kernels']; "
        "of.__globals__['ROOT'] = pathlib.Path({!r}); print(of())"
    )
    module = tmp_path / "flatparam" / "_C.cpython.so"
    module.parent.mkdir()
    for content, told in (
        (b"..6launchI11fp_pack_jobE", "NO kernels"),
        (b"..4packI..11fp_pack_jobLm4000", "flatparam's kernels"),
    ):
        module.write_bytes(content)
        done = subprocess.run(
            [sys.executable, "-c", code.format(str(tmp_path))], cwd=ROOT, env=NO_GPU, capture_output=True, text=True
        )
        assert done.stdout.startswith(told), done.stderr


def test_a_machine_without_pytest_and_matplotlib_runs_all(tmp_path):
    code = (
        "import importlib.util, sys; found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *of: None if name in ('pytest', 'matplotlib') else found(name, *of)\n"
        "sys.modules['pytest'] = sys.modules['matplotlib'] = None; import runpy, torch\n"
    )
    tools = code + "print(runpy.run_path('tools/gpu.py')['commands']('test', ()))"
    done = subprocess.run([sys.executable, "-c", tools], cwd=ROOT, env=NO_GPU, capture_output=True, text=True)
    assert "pytest" not in done.stdout, done.stderr
    assert done.stdout.count("tests/gpu/ranks.py") == 2, done.stderr
    measured = f"sys.argv[1:] = '--device cpu --quick --out {tmp_path}'.split(); import benchmarks.gpu as g; g.main()"
    done = subprocess.run([sys.executable, "-c", code + measured], cwd=ROOT, env=NO_GPU, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no gpu.png: matplotlib is not installed" in done.stdout


def test_what_is_measured_on_a_gpu_runs(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=NO_GPU, check=True, timeout=300, stdout=subprocess.DEVNULL)
    tables = [json.loads((tmp_path / f"gpu-{key}.json").read_text()) for key in ("kernels", "step", "memory")]
    values = [value for table in tables for row in table["rows"] for value in row["values"].values()]
    assert min(values) > 0
    assert (tmp_path / "gpu.png").stat().st_size > 10_000


@pytest.mark.thorough
def test_the_demo_says_that_there_are_not_enough_gpus(tmp_path):
    command = [sys.executable, "-m", "flatparam", "demo", "--quick", "--device", "cuda", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=NO_GPU, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "--device cuda takes a GPU for each of 2 ranks, there are 0" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
@pytest.mark.parametrize(
    ("owner", "name", "arguments"),
    [
        (
            "ProcessGroupNCCL",
            "register_mem_pool",
            "(self: torch._C._distributed_c10d.ProcessGroupNCCL, pool: torch._C._MemPool",
        ),
        (
            "ProcessGroupNCCL",
            "deregister_mem_pool",
            "(self: torch._C._distributed_c10d.ProcessGroupNCCL, arg0: torch._C._MemPool)",
        ),
        ("ProcessGroupNCCL", "abort", "(self: torch._C._distributed_c10d.Backend)"),
        (
            "ProcessGroup",
            "_start_coalescing",
            "(self: torch._C._distributed_c10d.ProcessGroup, device_type: torch.device)",
        ),
        (
            "ProcessGroup",
            "_end_coalescing",
            "(self: torch._C._distributed_c10d.ProcessGroup, device_type: torch.device)",
        ),
        ("ProcessGroup", "_get_backend", "(self: torch._C._distributed_c10d.ProcessGroup, device: torch.device)"),
    ],
)
def test_what_is_asked_of_nccl_is_there(owner, name, arguments):
    assert f"{name}{arguments}" in getattr(getattr(dist, owner), name).__doc__


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_memory_pools_take_the_allocator_of_nccl():
    assert isinstance(dist.ProcessGroupNCCL.mem_allocator, property)
    inspect.signature(torch.cuda.MemPool).bind("the allocator")
    inspect.signature(torch.cuda.use_mem_pool).bind("the pool")
