"""The status with which a process ends that has lost values."""

import subprocess
import sys

import pytest

from flatparam import _C


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 7),
        ("sys.exit(0)", 7),
        ("sys.exit(3)", 3),
        ("raise ValueError", 1),
        ("_C.set_exit_status(0)", 0),
        ("_C.set_exit_status(8)", 8),
        ("if os.fork(): sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) + 100)", 100),  # the child ends with 0
    ],
)
def test_the_status_takes_the_place_of_0(code, status):
    begin = "import atexit, os, sys; from flatparam import _C; _C.set_exit_status(7); atexit.register(print, 'end')"
    ended = subprocess.run([sys.executable, "-c", f"{begin}\n{code}"], capture_output=True, text=True)
    assert ended.returncode == status, ended.stderr
    assert "end" in ended.stdout


@pytest.mark.parametrize("status", [-1, 256, "1", 2**70])
def test_what_is_no_status_is_refused(status):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        _C.set_exit_status(status)
