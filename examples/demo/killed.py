"""``make demo ARGS=--kill``: kill a rank of ``flatparam.elastic``, watch the others go on, and compare the losses."""

from __future__ import annotations

import json
import os
import pickle
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from typing import Any

from tqdm import tqdm

from .config import Config
from .experiment import say
from .processes import DemoFailed, environment, tail
from .report import CLOSE, Check, largest_difference, table

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("killed_worker.py")
LIMIT_SECONDS = 240.0  # it takes half a minute, or some more beside other programs


class Watcher:
    """Follows the events of the training processes, tells them on the screen, and kills one.

    ``went_on``, ``joined``: (step, seconds after the kill) of the first step that began with the ranks that were left,
    and with all ranks again.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._processes: dict[int, int] = {}  # slot -> process
        self._killed: float | None = None
        self.went_on: tuple[int, float] | None = None
        self.joined: tuple[int, float] | None = None
        self.losses: list[list[float]] = []
        self.uninterrupted: list[list[float]] = []

    def follow(self, lines: Iterable[str]) -> None:
        """Read all events, with a bar where stderr is a terminal."""
        with tqdm(total=self._config.steps, unit="step", leave=False, disable=None) as bar:
            for line in lines:
                event = json.loads(line)
                if "process" in event:
                    self._processes[event["slot"]] = event["process"]
                elif "step" in event:
                    self._begin(**event)
                    bar.set_postfix_str(f"{event['ranks']} ranks", refresh=False)
                    bar.update(event["step"] - bar.n)
                else:
                    self.losses, self.uninterrupted = event["losses"], event["uninterrupted"]

    def _begin(self, step: int, ranks: int, begin: float, last: list[list[float]]) -> None:
        config, victim = self._config, self._config.ranks - 1
        if self._killed is None and step >= config.steps // 4 and victim in self._processes:
            self._killed = monotonic()
            os.kill(self._processes[victim], signal.SIGKILL)
            say(f"step {step:>4}: killed rank {victim}, process {self._processes[victim]}")
        elif self._killed is not None and ranks < config.ranks and self.went_on is None:
            self.went_on = step, begin - self._killed
            say(f"step {step:>4}: {counted(ranks)} on, {self.went_on[1]:.1f} s after the kill; a new process starts")
        elif self.went_on is not None and ranks == config.ranks and self.joined is None:
            self.joined = step, begin - self._killed if self._killed is not None else 0.0
            say(f"step {step:>4}: it has joined, {self.joined[1]:.1f} s after the kill; {counted(ranks)} on")
        if last and step % config.validate_every == 0:
            say(f"step {step:>4}: loss {statistics.fmean(last[0]):.4f}")

    def checks(self) -> list[Check]:
        """Return the checks of what the demo claims."""
        found = [
            Check(at is not None, f"{what}: " + (f"step {at[0]}, {at[1]:.1f} s after the kill" if at else "never"))
            for what, at in (("the others went on", self.went_on), ("all ranks trained again", self.joined))
        ]
        difference = largest_difference(self.losses, self.uninterrupted)
        limit = 0.0 if self._config.exact else CLOSE
        must = "must be 0" if self._config.exact else f"at most {CLOSE}: sums in another order"
        found.append(
            Check(
                difference <= limit and len(self.losses) == self._config.steps,
                f"losses of {len(self.losses)} steps to those without interruption, max |difference|: {difference:g} "
                f"({must})",
            )
        )
        return found

    def report(self) -> str:
        """Return a table of the steps around the changes."""
        changes = [at[0] for at in (self.went_on, self.joined) if at is not None]
        steps = sorted({0, *changes, *(step - 1 for step in changes), len(self.losses) - 1})
        rows = [["step", "ranks", "loss", "without interruption"]]
        for step in (step for step in steps if 0 <= step < len(self.losses)):
            both = (f"{statistics.fmean(row[step]):.6f}" for row in (self.losses, self.uninterrupted))
            rows.append([str(step), str(len(self.losses[step])), *both])
        return (
            f"{table(rows)}\nwithout interruption: one unsharded process, on the batches of so many ranks in each step"
        )


def counted(ranks: int) -> str:
    """The subject and verb of a line about ``ranks`` ranks."""
    return "1 rank goes" if ranks == 1 else f"{ranks} ranks go"


def demo_killed(config: Config) -> int:
    """Run the demo and print its report; returns 0 when every check holds. Raises: DemoFailed."""
    say(f"starting {config.ranks} ranks: torchrun --max-restarts 0 ... -m flatparam.elastic")
    watcher, start = Watcher(config), monotonic()
    with tempfile.TemporaryDirectory(prefix="flatparam-demo-") as scratch:
        _run(config, watcher, Path(scratch))
    found = watcher.checks()
    print(f"\n{watcher.report()}\n")
    for check in found:
        print(f"[{'ok' if check.holds else 'FAILED'}] {check.text}")
    print(f"{monotonic() - start:.0f} s in all")
    return 0 if all(check.holds for check in found) else 1


def _run(config: Config, watcher: Watcher, scratch: Path) -> None:
    settings, log = scratch / "config", scratch / "log"
    settings.write_bytes(pickle.dumps(config))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"]
    paths: list[Any] = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*launcher, f"--nproc-per-node={config.ranks}", "-m", "flatparam.elastic", WORKER, settings],
            env={**environment(config.threads), "PYTHONPATH": os.pathsep.join(map(str, paths))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C comes once, from here
        )
    timer = threading.Timer(LIMIT_SECONDS, process.terminate)
    timer.start()
    try:
        assert process.stdout is not None
        watcher.follow(process.stdout)
        if status := process.wait():
            late = f", stopped after {LIMIT_SECONDS:.0f} s" if timer.finished.is_set() else ""
            raise DemoFailed(f"torchrun ended with status {status}{late}", tail(log))
    finally:
        timer.cancel()
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks: do not kill it
        process.communicate()
