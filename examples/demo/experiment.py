"""The order of events: train three ways in turns, compare, time the host, kill and resume, reload, write a sample."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from .config import Config
from .messages import FLATPARAM, RUNS, TORCH, UNSHARDED, Block, Difference, Facts, Memory
from .processes import Team

PROMPT = b"The "
SAMPLE_BYTES = 400
HOST_RUNS = (TORCH, FLATPARAM)


@dataclass
class Run:
    """The results of one way of training.

    ``losses``: one row a step, one column a share of the batch (each rank has one share, the unsharded process all).
    ``block_seconds``: the median step of each block; ``validation``: (steps done, loss).
    """

    losses: list[list[float]] = field(default_factory=list)
    extra_losses: list[list[float]] = field(default_factory=list)
    block_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    host: list[tuple[float, float]] = field(default_factory=list)

    @property
    def mean_losses(self) -> list[float]:
        """The loss of each step."""
        return [statistics.fmean(row) for row in self.losses]

    @property
    def host_ratio(self) -> float:
        """The host's time in a wrapped pass over that in the bare one: the median of pairs taken in turn."""
        return statistics.median(wrapped / bare for bare, wrapped in self.host)


@dataclass
class Results:
    """The results of all ways of training, for the report."""

    facts: list[Facts]
    runs: dict[str, Run]
    checkpoint: Path
    to_torch: Difference
    to_unsharded: Difference
    resumed_step: int
    resumed_losses: list[list[float]]
    to_uninterrupted: Difference
    reloaded_step: int
    reloaded_losses: list[list[float]]
    sample: str

    @property
    def engines(self) -> dict[str, set[str]]:
        """The code that sharded the model, by the answers of the processes of each sharded run."""
        return {name: {fact.engine for fact in self.facts if fact.run == name} for name in RUNS if name != UNSHARDED}


def run_experiment(config: Config, team: Team, scratch: Path, checkpoint: Path) -> Results:
    """Run the whole demo on ``team``, with bars where stderr is a terminal.

    Raises: DemoFailed when a process does.
    """
    say(f"starting {1 + 2 * config.ranks} processes, to train {', '.join(RUNS)} in turns")
    facts = team.start()
    runs = {name: Run() for name in RUNS}
    _train(config, team, runs, checkpoint)
    for name, run in runs.items():
        run.memory = team.ask(name, "memory")

    say("comparing, and timing the host")
    files = {name: scratch / f"{name} at the end" for name in RUNS}
    for name, path in files.items():
        team.ask(name, "save", path, config.steps)
    [to_torch] = team.ask(UNSHARDED, "compare", files[FLATPARAM], files[TORCH])
    [to_unsharded] = team.ask(UNSHARDED, "compare", files[FLATPARAM], files[UNSHARDED])
    runs[FLATPARAM].extra_losses = _merged(team.ask(FLATPARAM, "train", config.steps, config.extra_steps)).losses
    for turn in range(config.host_rounds):
        for name in HOST_RUNS if turn % 2 else HOST_RUNS[::-1]:
            runs[name].host += team.ask(name, "host_cost")[0]

    say(f"killing {FLATPARAM} in training; new processes go on from {checkpoint}, then a plain model")
    team.kill(FLATPARAM, "train", config.steps + config.extra_steps, 1_000_000)
    facts += team.start([FLATPARAM])
    resumed_step = team.ask(FLATPARAM, "resume", checkpoint)[0]
    resumed_losses = _merged(team.ask(FLATPARAM, "train", resumed_step, config.steps - resumed_step)).losses
    team.ask(FLATPARAM, "save", checkpoint, config.steps)
    [to_uninterrupted] = team.ask(UNSHARDED, "compare", checkpoint, files[FLATPARAM])
    [reloaded_step] = team.ask(UNSHARDED, "resume", checkpoint)
    [sample] = team.ask(UNSHARDED, "sample", PROMPT, SAMPLE_BYTES)
    reloaded_losses = _merged(team.ask(UNSHARDED, "train", reloaded_step, config.extra_steps)).losses
    return Results(
        facts=facts,
        runs=runs,
        checkpoint=checkpoint,
        to_torch=to_torch,
        to_unsharded=to_unsharded,
        resumed_step=resumed_step,
        resumed_losses=resumed_losses,
        to_uninterrupted=to_uninterrupted,
        reloaded_step=reloaded_step,
        reloaded_losses=reloaded_losses,
        sample=sample,
    )


def say(text: str) -> None:
    """Print a line, above the bars where there are bars, at once also where stdout is a pipe."""
    tqdm.write(text)
    sys.stdout.flush()


def _train(config: Config, team: Team, runs: dict[str, Run], checkpoint: Path) -> None:
    """Blocks of steps in turns, first in one order, then in the other; the runs that wait block in a read.

    flatparam saves ``checkpoint`` as often as all validate, but not at the end.
    """
    bars = {
        name: tqdm(total=config.steps, desc=f"{name:<12}", unit="step", position=i, leave=False, disable=None)
        for i, name in enumerate(RUNS)
    }
    try:
        team.ask(FLATPARAM, "save", checkpoint, 0)
        _validate(team, runs, 0)
        for turn, first in enumerate(range(0, config.steps, config.block)):
            count = min(config.block, config.steps - first)
            for name in RUNS if turn % 2 else RUNS[::-1]:
                block = _merged(team.ask(name, "train", first, count))
                runs[name].losses += block.losses
                runs[name].step_seconds += block.seconds
                runs[name].block_seconds.append(statistics.median(block.seconds))
                bars[name].set_postfix_str(f"loss {statistics.fmean(block.losses[-1]):.3f}", refresh=False)
                bars[name].update(count)
            done = first + count
            if done // config.validate_every > first // config.validate_every or done == config.steps:
                if done < config.steps:
                    team.ask(FLATPARAM, "save", checkpoint, done)
                _validate(team, runs, done)
    finally:
        for bar in bars.values():
            bar.close()


def _validate(team: Team, runs: dict[str, Run], done: int) -> None:
    for name, run in runs.items():
        shares = [loss for losses in team.ask(name, "validate") for loss in losses]
        run.validation.append((done, statistics.fmean(shares)))
    losses = "   ".join(f"{name} {run.validation[-1][1]:.4f}" for name, run in runs.items())
    say(f"step {done:>4}: validation loss   {losses}")


def _merged(blocks: list[Block]) -> Block:
    """Return the blocks of all ranks of a run as one, with the shares of all and the time of the slowest rank."""
    losses = [[loss for row in rows for loss in row] for rows in zip(*(block.losses for block in blocks), strict=True)]
    seconds = [max(times) for times in zip(*(block.seconds for block in blocks), strict=True)]
    return Block(losses, seconds)
