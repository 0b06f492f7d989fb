"""The picture: memory and step time of all candidates; time and sent bytes of the best candidate of each strategy."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flatparam.advise.candidates import Candidate, Question
from flatparam.advise.report import best_of_each, micro_batches, units_of
from flatparam.inspect.picture import SMALL, stacked_bars

COLOURS = ("#12406b", "#1f6fb4", "#7fb0dc", "#e08a1e", "#c0392b", "#3b7d4f", "#7d5ba6", "#8c8c8c")
GIB = 2.0**30


def draw(title: str, fitting: list[Candidate], too_large: list[Candidate], question: Question, path: Path) -> None:
    """Write the picture as a PNG to ``path``. Both lists begin with their best candidate."""
    figure = Figure(figsize=(14, 7.5), layout="constrained")
    axes = figure.subplot_mosaic([["all", "times"], ["all", "sizes"]], width_ratios=[1.2, 1.0])
    _all(axes["all"], fitting, too_large, question)
    best = best_of_each(fitting or too_large)
    names = [f"{one.strategy} {one.inner or ''}\n{units_of(one)}, {micro_batches(one)}" for one in best]
    computing = [1e3 * one.computing for one in best]
    waiting = [1e3 * (one.seconds - one.computing) for one in best]
    _bars(
        axes["times"], names, {"compute": computing, "waiting for collectives": waiting}, "best of each: a step", "ms"
    )
    within, between = [one.intra / GIB for one in best], [one.inter / GIB for one in best]
    _bars(axes["sizes"], names, {"within a node": within, "between nodes": between}, "a rank sends in it", "GiB")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, format="png", dpi=100)


def _all(axes: Axes, fitting: list[Candidate], too_large: list[Candidate], question: Question) -> None:
    everything = [*fitting, *too_large]
    for colour, strategy in zip(COLOURS, question.strategies, strict=False):
        own = [one for one in everything if one.strategy == strategy]
        if own:
            memory = [one.memory / GIB for one in own]
            axes.scatter(
                memory, [1e3 * one.seconds for one in own], 14, color=colour, alpha=0.7, label=strategy.lstrip("_")
            )
    for best in fitting[:1]:
        axes.scatter(
            [best.memory / GIB], [1e3 * best.seconds], 120, facecolors="none", edgecolors="black", label="best"
        )
    axes.axvline(question.gpu_memory / GIB, color="black", lw=0.8, ls=":")
    axes.set(title="all that was tried; left of the line it fits", xlabel="GiB on a rank", ylabel="ms a step")
    axes.set(xscale="log", yscale="log")
    axes.legend(fontsize=SMALL)


def _bars(axes: Axes, names: list[str], parts: dict[str, list[float]], title: str, unit: str) -> None:
    stacked_bars(axes, parts, (COLOURS[1], COLOURS[3]), title, unit)
    axes.set_yticks(range(len(names)), names, fontsize=SMALL)
    axes.invert_yaxis()
