"""Two deaths and a return: ``flatparam.elastic`` beside restarts from checkpoints. ``python -m benchmarks.elastic``.

Four ranks train; one is killed, and its successor too, which under ``elastic`` nobody follows. ``--docs`` writes the
table and the picture into docs too.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import document, picture
from benchmarks.__main__ import machine
from benchmarks.elastic_worker import CONFIG, ELASTIC, RESTARTS, ROWS, SAVED_EVERY, STEPS
from benchmarks.measuring import turned
from benchmarks.rows import Row, Table
from examples.demo.processes import environment

ROOT = Path(__file__).parents[1]
WAYS = {  # arguments of torchrun and of what runs the script, colour
    ELASTIC: (["--max-restarts", "0"], ["-m", "flatparam.elastic", "--max-joins", "1"], "#12406b"),
    RESTARTS: (["--max-restarts", "2"], [], "#e08a1e"),
}
RANKS = 4
DEATHS = (40, 100)  # steps
TOKENS = ROWS * CONFIG.context
WINDOW = 1.0  # seconds


@dataclass
class Run:
    """``done``: (step, its begin, its end) of all steps in order, also repeated ones; ``deaths``: when."""

    done: list[tuple[int, float, float]] = field(default_factory=list)
    deaths: list[float] = field(default_factory=list)

    def follow(self, lines: Iterable[str]) -> None:
        """Read the events of the ranks, and kill the last one in the steps ``DEATHS``."""
        processes, killed = {}, None
        for line in lines:
            event = json.loads(line)
            if "process" in event:
                processes[event["slot"]] = event["process"]
                continue
            self.done.append((event["step"], event["begin"], event["end"]))
            victim = processes[RANKS - 1]
            is_whole = event["ranks"] == RANKS and victim != killed
            if is_whole and len(self.deaths) < len(DEATHS) and event["step"] >= DEATHS[len(self.deaths)]:
                os.kill(victim, signal.SIGKILL)
                killed = victim
                self.deaths.append(time.monotonic())

    @property
    def new(self) -> list[tuple[int, float, float]]:
        """The steps that had not been done before."""
        found: list[tuple[int, float, float]] = []
        for one in self.done:
            if not found or one[0] > found[-1][0]:
                found.append(one)
        return found

    @property
    def useful(self) -> float:
        """Steps of the training, of all that were computed."""
        return len(self.new) / len(self.done)

    @property
    def seconds(self) -> float:
        """From the end of the first step to that of the last."""
        return self.done[-1][2] - self.done[0][2]

    @property
    def pauses(self) -> list[float]:
        """Seconds from each death to the end of the first new step that begins after it."""
        return [next(end for _, begin, end in self.new if begin > death) - death for death in self.deaths]

    def rate(self) -> tuple[list[float], list[float]]:
        """Seconds since the first step, and the tokens of new steps a second in a window that begins there."""
        first = self.done[0][2]
        counts = [0] * (int(self.seconds / WINDOW) + 1)
        for _, _, end in self.new:
            counts[int((end - first) / WINDOW)] += 1
        return [WINDOW * i for i in range(len(counts))], [TOKENS * count / WINDOW for count in counts]


def measure(rounds: int) -> dict[str, list[Run]]:
    """Run each way so many times, in turns."""
    found: dict[str, list[Run]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in turned(tuple(WAYS), turn):
            found[way].append(run(way))
            print(f"{way}: {found[way][-1].seconds:.0f} s, useful {found[way][-1].useful:.2f}", flush=True)
    return found


def run(way: str) -> Run:
    """Run one way. Raises: RuntimeError if it fails."""
    made = Run()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    options, by, _ = WAYS[way]
    fresh = str(int(way == RESTARTS))  # else a restart reads the addresses of the start before, and gloo waits for them
    with tempfile.TemporaryDirectory(prefix="flatparam-bench-") as folder:
        log = Path(folder) / "log"
        script = str(ROOT / "benchmarks" / "elastic_worker.py")
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*launcher, *options, *by, script, way, folder],
                env={**environment(1), "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": fresh},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            assert process.stdout is not None
            made.follow(process.stdout)
            if process.wait():
                raise RuntimeError(f"{way} ended with status {process.returncode}:\n{log.read_text()}")
        finally:
            process.terminate()  # torchrun ends its ranks
            process.communicate()
    return made


def table(found: Mapping[str, Sequence[Run]]) -> Table:
    """The figures: medians over the runs."""
    made = Table("elastic", "two deaths and a return", f"{RANKS} ranks, {STEPS} steps, saved every {SAVED_EVERY}")
    values = {
        ("from a death to the next new step", "s"): {
            way: [p for r in runs for p in r.pauses] for way, runs in found.items()
        },
        (f"{STEPS} steps", "s"): {way: [one.seconds for one in runs] for way, runs in found.items()},
        ("useful steps of those computed", ""): {way: [one.useful for one in runs] for way, runs in found.items()},
    }
    for (what, unit), of_way in values.items():
        made.rows.append(Row(what, "", unit, RESTARTS, {w: statistics.median(v) for w, v in of_way.items()}, {}))
    return made


def chart(found: Mapping[str, Run]) -> Figure:
    """Tokens a second over time, a line for each way, with the deaths as crosses."""
    figure = Figure(figsize=(picture.WIDTH, 3.0), layout="constrained")
    axes = figure.subplots()
    for way, made in found.items():
        colour = WAYS[way][2]
        axes.step(*made.rate(), where="post", color=colour, label=way)
        axes.plot([at - made.done[0][2] for at in made.deaths], [0] * len(made.deaths), "x", color=colour, ms=9, mew=2)
    axes.set_xlabel("seconds since the first step (x: a rank is killed)", fontsize=picture.SIZE)
    end = max(made.seconds for made in found.values())
    axes.set_xlim(-0.01 * end, 1.01 * end)
    top = 1.3 * max(max(made.rate()[1]) for made in found.values())  # room for the legend
    axes.set_ylim(-0.05 * top, top)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= end])
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top])
    axes.tick_params(labelsize=picture.SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=picture.SIZE, loc="upper right", ncols=2, frameon=False)
    axes.set_title("Tokens of new steps a second", fontsize=picture.SIZE + 1, loc="left")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the picture")
    parser.add_argument("--docs", action="store_true", help="write table and picture into docs too")
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    figures = table(found)
    print("\n".join(figures.lines()), flush=True)
    middle = {way: sorted(runs, key=lambda one: one.seconds)[len(runs) // 2] for way, runs in found.items()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    folders = [arguments.out, *([ROOT / "docs"] if arguments.docs else [])]
    for folder in folders:
        picture.save(chart(middle), folder / "elastic.png")
    if arguments.docs:
        said = [", ".join(f"{name}: {value}" for name, value in machine().items()) + "."]
        parts = {"elastic": document.markdown(figures), "elastic-machine": said}
        document.replace(parts, ROOT / "docs" / "elastic.md")


if __name__ == "__main__":
    main()
