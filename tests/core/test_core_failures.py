"""Each allocation of the core's wrappers fails once: a MemoryError, nothing left over, nothing half changed.

Two switches: the core's own (alloc_fail_at), and hooks in the interpreter's allocators (tests/c/nomem.c).
"""

import ctypes
import operator
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from benchmarks.c_testing import _C_testing
from flatparam import _C, ShardError

SOURCE = Path(__file__).parents[1] / "c" / "nomem.c"
MOST_ALLOCATIONS = 2000

NUMELS = [3, 300, 70000]
PIECES = [bytes(range(16)), bytes(range(100, 116))]
FLAT = bytearray(64)


LAYOUT = _C.Layout(NUMELS, 4, 4, 4)
SEGMENTS = [(PIECES[0], 0, 4), (None, 5, 2), (PIECES[1], 8, 4)]

# What is called: (a function in C, its arguments). In Python code a failed allocation can end in a SystemError of the
# interpreter's own, which loses the exception when it cannot make a traceback.
CALLS = {
    "Layout": (_C.Layout, NUMELS, 4, 4, 4),
    "Layout with blocks": (_C.Layout, NUMELS, 4, 4, 4, [1, 300, 7]),
    "shard_range": (LAYOUT.shard_range, 3),
    "params_in": (LAYOUT.params_in, 300, 70000),
    "parts": (LAYOUT.parts, 2, 70000),
    **{name: (operator.attrgetter(name), LAYOUT) for name in ("offsets", "numels", "numels_with_padding")},
    "is_padding_mask": (operator.attrgetter("is_padding_mask"), LAYOUT),
    "padded_numel": (operator.attrgetter("padded_numel"), LAYOUT),
    "boxes_of_range": (_C.boxes_of_range, (2000, 3000, 700), 1001, 3 * 10**9),
    "pack": (_C_testing.pack, SEGMENTS, "float32", FLAT, "float32", 0, 16),
    "pack scaled": (_C_testing.pack, tuple(SEGMENTS), "float32", FLAT, "float32", 0, 16, 0.5, False),
    "pack_raw": (_C_testing.pack_raw, [(PIECES[0], 0, 5), (PIECES[1], 8, 5)], 3, FLAT, 0, 16, b"abc"),
    "simd_levels": (_C_testing.simd_levels,),
    "simd_level": (_C_testing.simd_level, _C_testing.simd_level()),
    # and what is refused
    "Layout of a negative size": (_C.Layout, [1000, -(10**12)], 4, 4, 4),
    "Layout of too few blocks": (_C.Layout, NUMELS, 4, 4, 4, [1]),
    "Layout of no block": (_C.Layout, NUMELS, 4, 4, 4, [1, 0, 1]),
    "Layout of a block of no number": (_C.Layout, NUMELS, 4, 4, 4, [1, "3", 1]),
    "Layout of no number": (_C.Layout, [1000, "3"], 4, 4, 4),
    "shard_range of no rank": (LAYOUT.shard_range, 4),
    "parts of no range": (LAYOUT.parts, 5, 4),
    "boxes_of_range of no range": (_C.boxes_of_range, (1000, 3), 0, 3001),
    "boxes_of_range of too many dimensions": (_C.boxes_of_range, (1,) * 65, 0, 1),
    "pack of too much": (_C_testing.pack, [(PIECES[0], 0, 4), (PIECES[1], 4, 5)], "float32", FLAT, "float32", 0, 16),
    "pack out of order": (_C_testing.pack, [(PIECES[0], 4, 4), (PIECES[1], 0, 4)], "float32", FLAT, "float32", 0, 16),
    "pack into too little": (_C_testing.pack, SEGMENTS, "float32", FLAT, "float32", 0, 17),
    "pack into what overlaps": (_C_testing.pack, [(FLAT, 1, 4)], "float32", FLAT, "float32", 0, 16),
    "pack into what is read-only": (_C_testing.pack, SEGMENTS, "float32", PIECES[1], "float32", 0, 4),
    "pack of no segment": (_C_testing.pack, [(PIECES[0], 0, 4), 5], "float32", FLAT, "float32", 0, 16),
    "pack of no number": (_C_testing.pack, [(PIECES[0], 0, 4), (PIECES[0], 4, "4")], "float32", FLAT, "float32", 0, 16),
    "pack_raw of another fill": (_C_testing.pack_raw, [(PIECES[0], 0, 5)], 3, FLAT, 0, 16, b"abcd"),
    "pack_raw out of order": (_C_testing.pack_raw, [(PIECES[0], 0, 5), (PIECES[1], 3, 5)], 3, FLAT, 0, 16),
    "simd_level of no level": (_C_testing.simd_level, "sse9"),
}


@pytest.fixture(scope="module")
def nomem(tmp_path_factory):
    """Compile and load the library that makes the interpreter's allocations fail."""
    library = tmp_path_factory.mktemp("nomem") / "nomem.so"
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("gcc") or "cc"]
    include = sysconfig.get_path("include")
    command = [*compiler, "-shared", "-fPIC", "-O1", "-isystem", include, str(SOURCE), "-o", str(library)]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(command, check=True, env=environment)
    nomem_call = ctypes.PyDLL(str(library)).nomem_call
    nomem_call.restype = ctypes.py_object
    nomem_call.argtypes = [ctypes.py_object, ctypes.py_object, ctypes.c_long, ctypes.c_void_p]

    def call_with_failure(function, arguments, k):
        has_failed = ctypes.c_int()
        result = outcome(nomem_call, function, arguments, k, ctypes.addressof(has_failed))
        return result, bool(has_failed.value)

    return call_with_failure


def call_with_core_failure(function, arguments, k):
    """Call while the k-th allocation of the core fails; return the result or error, and whether it came to that."""
    _C_testing.alloc_fail_at(k)
    result = outcome(function, *arguments)
    _C_testing.alloc_fail_at(0)
    return result, isinstance(result, MemoryError)


def outcome(function, *arguments):
    """Return what a call gives, or its error."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


def as_value(result):
    """Return a result so that it can be compared: an error by its type and words, a layout by what it tells."""
    if isinstance(result, Exception):
        return type(result), str(result)
    if isinstance(result, _C.Layout):
        return result.offsets, result.numels_with_padding, result.is_padding_mask, result.padded_numel
    return result


def contents():
    return bytes(FLAT)


def set_buffer():
    FLAT[:] = b"\x3e" * len(FLAT)


def without_message(expected):
    """What PyErr_Format() of older interpreters raises where there is no memory for the message."""
    return (expected[0], "") if sys.version_info < (3, 11, 7) and isinstance(expected, tuple) else expected


def check_every_failure(call, call_with_failure):
    """Make the first, the second, ... allocation of a call fail, until it needs no more; return how many there were."""
    function, *arguments = call
    set_buffer()
    before = contents()
    expected = as_value(outcome(function, *arguments))
    expected_contents, live = contents(), _C_testing.alloc_live()
    for k in range(1, MOST_ALLOCATIONS):
        set_buffer()
        found, has_failed = call_with_failure(function, tuple(arguments), k)
        if isinstance(found, MemoryError):
            assert has_failed
            assert contents() == before
        else:
            assert as_value(found) in (expected, without_message(expected)), k
            assert contents() == expected_contents
        del found
        assert _C_testing.alloc_live() == live
        if not has_failed:
            return k - 1
    raise AssertionError(f"more than {MOST_ALLOCATIONS} allocations")


@pytest.mark.parametrize("name", CALLS)
def test_each_allocation_of_the_interpreter_fails_once(name, nomem):
    check_every_failure(CALLS[name], nomem)  # of small tuples the interpreter keeps some: there may be no allocation


def test_the_failures_do_come(nomem):
    assert check_every_failure(CALLS["Layout"], nomem) >= 1
    assert check_every_failure(CALLS["boxes_of_range"], nomem) >= 2  # Python 3.14 allocates less
    assert check_every_failure(CALLS["Layout of a negative size"], nomem) >= 2


@pytest.mark.parametrize(("name", "allocations"), [("Layout", 2), ("boxes_of_range", 2), ("pack", 2), ("pack_raw", 2)])
def test_each_allocation_of_the_core_fails_once(name, allocations):
    assert check_every_failure(CALLS[name], call_with_core_failure) == allocations


@pytest.mark.parametrize("name", CALLS)
def test_nothing_leaks(name):
    """Neither a block of memory, nor a reference to an argument, over many calls, good ones and refused ones."""
    arguments = [NUMELS, *PIECES, FLAT, None, True, False, ShardError]

    def used():
        return [sys.getrefcount(argument) for argument in arguments], _C_testing.alloc_live(), sys.getallocatedblocks()

    for _ in range(20):
        outcome(*CALLS[name])
    references, live, blocks = used()
    for _ in range(500):
        outcome(*CALLS[name])
    references_after, live_after, blocks_after = used()
    assert live_after == live
    assert abs(blocks_after - blocks) < 100
    assert all(abs(after - before) < 100 for before, after in zip(references, references_after, strict=True))
    FLAT.append(0)  # not exported any more: a bytearray refuses to grow while it is
    del FLAT[64:]
