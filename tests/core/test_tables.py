"""Tables for people: one name for many that differ in a number."""

import pytest

from flatparam.common.tables import merged, one_name_of


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ((7,), "blocks.7.w"),
        (range(24), "blocks.{0..23}.w"),
        ((3, 2), "blocks.{2..3}.w"),
        ((0, 2), "blocks.{0,2}.w"),
        ((0, 1, 2, 5, 8, 9, 10), "blocks.{0..2,5,8..10}.w"),
        (range(0, 10, 2), "blocks.{0,2,4,...}.w"),
    ],
)
def test_a_number_that_differs_is_given_in_ranges(numbers, name):
    assert one_name_of([f"blocks.{i}.w" for i in numbers]) == name


def test_several_numbers_that_differ_are_stars():
    assert one_name_of([f"blocks.{i}.experts.{k}.w" for i in range(2) for k in range(3)]) == "blocks.*.experts.*.w"
    assert merged([("a.1", 5), ("b.1", 5), ("a.2", 5), ("a.3", 6)], False) == [
        ("a.{1..2}", "2", 5),
        ("b.1", "1", 5),
        ("a.3", "1", 6),
    ]
