"""The picture: places of parameters, shards and padding; bytes of each unit, in a step, and by strategy."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flatparam.fsdp.unit.memory_plan import MemoryPlan, phase
from flatparam.inspect.planning import Settings, Unit

PARTS = {"shard": "#12406b", "gradient": "#1f6fb4", "optimizer": "#7fb0dc", "full": "#e08a1e"}
LABELS = {"shard": "parameter shard", "gradient": "gradient shard", "optimizer": "optimizer state", "full": "unsharded"}
PARAMETERS = ("#7fb0dc", "#b9d4ec")  # in turn, so that the ends of parameters are visible
PADDING = "#c0392b"
SMALL = 7.5  # points
MOST_NAMES = 40
SCALES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0))


def draw(title: str, units: list[Unit], settings: Settings, others: dict[str, MemoryPlan], path: Path) -> None:
    """Write the picture as a PNG to ``path``. ``others``: strategy -> plan, that of ``settings`` too."""
    plan = others[settings.strategy.name]
    name, scale = _scale(max(other.peak for other in others.values()))
    height = 2.2 + 0.22 * min(len(units), MOST_NAMES)
    figure = Figure(figsize=(14, height + 4.2), layout="constrained")
    panels = figure.subplots(2, 2, height_ratios=[height, 4.0], width_ratios=[1.25, 1.0])
    _layout(panels[0][0], units)
    _bytes(panels[0][1], units, plan)
    _step(panels[1][0], units, plan, name, scale)
    _strategies(panels[1][1], others, settings, name, scale)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, format="png", dpi=100)


def _scale(most: float) -> tuple[str, float]:
    return next((name, size) for name, size in SCALES if most >= size or size == 1.0)


def _names(axes: Axes, units: list[Unit]) -> None:
    every = -(-len(units) // MOST_NAMES)
    axes.set_yticks(range(0, len(units), every), [unit.name for unit in units[::every]], fontsize=SMALL)
    axes.invert_yaxis()


def _layout(axes: Axes, units: list[Unit]) -> None:
    for row, unit in enumerate(units):
        begin = 0
        for flat, _ in unit.segments:
            layout = flat.layout
            spans = [(begin + offset, numel) for offset, numel in zip(layout.offsets, layout.numels, strict=True)]
            axes.broken_barh([(begin, layout.padded_numel)], (row - 0.35, 0.7), color=PADDING, lw=0)
            for colour, chosen in zip(PARAMETERS, (spans[::2], spans[1::2]), strict=True):
                axes.broken_barh(chosen, (row - 0.35, 0.7), facecolor=colour, edgecolor="white", lw=0.4)
            if layout.world_size <= 64:
                ends = [begin + rank * layout.shard_numel for rank in range(1, layout.world_size + 1)]
                axes.vlines(ends, row - 0.42, row + 0.42, color="black", lw=0.7)
            begin += layout.padded_numel
    _names(axes, units)
    axes.set(title="flat parameters: shards end at the lines", xlabel="elements")
    longest = max(sum(flat.layout.padded_numel for flat, _ in unit.segments) for unit in units)
    axes.set_xlim(0, 1.2 * longest)
    handles = [Patch(color=PARAMETERS[0], label="parameters"), Patch(color=PADDING, label="padding")]
    axes.legend(handles=handles, fontsize=SMALL, loc="lower right")


def _bytes(axes: Axes, units: list[Unit], plan: MemoryPlan) -> None:
    name, scale = _scale(max(own.shard + own.gradient + own.optimizer + own.full for own in plan.units))
    parts = {LABELS[part]: [getattr(own, part) / scale for own in plan.units] for part in PARTS}
    stacked_bars(axes, parts, PARTS.values(), "a unit's bytes on each rank", name)
    _names(axes, units)


def stacked_bars(
    axes: Axes, parts: Mapping[str, Sequence[float]], colours: Iterable[str], title: str, unit: str
) -> None:
    """Draw horizontal bars, each of several sizes end to end. ``parts``: label -> the size in each bar."""
    left = [0.0] * len(next(iter(parts.values())))
    for colour, (label, sizes) in zip(colours, parts.items(), strict=True):
        axes.barh(range(len(left)), sizes, 0.7, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.set(title=title, xlabel=unit, xlim=(0, 1.3 * (max(left) or 1.0)))  # room for the legend
    axes.legend(fontsize=SMALL, loc="lower right")


def _step(axes: Axes, units: list[Unit], plan: MemoryPlan, name: str, scale: float) -> None:
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
        ha="center",
        fontsize=SMALL,
    )
    backward = next(i for i, moment in enumerate(moments) if moment.phase != "forward")
    axes.axvline(backward - 0.5, color="black", lw=0.8, ls=":")
    axes.set_xticks([backward / 2 - 0.5, (backward + len(moments)) / 2 - 0.5], ["forward", "backward, unit by unit"])
    axes.set(title="a rank in one step", ylabel=name, xlim=(-0.5, len(moments) - 0.5), ylim=(0, 1.18 * max(sizes)))
    axes.legend(fontsize=SMALL, loc="upper left")


def _strategies(axes: Axes, others: dict[str, MemoryPlan], settings: Settings, name: str, scale: float) -> None:
    between = [plan.between_steps / scale for plan in others.values()]
    peaks = [plan.peak / scale for plan in others.values()]
    axes.bar(range(len(others)), peaks, 0.7, color=PARTS["full"], label="at the peak of a step")
    axes.bar(range(len(others)), between, 0.7, color=PARTS["shard"], label="between steps")
    for place, peak in enumerate(peaks):
        axes.text(place, peak, f"{peak:.3g}", ha="center", va="bottom", fontsize=SMALL)
    axes.set_xticks(range(len(others)), list(others), fontsize=SMALL)
    axes.set(title=f"the strategies over {settings.world_size} ranks", ylabel=name, ylim=(0, 1.18 * max(peaks)))
    axes.legend(fontsize=SMALL)
