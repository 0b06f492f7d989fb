"""What ranks build, in words, so that they can find out whether that is the same, and say where it differs."""

import hashlib
import re
from collections.abc import Sequence

Described = list[tuple[str, str]]  # (name, what it is) of everything that must be the same on all ranks


def digest_of_said(said: Described | str) -> bytes:
    """32 bytes that are the same on ranks that say the same."""
    return hashlib.sha256(repr(said).encode()).digest()


def first_difference(ranks: Sequence[int], everyone: Sequence[Described]) -> str:
    """Where the first of ``ranks`` that differs from the first one does, and in what. ``everyone``: what each says."""
    first = everyone[0]
    for rank, other in zip(ranks, everyone, strict=True):
        for i in range(max(len(first), len(other))):
            expected, found = (side[i] if i < len(side) else ("nothing", "-") for side in (first, other))
            if expected != found:
                one, two = _what_differs(expected, found)
                return f"rank {ranks[0]} has {expected[0]} ({one}), rank {rank} has {found[0]} ({two})"
    raise AssertionError("all ranks say the same, but have other digests of it")


def _what_differs(expected: tuple[str, str], found: tuple[str, str]) -> tuple[str, str]:
    """What the two are; of one name with as many parts, which commas outside of parentheses part: those that differ."""
    one, two = (re.split(r", (?![^()]*\))", what) for _, what in (expected, found))
    if expected[0] != found[0] or len(one) != len(two):
        return expected[1], found[1]
    other = [pair for pair in zip(one, two, strict=True) if pair[0] != pair[1]]
    return ", ".join(pair[0] for pair in other), ", ".join(pair[1] for pair in other)
