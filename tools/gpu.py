"""What needs a GPU: ``make test-gpu``, ``make bench-gpu``, ``make cuda-sanitize``.

Usage: python tools/gpu.py test|bench|sanitize [ARGS...]. Prints the device, its driver and torch. Where
nothing could be run: one line that says what is missing, and exit status 3. Nothing is installed: a machine without a
network has torch and no more, perhaps; without pytest and pytest-timeout the tests run as ranks.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
LACKING = 3
SANITIZER = "compute-sanitizer"
KERNELS = "kns=fp_"  # a part of our kernels' names: others are not slowed down
RANKS = ["tests/gpu/ranks.py"]
ALONE = ROOT / "build" / "kernels"  # tests/gpu/kernels.cpp


def lacks(target: str) -> str | None:
    """What is missing for a target, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for the CPU: install one that is built for CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU that it can use, or no driver"
    for name in (SANITIZER, "nvcc") if target == "sanitize" else ():
        if tool(name) is None:
            return f"{name} of the CUDA toolkit is not in CUDA_HOME, in CUDA_PATH, on PATH or in /usr/local/cuda"
    if target == "sanitize" and built_kernels() is None:
        return "make build has compiled no kernels"
    return None


def tool(name: str) -> str | None:
    """The path of a tool of CUDA's: of the toolkit that is named, on PATH, beside nvcc, or as installed."""
    nvcc = shutil.which("nvcc")
    named = [os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH")]
    folders = [str(Path(folder, "bin")) for folder in named if folder] + [os.environ.get("PATH", os.defpath)]
    folders += [str(Path(found).resolve().parent) for found in (nvcc, "/usr/local/cuda/bin/nvcc") if found]
    return shutil.which(name, path=os.pathsep.join(folders))


def built_kernels() -> Path | None:
    """The object that `make build` has made of csrc/cuda last, or None."""
    found = ROOT.glob("build/temp*/strict*/csrc/cuda/fp_kernels.o")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def driver() -> str:
    """The release of NVIDIA's driver, if nvidia-smi tells it."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> str:
    """The device, its driver and torch, in one line."""
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"{names}; driver {driver()}; torch {torch.__version__}, CUDA {torch.version.cuda}; {kernels()}"


def kernels() -> str:
    """Whether what was built here has kernels: the tests pass without, too."""
    built = any(b"11fp_pack_jobLm" in path.read_bytes() for path in ROOT.glob("flatparam/_C.*.so"))
    return "flatparam's kernels" if built else "NO kernels of flatparam: torch's operations do their work"


def commands(target: str, arguments: tuple[str, ...]) -> list[list[str]]:
    """What a target runs, one after the other."""
    python = sys.executable
    if target == "test":
        if find_spec("pytest") is not None and find_spec("pytest_timeout") is not None:
            return [[python, "-m", "pytest", "tests/gpu", "-q", *arguments]]
        several = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *RANKS, *arguments]
        return [[python, *RANKS, *arguments], several]
    if target == "bench":
        return [[python, "-m", "benchmarks.gpu", *arguments]]
    # what torch and NCCL ask the driver for in vain is no error of a kernel
    options = ["--kernel-name", KERNELS, "--report-api-errors", "no", "--error-exitcode", "1"]
    trained = [*options, python, *RANKS, "packed", "converted", *arguments]
    sanitizer = tool(SANITIZER) or SANITIZER
    compiled = [tool("nvcc") or "nvcc", "-std=c++20", "-Icsrc", "tests/gpu/kernels.cpp", str(built_kernels())]
    return [
        [sanitizer, "--tool", "memcheck", *trained],
        [*compiled, "-o", str(ALONE)],
        [sanitizer, "--tool", "racecheck", "--error-exitcode", "1", str(ALONE)],
    ]


def main(target: str, *arguments: str) -> int:
    missing = lacks(target)
    if missing is not None:
        names = {"test": "test-gpu", "bench": "bench-gpu", "sanitize": "cuda-sanitize"}
        print(f"make {names[target]}: nothing was run: {missing}")
        return LACKING
    print(machine(), flush=True)
    environment = {**os.environ, "FLATPARAM_TEST_DEVICE": "cuda", "PYTHONPATH": str(ROOT)}
    environment.setdefault("KINETO_LOG_LEVEL", "6")  # else torch's profiler prints two lines for each measurement
    if target == "sanitize":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor is a block of its own, whose end is known
        ALONE.unlink(missing_ok=True)  # of another build
    status = [subprocess.run(command, cwd=ROOT, env=environment).returncode for command in commands(target, arguments)]
    return max(map(abs, status))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
