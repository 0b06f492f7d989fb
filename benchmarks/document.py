"""The tables as Markdown, each into its place in a page, between ``<!-- table KEY -->`` and ``<!-- end -->``.

Users read docs/performance.md and docs/gpu.md, without targets; maintainers read the targets, met and missed, in
docs/targets.md.
``read`` takes the figures out of a page again, to draw them.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.handles import OURS, TORCH
from benchmarks.rows import Row, Table, cell, columns, number, verdict

FIGURE = r"(-?[\d.]+(?:e[+-]?\d+)?)"
CELL = re.compile(rf"{FIGURE} ?([^ =]*)(?: = {FIGURE}x \({FIGURE}-{FIGURE}\))?")  # of rows.cell()


TARGETS = Path(__file__).parents[1] / "docs" / "targets.md"


def write(
    tables: Mapping[str, Table],
    machine: Mapping[str, str],
    path: Path,
    machine_key: str = "machine",
    targets: Path = TARGETS,
) -> None:
    """Replace the tables that were measured: the figures in ``path``, what became of their targets in ``targets``.

    ``machine`` stands in the place of the table ``machine_key`` of both.
    """
    said = {machine_key: [", ".join(f"{name}: {value}" for name, value in machine.items()) + "."]}
    replace({key: markdown(table) for key, table in tables.items()} | said, path)
    judged = {key: table.rows for key, table in tables.items() if any(row.target for row in table.rows)}
    replace({key: _targets(rows) for key, rows in judged.items()} | said, targets)


def replace(parts: Mapping[str, list[str]], path: Path) -> None:
    """Write ``parts``, lines by table, to their places in ``path``. Raises: SystemExit: a table has no place there."""
    text = path.read_text()
    for key, lines in parts.items():
        start, end = f"<!-- table {key} -->\n", "<!-- end -->"
        before, found, rest = text.partition(start)
        if not found or end not in rest:
            raise SystemExit(f"benchmarks: {path} has no place for table {key}")
        text = before + start + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
    path.write_text(text)


def read(path: Path) -> dict[str, Table]:
    """Return the tables of a page, rounded as it shows them, without targets and facts. Table a is not read."""
    tables = {}
    for key, text in re.findall(r"<!-- table (\w+) -->\n(.*?)<!-- end -->", path.read_text(), re.DOTALL):
        head, *lines = [
            [part.strip() for part in line[1:-1].split("|")] for line in text.splitlines() if line[0] == "|"
        ] or [[]]
        tables[key] = Table(key, "", "", [row for row in (_row(head, line) for line in lines) if row.values])
    return tables


def _row(head: list[str], line: list[str]) -> Row:
    row = Row(line[0], line[1], "", "", {}, {})
    for name, text in zip(head[2:], line[2:], strict=True):
        if found := CELL.fullmatch(text):
            value, row.unit, *ratio = found.groups()
            row.values[name] = float(value)
            if ratio[0]:
                middle, least, most = map(float, ratio)
                row.ratios[name] = (middle, least, most)
    return row


def markdown(table: Table) -> list[str]:
    """Lines of one table, without targets."""
    if not table.rows:
        return [table.note]
    return _by_size(table.rows) if table.key == "a" else _plain(table.rows)


def _plain(rows: list[Row]) -> list[str]:
    names = columns(rows)
    cells = ([row.what, row.size, *(cell(row, name) for name in names)] for row in rows)
    return [*_lines(["", "", *names]), *map(_line, cells)]


def _targets(rows: list[Row]) -> list[str]:
    judged = [row for row in rows if row.target]
    return [*_lines(["", "", "target", ""]), *(_line([row.what, row.size, row.target, verdict(row)]) for row in judged)]


def _lines(head: list[str]) -> list[str]:
    return [_line(head), "|---" * len(head) + "|"]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _by_size(rows: list[Row]) -> list[str]:
    """One line for a step and mode, one column for a number of parameters: ours, and how many times torch's it is."""
    sizes = sorted({row.facts["parameters"] for row in rows})
    lines = _lines(["", "", *map(str, sizes)])
    kinds = dict.fromkeys((row.what, row.facts["orig"], row.facts["world"]) for row in rows)
    for kind in kinds:
        of_kind = [row for row in rows if (row.what, row.facts["orig"], row.facts["world"]) == kind]
        cells = {row.facts["parameters"]: _ours_and_torchs(row) for row in of_kind}
        mode = f"{'orig' if kind[1] else 'flat'}, W={kind[2]}"
        lines.append(_line([kind[0], mode, *(cells.get(size, "") for size in sizes)]))
    return lines


def _ours_and_torchs(row: Row) -> str:
    ratio = row.ratios[OURS][0]
    times = f"1/{number(1 / ratio)}" if ratio < 1 else f"{number(ratio)}x"
    return f"{number(row.values[OURS])} : {number(row.values[TORCH])} = {times}"
