"""Packing gives torch's bits: to(), mul_() and add_() for every pair of dtypes, on every SIMD level.

Oracle: torch on the same values. Where torch's result is a NaN, ours has to be one, no matter which.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.c_testing import _C_testing
from flatparam import ShardError

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PAIRS = list(itertools.product(DTYPES, DTYPES))
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


@pytest.fixture(params=_C_testing.simd_levels())
def level(request):
    """Run the test on each SIMD level that works here."""
    before = _C_testing.simd_level()
    assert _C_testing.simd_level(request.param) == request.param
    yield request.param
    _C_testing.simd_level(before)


def memory(tensor):
    """Return the bytes of a contiguous tensor, to read and to write."""
    return memoryview(tensor.view(torch.uint8).numpy())


def assert_same_bits(ours, torchs):
    assert torch.equal(ours.isnan(), torchs.isnan())
    bits = BITS[ours.element_size()]
    differ = (ours.view(bits) != torchs.view(bits)) & ~torchs.isnan()
    assert not differ.any(), (int(differ.sum()), ours[differ][:5], torchs[differ][:5])


def values(name):
    """Return values of a dtype: all that there are of 16 bits, else random bits and values near rounding borders."""
    generator = torch.Generator().manual_seed(3)
    if DTYPES[name].itemsize == 2:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(DTYPES[name])
    bits = torch.randint(-(2**63), 2**63 - 1, (30_011,), generator=generator)
    normal = torch.randn(10_007, dtype=torch.float64, generator=generator)
    halves = torch.arange(-(2**15), 2**15, 5).to(torch.int16)
    ties = halves.view(torch.float16).double() * (1 + 2.0**-11)  # halfway between two fp16, some a little off
    ties_bf16 = (halves.int().bitwise_left_shift(16) + 0x8000).view(torch.float32).double()
    near = torch.cat([ties, ties_bf16, ties_bf16 * (1 + 2.0**-30), ties_bf16 * (1 - 2.0**-30)])
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504, 65519.99, 65520, 1e-8, 2.0**-25, 1e-46])
    numbers = torch.cat([normal, normal * 1e-6, normal * 1e5, normal * 1e-40, special.double(), near])
    if name == "float64":
        return torch.cat([bits.view(torch.float64), numbers])
    return torch.cat([bits.to(torch.int32).view(torch.float32), numbers.float()])


def computed_by_torch(source, destination, scale, accumulate):
    result = source.to(destination.dtype, copy=True)
    if scale is not None:
        result.mul_(scale)
    return destination.clone().add_(result) if accumulate else result


@pytest.mark.sweep(12)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("scale", [None, 0.1, -1e-3])
@pytest.mark.parametrize(("source_dtype", "flat_dtype"), PAIRS)
def test_every_value_is_packed_as_torch_computes(level, source_dtype, flat_dtype, scale, accumulate):
    source = values(source_dtype)
    n = len(source)
    before = torch.randn(n, generator=torch.Generator().manual_seed(5)).to(DTYPES[flat_dtype])
    flat = before.clone()
    cut = n // 3  # odd lengths and offsets: heads and tails of the vector loops
    segments = [(memory(source[:cut]), 0, cut), (memory(source[cut:]), cut, n - cut)]
    for begin, end in [(0, 7), (7, cut + 1), (cut + 1, n)]:
        _C_testing.pack(segments, source_dtype, memory(flat), flat_dtype, begin, end, scale, accumulate)
    assert_same_bits(flat, computed_by_torch(source, before, scale, accumulate))


@st.composite
def lists_of_segments(draw):
    """Return [(start, numel, has memory)], the flat size and a range of it; gaps, empty segments, cuts anywhere."""
    position, segments = 0, []
    for gap, numel, has_memory in draw(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50), st.booleans()), max_size=8)
    ):
        segments.append((position + gap, numel, has_memory))
        position += gap + numel
    flat_numel = position + draw(st.integers(0, 20))
    begin = draw(st.integers(0, flat_numel))
    return segments, flat_numel, begin, draw(st.integers(begin, flat_numel))


@settings(deadline=None, max_examples=300)
@given(
    lists_of_segments(),
    st.sampled_from(PAIRS),
    st.sampled_from([None, 0.5, 1.7]),
    st.booleans(),
    st.sampled_from(_C_testing.simd_levels()),
)
def test_ranges_and_gaps(case, dtypes, scale, accumulate, level):
    segments, flat_numel, begin, end = case
    segment_dtype, flat_dtype = (DTYPES[name] for name in dtypes)
    before = torch.arange(1, flat_numel + 1, dtype=torch.float64).div(7).to(flat_dtype)
    flat, expected = before.clone(), before.clone()
    if not accumulate:
        expected[begin:end] = 0
    given_segments = []
    for start, numel, has_memory in segments:
        source = torch.linspace(-3, 3, numel, dtype=torch.float64).to(segment_dtype)
        given_segments.append((memory(source) if has_memory else None, start, numel))
        low, high = max(start, begin), min(start + numel, end)
        if low >= high:
            continue
        if has_memory:
            expected[low:high] = computed_by_torch(source, before[start : start + numel], scale, accumulate)[
                low - start : high - start
            ]
        elif not accumulate:
            expected[low:high] = 0
    before_level = _C_testing.simd_level()
    _C_testing.simd_level(level)
    _C_testing.pack(given_segments, dtypes[0], memory(flat), dtypes[1], begin, end, scale, accumulate)
    _C_testing.simd_level(before_level)
    assert_same_bits(flat, expected)


@settings(deadline=None, max_examples=150)
@given(lists_of_segments(), st.integers(1, 17), st.booleans())
def test_raw_bytes(case, item_bytes, has_fill):
    segments, flat_numel, begin, end = case
    fill = bytes(range(7, 7 + item_bytes)) if has_fill else None
    flat = bytearray(b"\xee" * flat_numel * item_bytes)
    expected = bytearray(flat)
    expected[begin * item_bytes : end * item_bytes] = (fill or bytes(item_bytes)) * (end - begin)
    given_segments = []
    for number, (start, numel, has_memory) in enumerate(segments):
        source = bytes((number * 31 + i) % 251 for i in range(numel * item_bytes))
        given_segments.append((source if has_memory else None, start, numel))
        low, high = max(start, begin), min(start + numel, end)
        if low < high:
            part = source[(low - start) * item_bytes : (high - start) * item_bytes]
            expected[low * item_bytes : high * item_bytes] = part if has_memory else bytes(len(part))
    _C_testing.pack_raw(given_segments, item_bytes, flat, begin, end, fill)
    assert flat == expected


def test_addresses_need_no_alignment(level):
    source = torch.randn(1000)
    data = bytearray(1 + 4000)
    data[1:] = memory(source)
    flat = bytearray(3 + 2000)
    _C_testing.pack([(memoryview(data)[1:], 0, 1000)], "float32", memoryview(flat)[3:], "bfloat16", 0, 1000, 0.5)
    result = torch.frombuffer(bytearray(flat[3:]), dtype=torch.bfloat16)
    assert_same_bits(result, source.bfloat16().mul_(0.5))


def test_a_segment_may_be_its_own_place_in_the_flat_buffer():
    flat = torch.arange(10, dtype=torch.float32)
    expected = flat * 0.5
    _C_testing.pack([(memory(flat[2:6]), 2, 4)], "float32", memory(flat), "float32", 2, 6, 0.5)
    assert flat.tolist() == [0, 1, *expected[2:6].tolist(), 6, 7, 8, 9]
    with pytest.raises(ShardError, match="segment 0 overlaps"):
        _C_testing.pack([(memory(flat[2:6]), 3, 4)], "float32", memory(flat), "float32", 0, 10)
    with pytest.raises(ShardError, match="segment 0 overlaps"):
        _C_testing.pack([(memory(flat[2:6]), 2, 4)], "bfloat16", memory(flat), "float32", 0, 10)


def test_big_ranges_let_other_threads_run_and_hold_the_memory():
    source, flat = bytearray(b"\1" * (1 << 22)), bytearray(1 << 22)
    _C_testing.pack_raw([(source, 0, 1 << 22)], 1, flat, 0, 1 << 22)
    assert flat == source
    source.append(1)  # not exported any more: bytearrays refuse to grow while they are
    flat.append(1)


@pytest.mark.parametrize(
    ("segments", "begin", "end"),
    [
        ([(bytes(16), 2, 4), (bytes(16), 0, 2)], 0, 8),  # not sorted
        ([(bytes(16), 0, 4), (bytes(16), 3, 4)], 0, 8),  # overlapping
        ([(bytes(16), -1, 4)], 0, 8),
        ([(bytes(16), 0, -1)], 0, 8),
        ([(None, 0, -1)], 0, 8),
        ([(None, 1, 2**63 - 1)], 0, 8),
        ([(bytes(16), 0, 5)], 0, 8),  # more than it holds
        ([(bytes(16), 0, 2**62)], 0, 8),
        ([], -1, 8),
        ([], 5, 4),
        ([], 0, 9),  # more than flat holds
        ([], 0, 2**62),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(segments, begin, end):
    flat = bytearray(b"\xee" * 32)
    with pytest.raises(ShardError):
        _C_testing.pack(segments, "float32", flat, "float32", begin, end)
    with pytest.raises(ShardError):
        _C_testing.pack_raw(segments, 4, flat, begin, end)
    assert flat == b"\xee" * 32


def test_wrong_types_are_refused():
    flat = bytearray(32)
    good = [[(bytes(16), 0, 4)], "float32", flat, "float32", 0, 8, None, False]
    wrong = {
        0: [None, 5, [None], [()], [(bytes(16), 0)], [[bytes(16), 0, 4]], [(5, 0, 4)], [(bytes(16), 0.0, 4)]],
        1: [None, 3, b"float32"],
        2: [None, 5, bytes(32), "x", memoryview(bytearray(64))[::2]],
        3: [None, 3],
        4: [None, 0.0, "0"],
        5: [None, 8.0],
        6: ["1", (), 1j],
        7: [None, 1, "yes"],
    }
    for position, candidates in wrong.items():
        for candidate in candidates:
            with pytest.raises(TypeError):
                _C_testing.pack(*good[:position], candidate, *good[position + 1 :])
    for name in ("float8", "FLOAT32", "", "float32\0"):
        with pytest.raises(ValueError, match="expected float64"):
            _C_testing.pack(good[0], name, *good[2:])
    with pytest.raises(OverflowError):
        _C_testing.pack([(bytes(16), 2**63, 4)], *good[1:])
    with pytest.raises(TypeError, match="from 6 to 8 arguments"):
        _C_testing.pack(*good[:5])
    with pytest.raises(TypeError, match="writable"):
        _C_testing.pack(*good[:2], bytes(32), *good[3:])
    for call in (lambda: _C_testing.pack_raw([], None, flat, 0, 8), lambda: _C_testing.pack_raw([], 4, flat, 0, 8, 5)):
        with pytest.raises(TypeError):
            call()
    for call in (
        lambda: _C_testing.pack_raw([], 0, flat, 0, 8),
        lambda: _C_testing.pack_raw([], 4, flat, 0, 8, b"abc"),
    ):
        with pytest.raises(ShardError, match="expected"):
            call()


def test_levels():
    levels = _C_testing.simd_levels()
    assert levels[0] == "baseline"
    assert _C_testing.simd_level() in levels
    assert _C_testing.simd_level(None) == _C_testing.simd_level()
    for name in ("sse9", "", "baseline\0"):
        with pytest.raises(ValueError, match="simd_levels"):
            _C_testing.simd_level(name)
    with pytest.raises(TypeError):
        _C_testing.simd_level(1)
    with pytest.raises(TypeError):
        _C_testing.simd_levels(1)


def test_the_best_level_of_this_processor_is_used_unless_one_is_chosen():
    with open("/proc/cpuinfo") as file:
        flags = set(file.read().replace(":", " ").split())
    if {"avx512f", "avx512bw"} <= flags:
        expected = "avx512"
    elif {"avx2", "f16c"} <= flags:
        expected = "avx2"
    else:
        expected = "neon" if "asimd" in flags else "baseline"
    assert _C_testing.simd_levels()[-1] == expected
