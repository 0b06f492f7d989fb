"""The tables as Markdown, and into docs/performance.md: each between ``<!-- table KEY -->`` and ``<!-- end -->``."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.handles import OURS, TORCH
from benchmarks.rows import Row, Table, cell, columns, number, verdict


def write(tables: Mapping[str, Table], machine: Mapping[str, str], path: Path) -> None:
    """Replace the tables that were measured; ``machine`` stands in the place of the table ``machine``."""
    text = path.read_text()
    parts = {key: markdown(table) for key, table in tables.items()}
    parts["machine"] = [", ".join(f"{name}: {value}" for name, value in machine.items()) + "."]
    for key, lines in parts.items():
        start, end = f"<!-- table {key} -->\n", "<!-- end -->"
        before, found, rest = text.partition(start)
        if not found or end not in rest:
            raise SystemExit(f"benchmarks: {path} has no place for table {key}")
        text = before + start + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
    path.write_text(text)


def markdown(table: Table) -> list[str]:
    """Lines of one table."""
    if not table.rows:
        return [table.note]
    return _by_size(table.rows) if table.key == "a" else _plain(table.rows)


def _plain(rows: list[Row]) -> list[str]:
    names = columns(rows)
    head = ["", "", *names, "target"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        target = f"{row.target}: {verdict(row)}" if row.target else ""
        lines.append("| " + " | ".join([row.what, row.size, *(cell(row, name) for name in names), target]) + " |")
    return lines


def _by_size(rows: list[Row]) -> list[str]:
    """One line for a step and mode, one column for a number of parameters: ours, and how many times torch's it is."""
    sizes = sorted({row.facts["parameters"] for row in rows})
    lines = [f"| | | {' | '.join(map(str, sizes))} | target |", "|---" * (3 + len(sizes)) + "|"]
    kinds = dict.fromkeys((row.what, row.facts["orig"], row.facts["world"]) for row in rows)
    for kind in kinds:
        of_kind = [row for row in rows if (row.what, row.facts["orig"], row.facts["world"]) == kind]
        cells = {row.facts["parameters"]: _ours_and_torchs(row) for row in of_kind}
        judged = [row for row in of_kind if row.met is not None]
        target = ""
        if judged:
            missed = [str(row.facts["parameters"]) for row in judged if not row.met]
            target = f"{judged[0].target}: {'missed at ' + ', '.join(missed) if missed else 'met'}"
        mode = f"{'orig' if kind[1] else 'flat'}, W={kind[2]}"
        lines.append("| " + " | ".join([kind[0], mode, *(cells.get(size, "") for size in sizes), target]) + " |")
    return lines


def _ours_and_torchs(row: Row) -> str:
    ratio = row.ratios[OURS][0]
    times = f"1/{number(1 / ratio)}" if ratio < 1 else f"{number(ratio)}x"
    return f"{number(row.values[OURS])} : {number(row.values[TORCH])} = {times}"
