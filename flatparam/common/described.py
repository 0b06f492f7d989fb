"""What ranks build, in words, so that they can find out whether that is the same, and say where it differs."""

import hashlib
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
                return f"rank {ranks[0]} has {expected[0]} ({expected[1]}), rank {rank} has {found[0]} ({found[1]})"
    raise AssertionError("all ranks say the same, but have other digests of it")
