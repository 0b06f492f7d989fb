"""Play random programs on simulated ranks: ``python -m tests.simulation --seeds 5000``; see programs.py."""

import argparse
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import process, shrinking, training
from .programs import draw

FOLDER = Path("build/simulation")
BATCH = 25  # seeds that one child plays
AGAIN = 25  # each seed that it divides is played in another child, too, and must give the same digests
PATIENCE = 120.0  # real seconds for a batch


class Runner:
    """Plays seeds on some warm processes, each with a thread here. ``failures``: pairs of a seed and an error."""

    def __init__(self, first, seeds, seconds, kind=""):
        self.first, self.last = first, first + seeds
        self.began, self.seconds = time.monotonic(), seconds
        self.kind = kind
        self.played, self.virtual, self.failures = 0, 0.0, []
        self._next, self._lock = first, threading.Lock()

    def run(self, processes):
        with ThreadPoolExecutor(processes) as pool:
            for work in [pool.submit(self._work) for _ in range(processes)]:
                work.result()  # raises: seeds that nobody has played are no success

    def _take(self):
        with self._lock:
            first = self._next
            if first >= self.last or time.monotonic() - self.began > self.seconds:
                return None
            self._next = min(first + BATCH, self.last)
            return first, self._next

    def _work(self):
        server = process._Server()
        while (seeds := self._take()) is not None:
            first, last = seeds
            while first < last:
                first = self._play(server, first, last)
        server.close()

    def _play(self, server, first, last):
        """Play seeds from ``first`` until a fault strikes, or one fails; return the seed to go on with."""
        try:
            found = server.ask(*request(training.play_seeds, first, last, self.kind))
        except process.SimulatedError:  # which seed, play_alone() tells
            found = [play_alone(server, seed, self.kind) for seed in range(first, last)]
        for i, (seed, _, digests, error) in enumerate(found):
            if seed % AGAIN == 0 and error is None:
                again = play_alone(server, seed, self.kind)
                if again[3] is None and again[2] != digests:
                    found[i] = (seed, 0.0, [], f"another run has other digests: {digests}, {again[2]}")
        with self._lock:
            for seed, seconds, _, error in found:
                self.played += 1
                self.virtual += seconds
                if error is not None:
                    self.failures.append((seed, error))
                    print(f"\nseed {seed} fails: {command(seed, self.kind)}\n{error}")
            took = time.monotonic() - self.began
            print(f"\r{self.played} seeds, {took:.0f} s, {len(self.failures)} failures", end="", file=sys.stderr)
        return found[-1][0] + 1


def request(function, *args):
    return function.__module__, function.__module__, function.__qualname__, args, PATIENCE


def play_alone(server, seed, kind=""):
    try:
        return server.ask(*request(training.play_seeds, seed, seed + 1, kind))[0]
    except process.SimulatedError as error:
        return seed, 0.0, [], str(error)


def command(seed, kind):
    """Return the command that plays the seed again."""
    return f"python -m tests.simulation {''.join(f'--{each} ' for each in kind.split())}--first {seed} --seeds 1"


def last_line(error):
    return next(line for line in reversed(error.splitlines()) if line and not line.startswith("in simulated"))


def kind_of(error):
    """An error without names and numbers; None: no error."""
    return error and re.sub(r"`[^`]*`|[-\d.e]+", "", error)


def shrink(seed, kind=""):
    """Write the smallest program that fails as that of ``seed`` does."""
    server = process._Server()

    def error_of(program):
        try:
            server.ask(*request(training.play, program, kind == "forked"))
        except process.SimulatedError as error:
            return last_line(str(error))
        return None

    program = draw(seed, kind)
    error = error_of(program)
    if error is None:
        print(f"seed {seed} fails in a process that has played others, or at times: it is not shrunk")
        return
    smallest = shrinking.shrunk(program, lambda it: kind_of(error_of(it)) == kind_of(error))
    path = shrinking.write(smallest, error_of(smallest), FOLDER)
    print(f"the smallest program of seed {seed}: {path}\n{path.read_text()}")
    server.close()


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.split(":")[0])
    parser.add_argument("--seeds", type=int, default=100, help="how many to play")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no seeds after that")
    parser.add_argument("--processes", type=int, default=2, help="how many play at a time")
    for kind, what in (
        ("elastic", "programs of flatparam.elastic alone"),
        ("device", "programs for devices alone; with --elastic those of flatparam.elastic for devices"),
        ("forked", "programs of training alone, on ranks that are processes"),
    ):
        parser.add_argument(
            f"--{kind}", dest="kinds", action="append_const", const=kind, default=[], help=f"play {what}"
        )
    parser.add_argument("--shrink", type=int, default=3, help="how many failures to shrink")
    arguments = parser.parse_args()
    kind = " ".join(sorted(set(arguments.kinds), reverse=True))
    if "forked" in kind and kind != "forked":
        parser.error("ranks that are processes have no device, and play no programs of flatparam.elastic")
    runner = Runner(arguments.first, arguments.seeds, arguments.seconds, kind)
    runner.run(min(arguments.processes, -(-arguments.seeds // BATCH)))
    took = time.monotonic() - runner.began
    print(
        f"\n{runner.played} seeds in {took:.1f} s ({1000 * took / max(1, runner.played):.0f} ms each), "
        f"{runner.virtual:.1f} virtual seconds, {len(runner.failures)} failures"
    )
    for seed, error in runner.failures:
        print(f"{command(seed, kind)}: {last_line(error)}")
    for seed, _ in runner.failures[: arguments.shrink]:
        shrink(seed, kind)
    return 1 if runner.failures else 0


if __name__ == "__main__":
    sys.exit(main())
