"""The rows of the tables: what was measured, of whom, against whom, and whether it is what was promised."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measuring import ratio


@dataclass
class Target:
    """A promise about a row: ``contestant``'s ratio to the reference is at most (``at_least``: at least) ``bound``."""

    contestant: str
    bound: float
    at_least: bool = False
    text: str = ""

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return self.text or f"{self.contestant} {'>=' if self.at_least else '<='} {self.bound:.3g}"


@dataclass
class Row:
    """A line of a table. ``values`` in ``unit``, by contestant; ``ratios``: (median, least, most) to ``reference``."""

    what: str
    size: str
    unit: str
    reference: str
    values: dict[str, float]
    ratios: dict[str, tuple[float, float, float]]
    target: str = ""
    met: bool | None = None
    digits: int = 3
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        what: str,
        size: str,
        unit: str,
        reference: str,
        medians: Mapping[str, Sequence[float]],
        scale: float = 1.0,
        targets: Iterable[Target] = (),
        **facts: Any,
    ) -> "Row":
        """A row of medians of repeats, ``{contestant: [seconds, ...]}``, shown times ``scale``."""
        ratios = {
            name: ratio(list(values), list(medians[reference])) for name, values in medians.items() if name != reference
        }
        row = cls(
            what=what,
            size=size,
            unit=unit,
            reference=reference,
            values={name: scale * statistics.median(values) for name, values in medians.items()},
            ratios=ratios,
            facts=facts,
        )
        row.judge([target for target in targets if target.contestant in ratios])
        return row

    def judge(self, targets: Sequence[Target]) -> None:
        if targets:
            self.target = "; ".join(map(str, targets))
            self.met = all(target.is_met(self.ratios[target.contestant][0]) for target in targets)


@dataclass
class Table:
    """All rows of one claim. ``key`` is its letter in docs/performance.md."""

    key: str
    title: str
    note: str
    rows: list[Row] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Table":
        read = json.loads(path.read_text())
        return cls(**{**read, "rows": [Row(**row) for row in read["rows"]]})

    def lines(self) -> list[str]:
        """The table as text."""
        head = ["", "", *columns(self.rows), "target", ""]
        body = [
            [row.what, row.size, *(cell(row, name) for name in columns(self.rows)), row.target, verdict(row)]
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        return [
            f"== {self.key}. {self.title}",
            *(f"   {line}" for line in self.note.splitlines()),
            *(
                "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                for line in [head, *body]
            ),
        ]


def columns(rows: Sequence[Row]) -> list[str]:
    """The contestants of some rows."""
    return list(dict.fromkeys(name for row in rows for name in row.values))


def cell(row: Row, name: str) -> str:
    """What a row says of one contestant."""
    if name not in row.values:
        return ""
    value = f"{number(row.values[name], row.digits)} {row.unit}".strip()
    if name not in row.ratios:
        return value
    middle, least, most = row.ratios[name]
    return f"{value} = {number(middle)}x ({number(least)}-{number(most)})"


def number(value: float, digits: int = 3) -> str:
    """``value`` with so many digits, and never fewer than those before the point."""
    return f"{value:.{digits}g}" if abs(value) < 10 ** (digits - 1) else f"{value:.0f}"


def verdict(row: Row) -> str:
    """Whether the target was met, if there is one."""
    return {True: "met", False: "MISSED", None: ""}[row.met]
