"""make test-gpu, bench-gpu and cuda-sanitize without a GPU; and what bench-gpu measures, run on the CPU."""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import accelerator
import forked_scripts
import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks

from benchmarks.gpu import draw
from benchmarks.rows import Table

ROOT = Path(__file__).parents[2]
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def tool():
    """tools/gpu.py, anew."""
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools/gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("target", ["test", "bench", "sanitize"])
def test_without_a_gpu_one_line_says_so(tool, target, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tool.main(target) == 3
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(
        f"make {dict(test='test-gpu', bench='bench-gpu', sanitize='cuda-sanitize')[target]}: nothing"
    )
    assert "torch" in line


def test_the_status_is_the_processs():
    command = [sys.executable, "tools/gpu.py", "test"]
    done = subprocess.run(command, cwd=ROOT, env=NO_GPU, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    assert "make test-gpu: nothing" in done.stdout


@pytest.mark.multiprocess
def test_ranks_of_a_machine_with_gpus_see_them():
    for device, seen in (("cuda", "3"), ("sim", "")):
        environment = {"FLATPARAM_TEST_DEVICE": device, "CUDA_VISIBLE_DEVICES": "3"}
        assert run_ranks(os.getenv, 1, "CUDA_VISIBLE_DEVICES", environment=environment) == [seen]


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param([], id="alone"),
        pytest.param(
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"],
            id="by torchrun",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_ranks_run_from_any_folder(tmp_path, launch):
    environment = {name: value for name, value in NO_GPU.items() if name != "PYTHONPATH"}
    command = [sys.executable, *launch, str(ROOT / "tests/gpu/ranks.py"), "one_communicator"]
    environment["FLATPARAM_TEST_DEVICE"] = "sim"
    done = forked_scripts.completed(command, cwd=tmp_path, env=environment)
    assert "rank 0 of 1: one_communicator passed" in done.stdout, done.stderr


def test_the_sanitizer_is_found_beside_nvcc_and_looks_at_our_kernels(tool, tmp_path, monkeypatch):
    for name in ("nvcc", "compute-sanitizer"):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "on-path").mkdir()
    (tmp_path / "on-path" / "nvcc").symlink_to(tmp_path / "bin" / "nvcc")
    for way in ({"CUDA_HOME": str(tmp_path)}, {"PATH": str(tmp_path / "on-path")}):
        with monkeypatch.context() as patch:
            for name in ("CUDA_HOME", "CUDA_PATH"):
                patch.delenv(name, raising=False)
            for name, value in way.items():
                patch.setenv(name, value)
            trained, compiled, alone = tool.commands("sanitize", ())
            sanitizer = str(tmp_path / "bin/compute-sanitizer")
            assert trained[:5] == [sanitizer, "--tool", "memcheck", "--kernel-name", "kns=fp_"]
            assert Path(compiled[0]).resolve() == tmp_path / "bin/nvcc"
            assert alone == [sanitizer, "--tool", "racecheck", "--error-exitcode", "1", compiled[-1]]


@pytest.mark.skipif(not accelerator.ON_CUDA, reason="they run on CUDA")
def test_the_kernels_pass_without_torch(tool):
    """As racecheck has them."""
    if tool.built_kernels() is None:
        pytest.skip("make build has compiled none")
    _, compiled, alone = tool.commands("sanitize", ())
    subprocess.run([*compiled, "-cudart", "shared"], cwd=ROOT, check=True)
    libraries = [os.environ.get("LD_LIBRARY_PATH", ""), str(Path(torch.__file__).parent / "lib")]  # of the stand-in
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)}
    done = subprocess.run(alone[-1:], env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "kernels passed\n"), done.stderr


def test_the_kernels_that_are_tested_are_told(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    module = tmp_path / "flatparam" / "_C.cpython.so"
    module.parent.mkdir()
    for content, told in (
        (b"..6launchI11fp_pack_jobE", "NO kernels"),
        (b"..4packI..11fp_pack_jobLm3472", "flatparam's kernels"),
    ):
        module.write_bytes(content)
        assert tool.kernels().startswith(told)


WITHOUT_PACKAGES = """
import importlib.util, runpy, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *of: None if name in ("pytest", "matplotlib") else found(name, *of)
sys.modules["pytest"] = sys.modules["matplotlib"] = None
print(runpy.run_path("tools/gpu.py")["commands"]("test", ()))
sys.argv[1:] = ["--device", "cpu", "--quick", "--out", sys.argv[1]]
import benchmarks.gpu
benchmarks.gpu.main()
"""


def test_a_machine_without_pytest_and_matplotlib_runs_all(tmp_path):
    command = [sys.executable, "-c", WITHOUT_PACKAGES, str(tmp_path)]
    done = forked_scripts.completed(command, cwd=ROOT, env=NO_GPU)
    assert done.returncode == 0, done.stderr
    commands, _, measured = done.stdout.partition("\n")
    assert "pytest" not in commands
    assert commands.count("tests/gpu/ranks.py") == 2
    assert "no gpu.png: matplotlib is not installed" in measured
    tables = {key: Table.load(tmp_path / f"gpu-{key}.json") for key in ("kernels", "step", "memory")}
    assert min(value for table in tables.values() for row in table.rows for value in row.values.values()) > 0
    draw(tables, tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").stat().st_size > 10_000


LONE = """
import torch, torch.distributed as dist
from benchmarks.worlds import fake_world
import lone
with fake_world(4, 2) as world:
    lone.use(world, "cpu", dist.ProcessGroupGloo)
    gathered, reduced = torch.zeros(4, 2), torch.zeros(2)
    dist.all_gather_into_tensor(gathered, torch.ones(2))
    dist.reduce_scatter_tensor(reduced, torch.arange(8.0))
    dist.all_reduce(reduced)
    dist.barrier()
    print(gathered.tolist(), reduced.tolist())
"""


@pytest.mark.thorough
def test_a_lone_rank_has_its_part_of_collectives():
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
    command = [sys.executable, "-W", "ignore", "-c", LONE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout == "[[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]] [4.0, 5.0]\n", done.stderr


@pytest.mark.thorough
def test_the_demo_says_that_there_are_not_enough_gpus(tmp_path):
    command = [sys.executable, "-m", "examples.demo", "--quick", "--device", "cuda", "--out", str(tmp_path)]
    done = forked_scripts.completed(command, cwd=ROOT, env=NO_GPU)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "examples.demo: --device cuda takes a GPU for each of 2 ranks, there are 0\n"


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
