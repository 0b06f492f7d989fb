"""The kernels as nvcc compiles them for each architecture, run on the host: they pass the tests of their bodies."""

import ptx
import pytest
from test_kernels import *  # noqa: F403

from benchmarks.c_testing import _C_testing

pytestmark = [pytest.mark.thorough, pytest.mark.multiprocess, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return ptx.compiled(tmp_path_factory.mktemp("ptx")) or pytest.skip("no nvcc")


@pytest.fixture(scope="module", params=["sm_80", "sm_90", "sm_100"], autouse=True)
def kernels(request, files):
    if request.param not in files:
        pytest.skip(f"nvcc does not compile for {request.param}")
    library = ptx.library(files[request.param])
    _C_testing.use_kernels(ptx.kernels_in(library))
    yield
    _C_testing.use_kernels(0)
