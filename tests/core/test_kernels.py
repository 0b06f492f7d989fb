"""The bodies of the accelerator's kernels, run on the host over all blocks and threads, give torch's bits.

Oracles: torch's ``to``, ``div``, ``mul_``, ``add_`` and the core's packing; for norms torch in fp64.
"""

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_core_pack import DTYPES, PAIRS, assert_same_bits, computed_by_torch, lists_of_segments, memory, values

from benchmarks.c_testing import _C_testing
from flatparam import ShardError

STEP = 256 * 4  # a block takes this many vectors, where there is much to do


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def shifted(tensor, elements):
    """The values of a contiguous tensor in memory that begins ``elements`` after a multiple of 16 bytes."""
    room = torch.empty(len(tensor) + 16 + elements, dtype=tensor.dtype)
    skipped = -room.data_ptr() % 16 // room.element_size() + elements
    there = room[skipped : skipped + len(tensor)]
    there.copy_(tensor)
    assert len(tensor) == 0 or there.data_ptr() % 16 == elements * tensor.element_size() % 16
    return there


def expected_of(source, flat, before, scale, accumulate):
    return computed_by_torch(source.mul(before), flat, scale, accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("factor", "scale"), [(1.0, None), (1.0, 0.1), (0.25, None), (1 / 3, None), (2.0, -1e-3)])
@pytest.mark.parametrize(("source_dtype", "flat_dtype"), PAIRS)
def test_every_value_is_packed_as_torch_computes(source_dtype, flat_dtype, factor, scale, accumulate):
    source = values(source_dtype)
    n = len(source)
    before = torch.randn(n, generator=torch.Generator().manual_seed(5)).to(DTYPES[flat_dtype])
    flat = before.clone()
    cut = n // 3
    pieces = [(memory(source[:cut]), source_dtype, 0, cut, ()), (memory(source[cut:]), source_dtype, cut, n - cut, ())]
    _C_testing.kernel_pack(pieces, memory(flat), flat_dtype, 0, n, factor, scale, accumulate)
    assert_same_bits(flat, expected_of(source, before, factor, scale, accumulate))


def test_scaling_every_value():
    for (name, dtype), factor, in_fp64 in itertools.product(DTYPES.items(), (0.1, 1.0, -3e-5), (False, True)):
        source = values(name)
        given_factor = torch.tensor(factor, dtype=torch.float64 if in_fp64 else torch.float32)
        expected = source.clone().mul_(given_factor.to(dtype))
        cut = len(source) // 3
        _C_testing.kernel_scale([(memory(s), name, len(s)) for s in (source[:cut], source[cut:])], factor, in_fp64)
        assert_same_bits(source, expected)


@settings(deadline=None, max_examples=200)
@given(
    lists_of_segments(),
    st.lists(st.tuples(st.sampled_from(list(DTYPES)), st.integers(0, 7)), min_size=8, max_size=8),
    st.tuples(st.sampled_from(list(DTYPES)), st.integers(0, 7)),
    st.sampled_from([(1.0, None), (0.5, 1.7), (1 / 6, None)]),
    st.booleans(),
)
def test_ranges_gaps_and_alignments_of_any_dtypes(case, kinds, flat_kind, factors, accumulate):
    segments, flat_numel, begin, end = case
    flat_dtype = DTYPES[flat_kind[0]]
    before = torch.arange(1, flat_numel + 1, dtype=torch.float64).div(7).to(flat_dtype)
    flat, expected = shifted(before, flat_kind[1]), before.clone()
    if not accumulate:
        expected[begin:end] = 0
    pieces = []
    for (start, numel, has_memory), (name, offset) in zip(segments, kinds, strict=False):
        source = shifted(torch.linspace(-3, 3, numel, dtype=torch.float64).to(DTYPES[name]), offset)
        pieces.append((memory(source) if has_memory else None, name, start, numel, ()))
        low, high = max(start, begin), min(start + numel, end)
        if has_memory and low < high:
            part = expected_of(source[low - start : high - start], before[low:high], *factors, accumulate)
            expected[low:high] = part
    _C_testing.kernel_pack(pieces, memory(flat), flat_kind[0], begin, end, *factors, accumulate)
    assert_same_bits(flat, expected)


def test_the_core_packs_the_same_bits():
    """Long ranges, of which a thread takes several vectors at once, and short ones beside them."""
    generator = torch.Generator().manual_seed(1)
    cases = [(pair, 0, 0.3, True) for pair in PAIRS] + [(PAIRS[6], 0, None, False), (PAIRS[6], 1, None, True)]
    for (source_name, flat_name), offset, scale, accumulate in cases:
        width = 16 // DTYPES[flat_name].itemsize
        numels = [3, 0, 257 * STEP * width, 5, 7]
        starts = [0, 3, 4, 257 * STEP * width + 4, 257 * STEP * width + 20]
        total = starts[-1] + 11
        sources = [shifted(torch.randn(n, generator=generator).to(DTYPES[source_name]), offset) for n in numels]
        before = torch.randn(total, generator=generator).to(DTYPES[flat_name])
        ours, cores = shifted(before, 0), before.clone()
        listed = list(zip(map(memory, sources), starts, numels, strict=True))
        _C_testing.pack(listed, source_name, memory(cores), flat_name, 0, total, scale, accumulate)
        pieces = [(data, source_name, start, numel, ()) for data, start, numel in listed]
        _C_testing.kernel_pack(pieces, memory(ours), flat_name, 0, total, 1.0, scale, accumulate)
        assert_same_bits(ours, cores)


@st.composite
def strided(draw):
    """A tensor with any strides, overlapping ones too, and its dimensions."""
    numels = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    strides = [draw(st.integers(0, 40)) for _ in numels]
    return numels, strides


@settings(deadline=None, max_examples=150)
@given(st.lists(strided(), min_size=1, max_size=4), st.sampled_from(PAIRS), st.integers(0, 5), st.booleans())
@example([([4, 3], [1, 4])], ("float32", "float32"), 1, False)
def test_strided_pieces(shapes, dtypes, gap, accumulate):
    source_dtype, flat_dtype = (DTYPES[name] for name in dtypes)
    pieces, sources, position = [], [], 0
    for numels, strides in shapes:
        room = 1 + sum((n - 1) * s for n, s in zip(numels, strides, strict=True))
        base = torch.linspace(-4, 4, room, dtype=torch.float64).to(source_dtype)
        source = base.as_strided(numels, strides).reshape(-1)
        sources.append((position, source))
        dims = tuple(zip(numels, strides, strict=True))
        pieces.append((memory(base), dtypes[0], position, len(source), dims))
        position += len(source) + gap
    before = torch.arange(position, dtype=torch.float64).div(3).to(flat_dtype)
    flat = before.clone()
    expected = before.clone() if accumulate else torch.zeros_like(before)
    for start, source in sources:
        part = slice(start, start + len(source))
        expected[part] = computed_by_torch(source, before[part], None, accumulate)
    _C_testing.kernel_pack(pieces, memory(flat), dtypes[1], 0, position, 1.0, None, accumulate)
    assert_same_bits(flat, expected)


def test_a_piece_may_be_its_own_place():
    flat = torch.arange(100, dtype=torch.float32)
    expected = flat * 0.5
    _C_testing.kernel_pack([(memory(flat[2:90]), "float32", 2, 88, ())], memory(flat), "float32", 2, 90, 1.0, 0.5)
    assert flat.tolist() == [0, 1, *expected[2:90].tolist(), *range(90, 100)]


def test_many_pieces():
    """More than go along in 4 KiB of arguments, and as many as in 32."""
    sources = [torch.full((i % 7,), float(i)) for i in range(1004)]
    starts = list(itertools.accumulate((len(s) + i % 2 for i, s in enumerate(sources)), initial=0))
    flat, expected = torch.full((starts[-1],), 9.0), torch.zeros(starts[-1])
    for source, start in zip(sources, starts, strict=False):
        expected[start : start + len(source)] = source
    pieces = [(memory(s), "float32", start, len(s), ()) for s, start in zip(sources, starts, strict=False)]
    _C_testing.kernel_pack(pieces, memory(flat), "float32", 0, starts[-1])
    assert torch.equal(flat, expected)
    listed, together = [(memory(s), "float32", len(s)) for s in sources], torch.cat(sources)
    assert _C_testing.kernel_norm(listed, False) == together.double().square().sum()
    _C_testing.kernel_scale(listed, 0.5, False)
    assert torch.equal(torch.cat(sources), together * 0.5)


@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("most", [900, 4000])  # elements of a source: a block works once, or in rounds
def test_each_of_many_blocks_finds_its_pieces(most, offset, begin):
    generator = torch.Generator().manual_seed(most)
    numels = torch.randint(0, most, (680,), generator=generator).tolist()
    gaps = [i % 3 for i in range(680)]
    # then one element after the other around the borders of blocks, wherever the first one begins
    numels += [(-4 - begin - sum(numels) - sum(gaps)) % 1024, *([1] * 12 + [1012]) * 24]
    gaps += [0] * (len(numels) - 680)
    sources = [torch.randn(numel, generator=generator) for numel in numels]
    starts = list(itertools.accumulate((n + gap for n, gap in zip(numels, gaps, strict=True)), initial=begin))
    flat, expected = shifted(torch.full((starts[-1],), 9.0), offset), torch.full((starts[-1],), 9.0)
    expected[begin:] = 0
    for source, start in zip(sources, starts, strict=False):
        expected[start : start + len(source)] = source
    pieces = [(memory(s), "float32", start, len(s), ()) for s, start in zip(sources, starts, strict=False)]
    _C_testing.kernel_pack(pieces, memory(flat), "float32", begin, starts[-1])
    assert torch.equal(flat, expected)
    listed, together = [(memory(s), "float32", len(s)) for s in sources], torch.cat(sources)
    assert _C_testing.kernel_norm(listed, True) == together.abs().max()
    _C_testing.kernel_scale(listed, 0.5, False)
    assert torch.equal(torch.cat(sources), together * 0.5)


MANY = 600_000  # of fp64, so many that a thread takes several vectors at once where it may


@pytest.mark.parametrize(
    ("dims", "factor", "begin", "end"),
    [
        ((), 0.3, 0, MANY),
        (((1000, 1), (600, 1000)), 1.0, 0, MANY),
        (None, 1.0, 0, MANY),
        ((), 1.0, 3, MANY - 2000),
        ((), 1.0, 0, MANY),
    ],
    ids=["divided", "transposed", "zeros", "a part", "as it is"],
)
def test_a_large_piece(dims, factor, begin, end):
    source = torch.randn(MANY, generator=torch.Generator().manual_seed(3))
    flat, expected = torch.full((MANY,), 9.0, dtype=torch.float64), torch.full((MANY,), 9.0, dtype=torch.float64)
    laid_out = source.view(600, 1000).t().reshape(-1) if dims else torch.zeros_like(source) if dims is None else source
    expected[begin:end] = laid_out.mul(factor).double()[begin:end]
    piece = (None if dims is None else memory(source), "float32", 0, MANY, dims or ())
    _C_testing.kernel_pack([piece], memory(flat), "float64", begin, end, factor)
    assert torch.equal(flat, expected)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(list(DTYPES)), st.integers(0, 7), st.integers(0, 3000)), max_size=6))
@example([("float32", 1, 3_000_000), ("bfloat16", 3, 5)])
def test_norms(kinds):
    generator = torch.Generator().manual_seed(2)
    arrays = [
        shifted(torch.randn(numel, dtype=torch.float64, generator=generator).to(DTYPES[name]), offset)
        for name, offset, numel in kinds
    ]
    listed = [(memory(array), name_of(array.dtype), len(array)) for array in arrays]
    together = torch.cat([torch.zeros(1, dtype=torch.float64), *(array.double() for array in arrays)])
    squares = _C_testing.kernel_norm(listed, False)
    assert math.isclose(squares, together.square().sum().item(), rel_tol=1e-14)
    assert _C_testing.kernel_norm(listed, False) == squares
    assert _C_testing.kernel_norm(listed, True) == together.abs().max()


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_a_norm_of_millions_adds_each_up_once(name):
    """So many that a thread has several rounds, which pieces begin and end in. Sums of integers are exact."""
    numels = [5, 2_000_001, 7, 2_000_000, 20_000, 2_400_000]
    generator = torch.Generator().manual_seed(3)
    arrays = [shifted(torch.randint(-8, 9, (n,), generator=generator).to(DTYPES[name]), n % 8) for n in numels]
    listed = [(memory(array), name, len(array)) for array in arrays]
    assert _C_testing.kernel_norm(listed, False) == sum(array.double().square().sum().item() for array in arrays)
    arrays[3][1_234_567] = -9
    assert _C_testing.kernel_norm(listed, True) == 9


@pytest.mark.parametrize("where", [0, 5, 4096, 99_999])
def test_a_norm_with_a_nan_is_nan(where):
    array = torch.ones(100_000)
    array[where] = math.nan
    for is_max in (False, True):
        assert math.isnan(_C_testing.kernel_norm([(memory(array), "float32", len(array))], is_max))
    array[where] = -math.inf
    for is_max in (False, True):
        assert _C_testing.kernel_norm([(memory(array), "float32", len(array))], is_max) == math.inf


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(list(DTYPES)), st.integers(0, 7), st.integers(0, 500)), max_size=6))
def test_scaling_changes_these_elements_alone(kinds):
    rooms, listed, expected = [], [], []
    for name, offset, numel in kinds:
        room = torch.linspace(1, 2, numel + 2 * offset, dtype=torch.float64).to(DTYPES[name])
        wanted = room.clone()
        wanted[offset : offset + numel].mul_(torch.tensor(0.3).to(DTYPES[name]))
        rooms.append(room)
        expected.append(wanted)
        listed.append((memory(room[offset : offset + numel]), name, numel))
    _C_testing.kernel_scale(listed, 0.3, False)
    for room, wanted in zip(rooms, expected, strict=True):
        assert_same_bits(room, wanted)


def test_what_does_not_fit_is_refused():
    flat, data = bytearray(32), bytes(16)
    for pieces in (
        [(data, "float32", 2, 4, ()), (data, "float32", 0, 2, ())],
        [(data, "float32", 0, 5, ())],
        [(data, "float32", 0, 4, ((2, 1), (2, 3)))],
        [(data, "float32", 0, 4, ((2, 1),))],
    ):
        with pytest.raises(ShardError):
            _C_testing.kernel_pack(pieces, flat, "float32", 0, 8)
    for begin, end in ((-1, 8), (5, 4), (0, 9)):
        with pytest.raises(ShardError):
            _C_testing.kernel_pack([], flat, "float32", begin, end)
    with pytest.raises(ShardError):
        _C_testing.kernel_norm([(bytearray(16), "float32", 5)], False)
    for wrong in (None, 5, [None], [(data, "float32", 4)]):
        with pytest.raises(TypeError):
            _C_testing.kernel_pack(wrong, flat, "float32", 0, 8)
    assert flat == bytes(32)
