"""The picture: places of parameters, shards and padding; bytes of each group of equal units, in a step, by strategy."""

from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..fsdp.unit.memory_plan import MemoryPlan, UnitPlan, phase
from .planning import Settings, Unit
from .report import equal_units

PARTS = {"shard": "#12406b", "gradient": "#1f6fb4", "optimizer": "#7fb0dc", "full": "#e08a1e"}
LABELS = {"shard": "parameter shard", "gradient": "gradient shard", "optimizer": "optimizer state", "full": "unsharded"}
PARAMETERS = ("#7fb0dc", "#b9d4ec")  # in turn, so that the ends of parameters are visible
TURNS = ("1, 3, 5, ...", "2, 4, 6, ...")
PADDING = "#c0392b"
SMALL = 8  # points
WIDTH = 9  # inches
MOST_NAMES = 40
SCALES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0))


def figure_of(title: str, units: list[Unit], settings: Settings, others: dict[str, MemoryPlan]) -> Figure:
    """Return the picture. ``others``: strategy -> plan, that of ``settings`` too."""
    plan = others[settings.strategy.name]
    name, scale = _scale(max(other.peak for other in others.values()))
    groups = equal_units(units, plan)
    heights = (1.2 + 0.25 * min(len(groups), MOST_NAMES), 2.2, 0.8 + 0.25 * len(others))
    figure = Figure(figsize=(WIDTH, sum(heights) + 2), layout="constrained")
    axes = figure.subplot_mosaic([["layout", "bytes"], ["step"] * 2, ["strategies"] * 2], height_ratios=heights)
    _layout(axes["layout"], [units[members[0]] for _, members in groups])
    _bytes(axes["bytes"], [plan.units[members[0]] for _, members in groups])
    every = -(-len(groups) // MOST_NAMES)
    names = [f"{name} ({len(members)} units)" if len(members) > 1 else name for name, members in groups]
    axes["layout"].set_yticks(range(0, len(groups), every), names[::every], fontsize=SMALL)
    axes["bytes"].set_yticks([])
    for panel in (axes["layout"], axes["bytes"]):
        panel.set_ylim(len(groups) - 0.4, -0.6)
    _step(axes["step"], plan, name, scale)
    _strategies(axes["strategies"], others, settings, name, scale)
    figure.suptitle(fill(title, 95), fontsize=10)
    return figure


def caption(axes: Axes, title: str, columns: int, handles: list[Any] | None = None) -> None:
    """Put the legend above the panel, where it covers no data, and the title above the legend."""
    legend = axes.legend(
        handles=axes.get_legend_handles_labels()[0] if handles is None else handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.1,
        frameon=False,
        ncols=columns,
        fontsize=SMALL,
        columnspacing=1.0,
        handlelength=1.5,
    )
    axes.set_title(title, loc="left", fontsize=10, pad=6 + 13 * -(-len(legend.get_texts()) // columns))
    axes.tick_params(labelsize=SMALL)


def _scale(most: float) -> tuple[str, float]:
    return next((name, size) for name, size in SCALES if most >= size or size == 1.0)


def _layout(axes: Axes, units: list[Unit]) -> None:
    for row, unit in enumerate(units):
        begin = 0
        for flat in unit.flats:
            layout = flat.layout
            spans = [(begin + offset, numel) for offset, numel in zip(layout.offsets, layout.numels, strict=True)]
            axes.broken_barh([(begin, layout.padded_numel)], (row - 0.35, 0.7), color=PADDING, lw=0)
            for colour, chosen in zip(PARAMETERS, (spans[::2], spans[1::2]), strict=True):
                axes.broken_barh(chosen, (row - 0.35, 0.7), facecolor=colour, edgecolor="white", lw=0.4)
            if layout.world_size <= 64:
                ends = [begin + rank * layout.shard_numel for rank in range(1, layout.world_size + 1)]
                axes.vlines(ends, row - 0.42, row + 0.42, color="black", lw=0.7)
            begin += layout.padded_numel
    axes.set_xlabel("elements", fontsize=SMALL)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.get_offset_text().set_fontsize(SMALL)
    axes.set_xlim(0, 1.02 * max(sum(flat.layout.padded_numel for flat in unit.flats) for unit in units))
    handles = [
        *(Patch(color=colour, label=f"parameter {turn}") for colour, turn in zip(PARAMETERS, TURNS, strict=True)),
        Patch(color=PADDING, label="padding"),
        Line2D([], [], color="black", lw=0.7, label="end of a shard"),
    ]
    caption(axes, "the flat parameter of each unit", 2, handles)


def _bytes(axes: Axes, units: list[UnitPlan]) -> None:
    name, scale = _scale(max(own.shard + own.gradient + own.optimizer + own.full for own in units))
    parts = {LABELS[part]: [getattr(own, part) / scale for own in units] for part in PARTS}
    stacked_bars(axes, parts, PARTS.values(), "a unit's bytes on each rank", name)


def stacked_bars(
    axes: Axes, parts: Mapping[str, Sequence[float]], colours: Iterable[str], title: str, unit: str
) -> None:
    """Draw horizontal bars, each of several sizes end to end. ``parts``: label -> the size in each bar."""
    left = [0.0] * len(next(iter(parts.values())))
    for colour, (label, sizes) in zip(colours, parts.items(), strict=True):
        axes.barh(range(len(left)), sizes, 0.7, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.set_xlabel(unit, fontsize=SMALL)
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlim(0, 1.02 * (max(left) or 1.0))
    caption(axes, title, 2)


def _step(axes: Axes, plan: MemoryPlan, name: str, scale: float) -> None:
    moments = plan.moments
    sizes = [moment.bytes / scale for moment in moments]
    axes.bar(range(len(moments)), sizes, 1.0, color=PARTS["full"], label="unsharded, and gradients")
    axes.axhspan(0, plan.between_steps / scale, color=PARTS["shard"], label="between steps")
    top = max(range(len(moments)), key=lambda i: moments[i].bytes)
    axes.annotate(
        phase(moments[top], plan.units),
        (top, sizes[top]),
        textcoords="offset points",
        xytext=(0, 6),
        ha="left" if 3 * top < len(moments) else "right" if 3 * top > 2 * len(moments) else "center",
        fontsize=SMALL,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    backward = next(i for i, moment in enumerate(moments) if moment.phase != "forward")
    axes.axvline(backward - 0.5, color="black", lw=0.8, ls=":")
    axes.set_xticks([backward / 2 - 0.5, (backward + len(moments)) / 2 - 0.5], ["forward", "backward, unit by unit"])
    axes.set(xlim=(-0.5, len(moments) - 0.5), ylim=(0, 1.18 * max(sizes)))
    axes.set_ylabel(name, fontsize=SMALL)
    caption(axes, "a rank in one step", 2)


def _strategies(axes: Axes, others: dict[str, MemoryPlan], settings: Settings, name: str, scale: float) -> None:
    between = [plan.between_steps / scale for plan in others.values()]
    peaks = [plan.peak / scale for plan in others.values()]
    axes.barh(range(len(others)), peaks, 0.7, color=PARTS["full"], label="at the peak of a step")
    axes.barh(range(len(others)), between, 0.7, color=PARTS["shard"], label="between steps")
    for place, peak in enumerate(peaks):
        axes.text(peak, place, f" {peak:.3g}", ha="left", va="center", fontsize=SMALL)
    axes.set_yticks(range(len(others)), list(others), fontsize=SMALL)
    axes.set(ylim=(len(others) - 0.4, -0.6), xlim=(0, 1.1 * max(peaks)))
    axes.set_xlabel(name, fontsize=SMALL)
    caption(axes, f"the strategies over {settings.world_size} ranks", 2)
