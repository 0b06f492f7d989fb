"""The kernels as nvcc compiles them for each architecture, run on the host: they pass the tests of their bodies."""

import ptx
import pytest
from test_kernels import *  # noqa: F403

from benchmarks.c_testing import _C_testing

pytestmark = [pytest.mark.thorough, pytest.mark.multiprocess, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return ptx.compiled(tmp_path_factory.mktemp("ptx")) or pytest.skip("no nvcc")


@pytest.fixture(scope="module", params=["sm_80", "sm_100"], autouse=True)
def kernels(request, files):
    if request.param not in files:
        pytest.skip(f"nvcc does not compile for {request.param}")
    _C_testing.use_kernels(ptx.launched(files[request.param]))
    yield
    _C_testing.use_kernels(0)


def test_other_architectures_have_the_same_ptx(files):
    known = {files[name].read_text().partition(f".target {name}\n")[2] for name in ("sm_80", "sm_100") if name in files}
    others = {name: file.read_text().partition(f".target {name}\n")[2] for name, file in files.items()}
    assert [name for name, text in others.items() if text not in known] == []


def test_more_pieces_than_a_launch_takes():
    with pytest.raises(ShardError, match="refused with error 1"):  # noqa: F405
        _C_testing.kernel_pack([(None, "float32", i, 1, ()) for i in range(1005)], bytearray(4020), "float32", 0, 1005)
