"""The exit status of a process that has lost values."""

import platform
import signal

import forked_scripts
import pytest

from flatparam import _C

with_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="nothing else tells the status at the end")
BEGIN = "import atexit, os, sys; from flatparam import _C; _C.set_exit_status(7); atexit.register(print, 'end')"


STATUSES = {  # of programs
    "": 7,
    "sys.exit(0)": 7,
    "sys.exit(3)": 3,
    "raise ValueError": 1,
    "_C.set_exit_status(0)": 0,
    "_C.set_exit_status(8)": 8,
    "if os.fork(): sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) + 100)": 100,  # the child ends with 0
}
READS = """
import ctypes, signal, threading, time
os.dup2(os.pipe()[0], 0)
signal.alarm(20)
libc = ctypes.CDLL(None)
stdin = ctypes.c_void_p.in_dll(libc, "stdin")
threading.Thread(target=lambda: libc.getc(stdin), daemon=True).start()
time.sleep(0.5)
"""
PLAIN_READS = f"import os\n{READS}"


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    programs = {code: (f"{BEGIN}\n{code}", []) for code in (*STATUSES, READS)}
    programs[PLAIN_READS] = PLAIN_READS, []
    found = forked_scripts.run(programs.values(), tmp_path_factory.mktemp("ends"))
    return dict(zip(programs, found, strict=True))


@with_glibc
@pytest.mark.parametrize("code", STATUSES)
def test_the_status_takes_the_place_of_0(ends, code):
    assert ends[code].status == STATUSES[code], ends[code].err
    assert "end" in ends[code].out


@with_glibc
def test_a_thread_that_reads_does_not_hold_up_the_end(ends):
    if ends[PLAIN_READS].status == -signal.SIGALRM:
        pytest.skip("this glibc waits at the end of any process for a stream that is read, as 2.43 does")
    assert ends[READS].status == 7, ends[READS].err


@pytest.mark.parametrize("status", [-1, 256, "1", 2**70])
def test_what_is_no_status_is_refused(status):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        _C.set_exit_status(status)
