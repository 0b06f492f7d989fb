"""The picture: memory and step time of all candidates, with their Pareto front; the best candidate of each strategy."""

from math import log
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..common.tables import human
from ..inspect.picture import SMALL, WIDTH, caption, stacked_bars
from .candidates import Candidate, Question
from .report import best_of_each, front, micro_batches, units_of

FITS, TOO_LARGE, FRONT, WAITING = "#7fb0dc", "#c8c8c8", "#12406b", "#e08a1e"
MOST_NAMED = 8  # plans of the front that are named
GIB = 2.0**30


def figure_of(title: str, fitting: list[Candidate], too_large: list[Candidate], question: Question) -> Figure:
    """Return the picture. Both lists begin with their best candidate."""
    best = best_of_each(fitting or too_large)
    heights = (4.5, 1.0 + 0.38 * len(best))
    figure = Figure(figsize=(WIDTH, sum(heights) + 3), layout="constrained")
    axes = figure.subplot_mosaic([["all", "all"], ["times", "sizes"]], height_ratios=heights)
    _all(axes["all"], fitting, too_large, question)
    computing = [1e3 * one.computing for one in best]
    waiting = [1e3 * (one.seconds - one.computing) for one in best]
    parts = {"compute": computing, "waiting for collectives": waiting}
    stacked_bars(axes["times"], parts, (FITS, WAITING), "best of each strategy: its step", "ms")
    parts = {"within a node": [one.intra / GIB for one in best], "between nodes": [one.inter / GIB for one in best]}
    stacked_bars(axes["sizes"], parts, (FITS, WAITING), "a rank sends in it", "GiB")
    names = [_name(one, "\n") for one in best]
    axes["times"].set_yticks(range(len(names)), names, fontsize=SMALL)
    axes["sizes"].set_yticks([])
    for panel in (axes["times"], axes["sizes"]):
        panel.set_ylim(len(names) - 0.4, -0.6)
    figure.suptitle(fill(title, 95), fontsize=10)
    return figure


def _name(one: Candidate, separator: str) -> str:
    inner = "" if one.inner is None else f" in groups of {one.inner}"
    return f"{one.strategy}{inner}{separator}{units_of(one)}, {micro_batches(one)}"


def _apart(kept: list[Candidate], everything: list[Candidate], limit: int) -> list[Candidate]:
    """Return up to ``MOST_NAMED`` plans of the front, whose numbers do not overlap in the panel of ``everything``."""
    memory, seconds = [limit, *(one.memory for one in everything)], [one.seconds for one in everything]
    width, height = log(max(memory) / min(memory)), log(max(seconds) / min(seconds))
    named = kept[:1]
    for one in kept[1:]:
        last = named[-1]
        if 30 * log(one.memory / last.memory) > width or 20 * log(last.seconds / one.seconds) > height:
            named.append(one)
    count = min(len(named), MOST_NAMED)
    return [named[i * (len(named) - 1) // max(count - 1, 1)] for i in range(count)]


def _all(axes: Axes, fitting: list[Candidate], too_large: list[Candidate], question: Question) -> None:
    """Draw the points, the front with numbers, the limit, and below the panel a line for each number."""

    def points(of: list[Candidate]) -> tuple[list[float], list[float]]:
        return [one.memory / GIB for one in of], [1e3 * one.seconds for one in of]

    if too_large:
        axes.scatter(*points(too_large), 12, color=TOO_LARGE, label="does not fit")
    if fitting:
        axes.scatter(*points(fitting), 12, color=FITS, label="fits")
        axes.scatter(*points(fitting[:1]), 120, facecolors="none", edgecolors=WAITING, label="best")
    kept = front(fitting or too_large)
    axes.plot(*points(kept), color=FRONT, marker="o", ms=4, lw=1, label="Pareto front: no other is smaller and faster")
    axes.axvline(question.gpu_memory / GIB, color="black", lw=0.8, ls=":", label="memory of a rank")
    named = _apart(kept, [*fitting, *too_large], question.gpu_memory)
    lines = []
    for number, one in enumerate(named, 1):
        place: dict[str, Any] = {"xytext": (0, -11), "textcoords": "offset points", "ha": "center", "fontsize": SMALL}
        place["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0}
        axes.annotate(str(number), (one.memory / GIB, 1e3 * one.seconds), **place)
        lines.append(f"{number}  {_name(one, ', ')}: {human(one.memory)}, {1e3 * one.seconds:.4g} ms")
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("\n".join(["GiB on a rank", *lines]), fontsize=SMALL, loc="left")
    axes.set_ylabel("ms a step", fontsize=SMALL)
    caption(axes, "all that was tried", 3)
    axes.tick_params(which="both", labelsize=SMALL)
