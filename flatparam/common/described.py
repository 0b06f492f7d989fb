"""Descriptions in words of the things that ranks build: their digest, and the first difference between two.

``fsdp/desync/same_unit.py`` and ``dropin/comparing.py`` send them. This module issues no collective.
"""

import hashlib
import itertools
import re
from collections.abc import Sequence

Described = list[tuple[str, str]]  # (name, properties) of each thing that must be equal on all ranks


def digest_of_said(said: Described | str) -> bytes:
    """Return a digest of 32 bytes, equal on ranks with equal descriptions."""
    return hashlib.sha256(repr(said).encode()).digest()


def first_difference(ranks: Sequence[int], everyone: Sequence[Described], names: Sequence[str] = ()) -> str:
    """Return words for the first difference: between the first of ``ranks`` and the first other that differs.

    ``everyone``: the description of each of ``ranks``, which are not all equal. ``names``: for messages, the name of
    each rank's thing, which replaces the name of its first entry; empty: it has none.
    """
    first = everyone[0]
    names = names or [""] * len(ranks)
    for rank, other, name in zip(ranks, everyone, names, strict=True):
        for i in range(max(len(first), len(other))):
            expected, found = (side[i] if i < len(side) else ("nothing", "") for side in (first, other))
            if expected != found:
                one, two = _what_differs(expected[1], found[1])
                if i == 0:
                    expected, found = (names[0] or expected[0], ""), (name or found[0], "")
                inside = f", in {names[0]}" if i and names[0] else ""
                return f"rank {ranks[0]} has {expected[0]}{one}, rank {rank} has {found[0]}{two}{inside}"
    raise AssertionError("all ranks say the same, but have other digests of it")


def _what_differs(expected: str, found: str) -> tuple[str, str]:
    """Return the properties of both in parentheses, without those that both have in the same place.

    Commas outside of parentheses separate properties.
    """
    one, two = (re.split(r", (?![^()]*\))", what) for what in (expected, found))
    kept = [(a, b) for a, b in itertools.zip_longest(one, two, fillvalue="") if a != b]
    first, second = (", ".join(filter(None, side)) for side in zip(*kept, strict=True)) if kept else ("", "")
    return first and f" ({first})", second and f" ({second})"
