"""An element range of an N-D parameter as boxes: they tile it in order, and no cut into runs has fewer boxes.

Oracle: listing the elements; for the number of boxes the fewest over all cuts of the listed elements into runs.
"""

import functools
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatparam import _C, ShardError
from flatparam.common.layout import Box, boxes_of_range


def indices(shape, begin, end):
    """Return the index tuples of elements [begin, end)."""
    return list(itertools.islice(itertools.product(*map(range, shape)), begin, end))


def cells_of(box):
    return list(itertools.product(*(range(start, start + size) for start, size in zip(*box, strict=True))))


@functools.cache
def is_box(shape, begin, end):
    """Whether elements [begin, end) are a box: as many as their extents have."""
    extents = [max(axis) - min(axis) + 1 for axis in zip(*indices(shape, begin, end), strict=True)]
    return math.prod(extents) == end - begin


def fewest_runs(shape, begin, end):
    """The fewest consecutive runs that tile the range, each of which is a box, by trying all cuts."""
    fewest = [0]  # of the first so many elements
    for last in range(begin + 1, end + 1):
        fewest.append(1 + min(fewest[first - begin] for first in range(begin, last) if is_box(shape, first, last)))
    return fewest[-1]


@st.composite
def ranges(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=5).filter(lambda sizes: math.prod(sizes) <= 2000)))
    begin = draw(st.integers(0, math.prod(shape)))
    return shape, begin, draw(st.integers(begin, math.prod(shape)))


@settings(deadline=None, max_examples=400)
@given(ranges())
def test_boxes_tile_the_range_exactly(arguments):
    shape, begin, end = arguments
    boxes = boxes_of_range(shape, begin, end)
    assert [cell for box in boxes for cell in cells_of(box)] == indices(shape, begin, end)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(size > 0 for box in boxes for size in box.sizes)


SMALL = [(7,), (4, 3), (2, 2, 2), (3, 3, 2), (2, 3, 3), (3, 2, 3), (3, 3, 3), (4, 4, 3), (2, 1, 2, 3)]
SMALL += [(2, 2, 2, 2), (3, 2, 2, 2), (2, 3, 2, 2), (2, 2, 3, 2), (2, 2, 2, 3), (3, 2, 3, 2), (2, 2, 2, 2, 2)]


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_no_cut_into_runs_has_fewer_boxes(shape):
    numel = math.prod(shape)
    for begin, end in itertools.combinations(range(numel + 1), 2):
        assert len(boxes_of_range(shape, begin, end)) == fewest_runs(shape, begin, end), (shape, begin, end)


def test_boxes_of_a_shard():
    assert boxes_of_range((4, 2), 1, 7) == [Box((0, 1), (1, 1)), Box((1, 0), (2, 2)), Box((3, 0), (1, 1))]
    assert len(boxes_of_range((1000, 3, 512, 512), 7, 7 + 999 * 3 * 512 * 512)) == 5


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 2**12), min_size=1, max_size=7), st.data())
def test_boxes_of_shapes_that_no_test_could_list(shape, data):
    numel = math.prod(shape)
    if numel >= 2**63:
        with pytest.raises(ShardError):
            boxes_of_range(shape, 0, 0)
        return
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    boxes = boxes_of_range(shape, begin, end)
    assert sum(math.prod(box.sizes) for box in boxes) == end - begin
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    for box in boxes:  # with that sum, inside the range and disjoint means exact
        first = sum(start * stride for start, stride in zip(box.offsets, strides, strict=True))
        last = first + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
        assert begin <= first <= last < end
        assert all(start + size <= limit for start, size, limit in zip(*box, shape, strict=True))
    for a, b in itertools.combinations(boxes, 2):
        assert any(
            a.offsets[d] + a.sizes[d] <= b.offsets[d] or b.offsets[d] + b.sizes[d] <= a.offsets[d]
            for d in range(len(shape))
        )


def test_scalars_and_empty_ranges():
    assert boxes_of_range((), 0, 1) == [Box((), ())]
    assert boxes_of_range((), 0, 0) == boxes_of_range((3, 4), 5, 5) == boxes_of_range((0, 4), 0, 0) == []
    assert boxes_of_range((2**62, 0, 2**62), 0, 0) == []
    assert boxes_of_range((1,) * 64, 0, 1) == [Box((0,) * 64, (1,) * 64)]


@pytest.mark.parametrize(
    ("shape", "begin", "end"),
    [((3,), -1, 2), ((3,), 2, 1), ((3,), 0, 4), ((0,), 0, 1), ((-1,), 0, 0), ((2**32, 2**31), 0, 1), ((1,) * 65, 0, 1)],
)
def test_ranges_out_of_range_are_refused(shape, begin, end):
    with pytest.raises(ShardError, match="expected"):
        boxes_of_range(shape, begin, end)


def test_wrong_types_are_refused():
    for arguments in [(3, 0, 1), ((1.0,), 0, 1), ((3,), 0.0, 1), ((3,), 0, None), (None, 0, 1), ("3", 0, 1)]:
        with pytest.raises(TypeError):
            _C.boxes_of_range(*arguments)
    with pytest.raises(TypeError, match="exactly 3 arguments"):
        _C.boxes_of_range((3,), 0)
    with pytest.raises(OverflowError):
        _C.boxes_of_range((2**63,), 0, 1)
