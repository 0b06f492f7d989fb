"""Text tables for people: byte sizes with units, aligned columns, one name for many that differ in a number.

The reports of ``advise``, ``inspect``, ``checkpoint`` and printed models use them.
"""

from collections.abc import Iterable, Sequence
from typing import Any


def human(size: int) -> str:
    """Return ``size`` bytes in the smallest unit with a number below 1000, such as ``1.50 GiB``; TiB is the largest."""
    value, unit = float(size), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, bigger
    return f"{size} B" if unit == "B" else f"{value:.{2 if value < 10 else 1}f} {unit}"


def many(count: int, word: str) -> str:
    """Return ``count`` and the ``word``, in the plural unless it is one: ``1 rank``, ``1,024 ranks``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def aligned(rows: Sequence[tuple[str, ...]], names: int, headings: int, totals: int = 0) -> str:
    """Return a table of ``rows``: the first ``names`` columns left-aligned, the others right-aligned.

    A rule follows the first ``headings`` rows, and another precedes the last ``totals`` rows.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = "<" * names + ">" * (len(widths) - names)
    cells = [[f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in rows]
    lines = ["  ".join(row).rstrip() for row in cells]
    rule = "-" * max(map(len, lines))
    end = len(lines) - totals
    return "\n".join([*lines[:headings], rule, *lines[headings:end], *([rule, *lines[end:]] if totals else [])])


def without_numbers(name: str) -> str:
    """Replace the parts of ``name`` that are numbers: ``blocks.3.weight`` becomes ``blocks.*.weight``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def in_order(name: str) -> list[tuple[int, str]]:
    """Return the key that sorts names by their parts, and parts that are numbers by their value: 2 before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def one_name_of(names: Sequence[str]) -> str:
    """Return one name for all ``names``, which are equal ``without_numbers``: ``blocks.{0..23}.weight``.

    If one number differs, the name has its ranges, the first three of more than four: ``blocks.{0..2,5}``,
    ``blocks.{0,2,4,...}``. Of several that differ each becomes a ``*``.
    """
    parts = list(zip(*(name.split(".") for name in names), strict=True))
    differing = [i for i, values in enumerate(parts) if len(set(values)) > 1]
    found = [values[0] for values in parts]
    for i in differing:
        runs = ranges(map(int, parts[i])).split(", ")
        runs = [*runs[:3], "..."] if len(runs) > 4 else runs
        found[i] = f"{{{','.join(runs)}}}" if len(differing) == 1 else "*"
    return ".".join(found)


def merged(rows: Iterable[tuple[Any, ...]], every: bool) -> list[tuple[Any, ...]]:
    """Merge rows ``(name, *rest)`` that have equal ``rest`` and names that differ in numbers only.

    Returns rows ``(name, count, *rest)``, in the order of the first row of each. ``every``: merge equal names only.
    """
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, *rest in rows:
        groups.setdefault((name if every else without_numbers(name), *rest), []).append(name)
    return [(one_name_of(names), f"{len(names):,}", *rest) for (_, *rest), names in groups.items()]


def ranges(numbers: Iterable[int]) -> str:
    """Return ``numbers`` in order and without duplicates, with ranges: ``0..3, 6``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
