"""The picture: loss curves on top of each other, host time, tensors of each process, step time."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from .config import PARTIAL, Config
from .experiment import Results, Run
from .messages import FLATPARAM, RUNS, TORCH, UNSHARDED

COLOURS = dict(zip(RUNS, ("#b0b0b0", "#e08a1e", "#1f6fb4"), strict=True))
CURVES = dict(zip(RUNS, ((5.0, "-"), (2.6, "-"), (1.0, "--")), strict=True))  # wide under narrow, so that all are seen
MIB = 2.0**20


def draw(config: Config, results: Results, path: Path) -> None:
    """Write the picture as a PNG to ``path``."""
    figure = Figure(figsize=(8, 6), layout="constrained")  # 800 pixels: the width of README.md
    (curves, host), (memory, time) = figure.subplots(2, 2, width_ratios=[1.6, 1.0])
    _curves(curves, results.runs)
    _memory(memory, results.runs)
    _host(host, results.runs)
    _time(time, results.runs)
    figure.suptitle(
        f"byte-level GPT, {results.facts[0].weights / 1e6:.2f} M parameters, {config.ranks} ranks on {config.device}, "
        f"{config.strategy}, {config.precision}"
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    partial = path.with_name(path.name + PARTIAL)
    Image.open(drawn).convert("RGB").quantize(64).save(partial, "png", optimize=True)  # a third of the bytes
    partial.replace(path)


def _curves(axes: Axes, runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        width, style = CURVES[name]
        axes.plot(range(1, len(run.losses) + 1), run.mean_losses, style, lw=width, color=COLOURS[name], label=name)
        axes.plot(*zip(*run.validation, strict=True), "o", ms=2 + 1.5 * width, color=COLOURS[name])
    axes.set(title="loss (dots: validation)", xlabel="step", ylabel="nats a byte")
    axes.legend()


def _memory(axes: Axes, runs: dict[str, Run]) -> None:
    bottom = [0.0] * len(_processes(runs))
    shades = (("parameters", 1.0), ("gradients", 0.65), ("optimizer", 0.35))
    for part, alpha in shades:
        sizes = [getattr(memory, part) / MIB for run in runs.values() for memory in run.memory]
        axes.bar(_processes(runs), sizes, bottom=bottom, color=_colours(runs), alpha=alpha)
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    axes.set(title="tensors a process (MiB)", xlabel="dark to light: parameters, gradients, optimizer")
    axes.tick_params(axis="x", labelsize=8)


def _host(axes: Axes, runs: dict[str, Run]) -> None:
    ratios = {_short(name): run.host_ratio for name, run in runs.items() if run.host}
    bars = axes.bar(
        list(ratios), list(ratios.values()), color=[COLOURS[name] for name, run in runs.items() if run.host]
    )
    axes.bar_label(bars, fmt="%.2f")
    axes.margins(y=0.12)  # room for the labels
    axes.axhline(1.0, color="black", lw=1, ls=":")
    axes.set(title="host time (x of bare)", xlabel="dotted: the bare module")
    axes.tick_params(axis="x", labelsize=8)


def _time(axes: Axes, runs: dict[str, Run]) -> None:
    blocks = [[1e3 * seconds for seconds in run.block_seconds] for run in runs.values()]
    boxes = axes.boxplot(blocks, patch_artist=True, showfliers=False, widths=0.6, medianprops={"color": "black"})
    for box, name in zip(boxes["boxes"], runs, strict=True):
        box.set_facecolor(COLOURS[name])
    axes.set_xticks(range(1, len(runs) + 1), [_short(name) for name in runs], fontsize=8)
    axes.set(title="step (ms), blocks in turns", ylim=(0, None))


def _processes(runs: dict[str, Run]) -> list[str]:
    names = []
    for name, run in runs.items():
        names += [_short(name) + ("" if name == UNSHARDED else f"\n{rank}") for rank in range(len(run.memory))]
    return names


def _colours(runs: dict[str, Run]) -> list[str]:
    return [COLOURS[name] for name, run in runs.items() for _ in run.memory]


def _short(name: str) -> str:
    return {UNSHARDED: "un-\nsharded", TORCH: "torch", FLATPARAM: "flat-\nparam"}[name]
