"""The small tree and the toolkit of small_tree.py, for the tests of the build."""

import subprocess

import pytest
from small_tree import NVCC, make_small, replace


@pytest.fixture
def small(tmp_path):
    return make_small(tmp_path)


@pytest.fixture
def cuda(small, tmp_path_factory):
    """A tree with a kernel, a torch that says it is built for CUDA 13.0, and the environment of a toolkit that logs."""
    (small / "csrc/cuda").mkdir()
    (small / "csrc/cuda/kernels.cu").write_text('#include "core/one.h"\nint fp_kernel(void) { return 5; }\n')
    toolkit = tmp_path_factory.mktemp("toolkit")
    (toolkit / "bin").mkdir()
    (toolkit / "lib64").mkdir()
    (toolkit / "bin/nvcc").write_text(NVCC)
    (toolkit / "bin/nvcc").chmod(0o755)
    runtime = toolkit / "lib64/libcudart.so.13"
    subprocess.run(["gcc", "-shared", "-xc", "/dev/null", "-Wl,-soname,libcudart.so.13", "-o", runtime], check=True)
    replace(small / "setup.py", 'names.get("cuda")', '"13.0"')
    return small, toolkit, {"CUDA_HOME": str(toolkit), "RELEASE": "13.1", "LOG": str(toolkit / "log")}
