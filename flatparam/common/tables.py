"""Tables for people: bytes with a unit, columns that line up, names of many things that differ in a number."""

from collections.abc import Iterable, Sequence
from typing import Any


def human(size: int) -> str:
    """Bytes with three digits or more."""
    value, unit = float(size), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, bigger
    return f"{size} B" if unit == "B" else f"{value:.{2 if value < 10 else 1}f} {unit}"


def aligned(rows: Sequence[tuple[str, ...]], names: int, headings: int, totals: int = 0) -> str:
    """A table: the first ``names`` columns to the left, the others to the right; rules below headings, above totals."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = "<" * names + ">" * (len(widths) - names)
    cells = [[f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in rows]
    lines = ["  ".join(row).rstrip() for row in cells]
    rule = "-" * max(map(len, lines))
    end = len(lines) - totals
    return "\n".join([*lines[:headings], rule, *lines[headings:end], *([rule, *lines[end:]] if totals else [])])


def without_numbers(name: str) -> str:
    """The same for names that differ only in parts that are numbers: ``blocks.*.weight``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def one_name_of(names: Sequence[str]) -> str:
    """One for all of ``names``, which are alike ``without_numbers``: ``blocks.{0..23}.weight``.

    A number that differs is its range where the names have all of that and no other number differs, else ``*``.
    """
    parts = list(zip(*(name.split(".") for name in names), strict=True))
    differing = [i for i, values in enumerate(parts) if len(set(values)) > 1]
    found = [values[0] for values in parts]
    for i in differing:
        numbers = sorted({int(value) for value in parts[i]})
        is_range = len(differing) == 1 and numbers == list(range(numbers[0], numbers[0] + len(names)))
        found[i] = f"{{{numbers[0]}..{numbers[-1]}}}" if is_range else "*"
    return ".".join(found)


def merged(rows: Iterable[tuple[Any, ...]], every: bool) -> list[tuple[Any, ...]]:
    """Rows whose names, the first of each, differ in numbers alone as one, with how many they are after the name; in
    the order of the first of each. ``every``: as many as they are."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, *rest in rows:
        groups.setdefault((name if every else without_numbers(name), *rest), []).append(name)
    return [(one_name_of(names), f"{len(names):,}", *rest) for (_, *rest), names in groups.items()]


def ranges(numbers: Iterable[int]) -> str:
    """``numbers`` in order, each once: ``0..3, 6``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
