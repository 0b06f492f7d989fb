"""The picture of docs/performance.md, of whatever tables were measured."""

from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.contestants import (
    BARE,
    CALLS,
    DDP,
    FSDP1,
    FSDP1_FLAT,
    FSDP2,
    OURS,
    OURS_FLAT,
    REPLICATED,
    RUNTIME,
    ZERO_1,
)
from benchmarks.handles import OURS as OUR_HANDLE
from benchmarks.handles import TORCH, UNSAFE
from benchmarks.rows import Row, Table

COLOURS = {
    BARE: "#b0b0b0",
    CALLS: "#8c8c8c",
    DDP: "#777777",
    FSDP1: "#e08a1e",
    FSDP1_FLAT: "#f2c27d",
    FSDP2: "#b5533c",
    OURS: "#1f6fb4",
    OURS_FLAT: "#7fb0dc",
    RUNTIME: "#12406b",
    REPLICATED: "#3f7d5c",
    ZERO_1: "#7fbf9d",
    TORCH: "#e08a1e",
    UNSAFE: "#f2c27d",
    OUR_HANDLE: "#1f6fb4",
}
WIDTHS = {"a": 1.0, "b": 1.1, "c": 0.8, "d": 0.8, "e": 1.3}  # of the panels
LABEL = 7.5  # points


def draw(tables: Mapping[str, Table], path: Path) -> None:
    """Write a PNG with a panel for each of the tables a to e that is there."""
    panels: dict[str, Callable[[Axes, list[Row]], None]] = {
        "a": _views,
        "b": _steps,
        "c": _peaks,
        "d": _rates,
        "e": _scaling,
    }
    there = [key for key in panels if key in tables and tables[key].rows]
    if not there:
        return
    rows = [row for row in (["a", "b"], ["c", "d", "e"]) if set(row) & set(there)]
    figure = Figure(figsize=(13.0, 4.2 * len(rows)), layout="constrained")
    for part, row in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        keys = [key for key in row if key in there]
        axes = part.subplots(1, len(keys), width_ratios=[WIDTHS[key] for key in keys], squeeze=False)[0]
        for each, key in zip(axes, keys, strict=True):
            panels[key](each, tables[key].rows)
            each.tick_params(axis="y", labelsize=LABEL)
            each.title.set_fontsize(10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=100)


def _bars(axes: Axes, groups: list[str], rows: list[dict[str, float]], names: list[str]) -> None:
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        places = [group + (i - (len(names) - 1) / 2) * width for group in range(len(groups))]
        axes.bar(places, [row.get(name, 0.0) for row in rows], width, color=COLOURS[name], label=name)
    axes.set_xticks(range(len(groups)), groups, fontsize=LABEL)
    axes.legend(fontsize=LABEL)


def _views(axes: Axes, rows: list[Row]) -> None:
    most = max(int(row.facts["parameters"]) for row in rows if row.facts["parameters"] <= 400)
    shown = [row for row in rows if (row.facts["parameters"], row.facts["world"], row.facts["orig"]) == (most, 8, True)]
    shown = [row for row in shown if "views" in row.what or row.what == "writeback check"]
    groups = [
        row.what.replace(" views, ", "\nviews,\n").replace(" check", "\ncheck").replace("after ", "after\n")
        for row in shown
    ]
    _bars(axes, groups, [row.values for row in shown], [TORCH, UNSAFE, OUR_HANDLE])
    axes.set(title=f"a. one parameter of {most} (us, lower is better)", yscale="log")


def over_bare(axes: Axes, groups: list[str], rows: list[Row]) -> None:
    """The ratios of each row to the bare module, a group of bars."""
    names = [name for name in COLOURS if name in rows[0].ratios]
    ratios = [{name: ratio[0] for name, ratio in row.ratios.items()} for row in rows]
    _bars(axes, groups, ratios, names)
    axes.axhline(1.0, color=COLOURS[BARE], lw=1)


def _steps(axes: Axes, rows: list[Row]) -> None:
    over_bare(axes, [f"{row.what.replace(', ', chr(10))}\n{row.size}" for row in rows], rows)
    axes.set(title="b. forward + backward over the bare module (x)")


def _peaks(axes: Axes, rows: list[Row]) -> None:
    shown = [row for row in rows if row.unit == "MiB"]
    names = [name for name in COLOURS if name in shown[0].values]
    _bars(axes, [row.size for row in shown], [row.values for row in shown], names)
    for group, row in enumerate(shown):
        axes.plot([group - 0.45, group + 0.45], [row.facts["allowed"]] * 2, "k--", lw=1)
    axes.set(title="c. wrapping: peak (MiB; - -: target)")


def _rates(axes: Axes, rows: list[Row]) -> None:
    [row] = [row for row in rows if row.what == "tokens a second"]
    names = [name for name in COLOURS if name in row.values]
    axes.bar(range(len(names)), [row.values[name] for name in names], color=[COLOURS[name] for name in names])
    axes.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=6)
    axes.set(title="d. training: tokens a second")


def _scaling(axes: Axes, rows: list[Row]) -> None:
    axes.set_prop_cycle(color=[colormaps["tab20"](i) for i in range(20)])
    for row in rows:
        costs = next(iter(row.facts["seconds of one"].values()))
        axes.plot(
            row.facts["counts"], [1e6 * cost for cost in costs], ".-", lw=1, label=f"{row.what} ({row.size.split()[1]})"
        )
    axes.legend(fontsize=5, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.set(title="e. cost of one (us) as their number grows", xscale="log", yscale="log")
