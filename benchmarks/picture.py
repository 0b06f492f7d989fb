"""The pictures of README.md and docs/performance.md: one chart for each message, drawn from the tables.

``python -m benchmarks.picture`` draws them anew from the figures that the page holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.contestants import CALLS, DDP, FSDP1, FSDP2, OURS, RUNTIME
from benchmarks.document import read
from benchmarks.rows import Row, Table, number

SERIES = {  # contestant -> (label, colour), from the top of a group
    "flatparam": ("flatparam", "#12406b"),
    RUNTIME: ("flatparam's runtime", "#12406b"),
    OURS: ("flatparam under torch's FSDP1", "#5b9bd5"),
    FSDP1: ("FSDP1", "#e08a1e"),
    "FSDP1 + DCP": ("FSDP1 with torch's distributed checkpoint", "#e08a1e"),
    FSDP2: ("FSDP2", "#b5533c"),
    "FSDP2 + DCP": ("FSDP2 with torch's distributed checkpoint", "#b5533c"),
    CALLS: ("unsharded, with the collectives", "#8c8c8c"),
    DDP: ("DDP, which shards nothing", "#8c8c8c"),
    "plain write": ("the same bytes as plain files", "#8c8c8c"),
}
WIDTH, BAR, GAP = 8.0, 0.21, 0.9  # inches; inches a bar; bars between groups
SIZE = 9  # points
COLOURS = 64  # of a file


@dataclass(frozen=True)
class Message:
    """One picture. ``rows``: (table, name of the row, its size or "" for all, label of the group; {}: the size)."""

    file: str
    title: str
    unit: str
    rows: tuple[tuple[str, str, str, str], ...]
    over_bare: bool = False  # ratios to the bare module in place of values

    def groups(self, tables: Mapping[str, Table]) -> dict[str, Mapping[str, float]]:
        """Return what is drawn of ``tables``; rows that were not measured are left out."""
        return {
            label.format(row.size): over_bare(row) if self.over_bare else row.values
            for key, name, size, label in self.rows
            for row in (tables[key].rows if key in tables else ())
            if row.what == name and size in ("", row.size)
        }


MESSAGES = (
    Message(
        "host.png",
        "CPU time of a training step, times that of the unsharded module (dotted); shorter is better",
        "x",
        (
            ("k", "host time of a step", "of bare", "GPT-2\n(12 layers)"),
            ("b", "fp32", "48 x 10", "48 units of\n10 short kernels"),
        ),
        over_bare=True,
    ),
    Message(
        "wrapping.png",
        "Memory that a process needs beside the module while it is wrapped; shorter is better",
        " MiB",
        (("c", "peak over base", "", "module\nof {}"),),
    ),
    Message(
        "tokens.png",
        "Tokens a second, training a small GPT on two CPU processes; longer is better",
        "",
        (("d", "tokens a second", "", ""),),
    ),
    Message(
        "checkpoint.png",
        "Seconds to save and load parameters and Adam's state, two CPU processes; shorter is better",
        " s",
        (("j", "save", "", "save\n{}"), ("j", "load", "", "load\n{}")),
    ),
)


def draw(tables: Mapping[str, Table], folder: Path) -> list[Path]:
    """Write a PNG for each message that ``tables`` has rows for. Returns: the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for message in MESSAGES:
        if groups := message.groups(tables):
            written.append(folder / message.file)
            save(chart(message.title, message.unit, groups, over_bare=message.over_bare), written[-1])
    return written


def save(figure: Figure, path: Path) -> None:
    """Write a PNG as wide as README's text. Few colours keep it small: the repository holds it."""
    figure.set_dpi(100)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def over_bare(row: Row) -> dict[str, float]:
    """The ratios of a row to the bare module."""
    return {name: ratio[0] for name, ratio in row.ratios.items()}


def chart(title: str, unit: str, groups: Mapping[str, Mapping[str, float]], over_bare: bool = False) -> Figure:
    """Groups of horizontal bars, each with its value and contestant beside it.

    Args: ``groups``: label -> contestant -> value; contestants that ``SERIES`` lacks are left out. ``over_bare``: with
    a line at 1.
    """
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    place, ticks = 0.0, []
    for values in groups.values():
        names = [name for name in SERIES if name in values]
        places = [place + i for i in range(len(names))]
        bars = axes.barh(places, [values[name] for name in names], 0.85, color=[SERIES[name][1] for name in names])
        labels = [f"{number(values[name])}{unit}  {SERIES[name][0]}" for name in names]
        axes.bar_label(bars, labels, padding=4, fontsize=SIZE)
        ticks.append((places[0] + places[-1]) / 2)
        place = places[-1] + 1 + GAP
    figure.set_size_inches(WIDTH, 0.5 + BAR * (place - GAP))
    axes.set_yticks(ticks, list(groups), fontsize=SIZE)
    axes.set_ylim(place - GAP - 0.4, -0.6)  # from above
    axes.set_xlim(0, 1.5 * max(value for values in groups.values() for name, value in values.items() if name in SERIES))
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    if over_bare:
        axes.axvline(1.0, color="black", lw=1, ls=":")
    figure.suptitle(title, fontsize=SIZE + 1)
    return figure


if __name__ == "__main__":
    DOCS = Path(__file__).parents[1] / "docs"
    draw(read(DOCS / "performance.md"), DOCS)
