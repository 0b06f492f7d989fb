"""Kill real ranks of ``flatparam.elastic`` at random points.

    PYTHONPATH=.:tests/support python -m tests.elastic.kills --kills 200 --seed 1

A job is one torchrun, whose ranks train tests/support/killed_script.py. It takes one order after another, each when
all ranks train again. An order has one or two strikes: a rank, a phase, how often the rank comes to the phase, and the
part of the phase's time that passes before the signal.

Oracle: the unsharded module, trained on the batches of the ranks that each step had. It gives the loss of each rank in
each step, the parameters of each checkpoint that is left, and those at the end.
"""

import argparse
import collections
import contextlib
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import forked_scripts
import killed_script
import torch
from elastic_oracle import Unsharded

from flatparam import checkpoint
from flatparam.common.redundancy import MOST, group_of

RANKS = 4
HEARTBEAT = 5.0
LIMIT = 120.0  # seconds without a step, on a busy machine
STEPS = 30  # of the training for each order, more than it needs on a busy machine
LOOP = ("forward", "backward", "reduce", "clip", "step", "parity", "commit", "save", "load")
PARTS = ("end_world", "meet", "make_world", "find_state", "enter")
RECOVERY = ("recover", *(f"recover {part}" for part in (*PARTS, "rebuild")))
JOINING = ("build", "ask", "join", *(f"join {part}" for part in PARTS[1:]))
GROWTH = ("grow", *(f"grow {part}" for part in PARTS))
LOST = re.compile(r"the state of .* is lost, with what the others keep of it.*: start again from the newest checkpoint")
# torchrun's own error, and what has led to the error that ends a rank
ENDS_BEFORE = re.compile(r"ChildFailedError|OrderError: (the process of rank|rank \d+ has left the world)")
AGAIN = "elastic.start: ranks are lost, and no state is committed yet: start the job again"


def strike(slot, phase, nth=0, part=0.0, kind="kill"):
    return {"slot": slot, "phase": phase, "nth": nth, "part": part, "kind": kind}


def others(slot, redundancy, alike):
    """Return the ranks in the group of ``slot``, or those in other groups."""
    group = group_of(slot, RANKS, redundancy)
    return [one for one in range(RANKS) if one != slot and (one in group) == alike]


def draw(source, redundancy, spared=None):
    """Return a random order for ranks that all train: its name, and its strikes. ``spared``: no rank to be killed."""

    def anywhere(slot, phases=LOOP, may_stop=True):
        kind = "stop" if may_stop and source.random() < 0.12 else "kill"
        phase = source.choice(phases)
        return strike(slot, phase, source.randrange(3) if phase in LOOP else 0, source.random(), kind)

    def chosen(slots):
        return source.choice([one for one in slots if one != spared] or [None])

    first = chosen(range(RANKS))
    apart, alike = (chosen(others(first, redundancy, is_alike)) for is_alike in (False, True))
    ways = {"one": 10, "joining": 3, "growth": 2}
    ways |= {"two groups": 1, "recovery": 3} if apart is not None else {}
    ways |= {"one group": 1} if spared is None else {}
    way = source.choices(list(ways), list(ways.values()))[0]
    strikes = [anywhere(first, may_stop=way == "one")]
    if way == "two groups":
        strikes.append({**strikes[0], "slot": apart, "part": source.random()})
    elif way == "recovery":
        strikes.append(anywhere(apart, RECOVERY, may_stop=False))
    elif way == "one group":
        strikes.append(anywhere(alike, RECOVERY, may_stop=False))
    elif way == "joining":
        strikes.append(anywhere(first, JOINING, may_stop=False))
    elif way == "growth":
        strikes.append(anywhere(chosen(one for one in range(RANKS) if one != first), GROWTH))
    return way, strikes


class Job:
    """One torchrun, whose ranks take ``orders``. ``struck``: order -> strike -> the member, and the second.

    ``seconds``: order -> from its last strike to the next step that is done; ``resources``: member -> by epoch bytes,
    threads and open files; ``problems``: of ``check``.
    """

    def __init__(self, orders, redundancy, folder):
        self.orders, self.redundancy, self.folder = orders, redundancy, Path(folder)
        self.struck, self.seconds = collections.defaultdict(dict), {}
        self.steps, self.ends, self.pids = [], [], {}
        self.resources = collections.defaultdict(list)
        self.problems, self.hangs, self.saved = [], "", []
        self.until = STEPS * len(orders) + 8
        self.said, self.errors, self._at = [], [], 0

    def run(self, shows=lambda job, number: None):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path]), "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"OMP_NUM_THREADS": "1", "FLATPARAM_HEARTBEAT": str(HEARTBEAT), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
        command += [f"--nproc-per-node={RANKS}", "-m", "flatparam.elastic", "--max-joins=1000"]
        command += [killed_script.__file__, self.until, self.folder, self.redundancy]
        self.process = forked_scripts.Popen(
            list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        readers = [
            threading.Thread(target=self._read, args=(pipe, lines), daemon=True)
            for pipe, lines in ((self.process.stdout, self.said), (self.process.stderr, self.errors))
        ]
        for reader in readers:
            reader.start()
        try:
            if self.orders[0][0] != "start":  # a kill before the first commit ends the job
                self._wait(lambda: self._train_since(0.0))
            for number, (_, strikes) in enumerate(self.orders):
                self._order(number, strikes)
                self._wait(lambda number=number: self._is_over(number))
                shows(self, number)
                if self.process.poll() is not None:
                    break
            self._order(len(self.orders), [], drains=True)
            self._wait(lambda: self.process.poll() is not None)
        except TimeoutError:
            self.hangs = f"it hangs: no step was done for {LIMIT:g} s\n{self._end()}"
        for reader in readers:
            reader.join(10.0)
        self._take()
        self.status, self.saved = self.process.returncode, self._load()
        return self

    def _read(self, pipe, lines):
        for line in pipe:
            lines.append(line.rstrip("\n"))

    def _order(self, number, strikes, drains=False):
        new = self.folder / "new"
        new.write_text(json.dumps({"number": number, "strikes": strikes, "drains": drains}))
        new.replace(self.folder / "orders")

    def _wait(self, is_over):
        """Raises: TimeoutError if no step is done for a while."""
        end, done = time.monotonic() + LIMIT, len(self.steps)
        while not is_over() and self.process.poll() is None:
            if len(self.steps) > done:
                end, done = time.monotonic() + LIMIT, len(self.steps)
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.05)
            self._take()

    def _is_over(self, number):
        """Whether all strikes of the order have struck, and all ranks train again."""
        struck = self.struck[number]
        if len(struck) < len(self.orders[number][1]):
            return False
        return self._train_since(max(second for _, second in struck.values()))

    def _train_since(self, since):
        """Whether three steps of all ranks have begun since that second, and were done."""
        return len({step for step, size, _, _, begin, _, _ in self.steps if size == RANKS and begin > since}) > 2

    def _take(self):
        """Take what the ranks have said."""
        while self._at < len(self.said):
            kind, *rest = self.said[self._at].split(" ") if self.said[self._at] else [""]
            self._at += 1
            if kind == "begins":
                self.pids[rest[0]] = int(rest[1])
            elif kind == "struck":
                number, i, member, second = int(rest[0]), int(rest[1]), rest[2], float(rest[3])
                self.struck[number][i] = (member, second)
            elif kind == "step":
                step, size, rank, epoch = map(int, rest[:4])
                begin = float(rest[4])
                self.steps.append((step, size, rank, epoch, begin, float.fromhex(rest[5]), rest[6]))
                for number, struck in self.struck.items():
                    if len(struck) == len(self.orders[number][1]) and number not in self.seconds:
                        since = max(second for _, second in struck.values())
                        if begin > since:
                            self.seconds[number] = begin - since
            elif kind == "resources":
                self.resources[rest[1]].append(tuple(map(int, [rest[0], *rest[2:]])))
            elif kind == "end":
                self.ends.append(rest[0])

    def _end(self):
        """End a job that hangs. Returns: where its processes are."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)  # faulthandler prints their stacks
        time.sleep(2.0)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30.0)
        self.process.kill()
        return "\n".join(self.errors[-200:])

    @property
    def kills(self):
        return sum(map(len, self.struck.values()))

    @property
    def also_lost(self):
        """Members that others have taken for lost, and that no strike has met: the machine was busy."""
        struck = {member for strikes in self.struck.values() for member, _ in strikes.values()}
        return set(re.findall(r"(\d+\.\d+) was replaced", "\n".join(self.errors))) - struck

    def _load(self):
        """Return the checkpoints that are left: name, step and epoch, parameters."""
        saved = []
        for path in sorted(self.folder.glob("checkpoint-*")):
            found = Unsharded()
            found.net.parts[0] = killed_script.Watched(found.net.parts[0])
            checkpoint.verify(path)
            when = checkpoint.load(path, found.net).extra
            saved.append((path.name, when, found.params()))
        return saved

    def check(self):
        """Return what is not as it must be. Oracle: the unsharded module."""
        if self.hangs:
            return [self.hangs]
        found, last = [], max(self.struck, default=0)
        way, text = self.orders[last][0], "\n".join(self.errors)
        lost_group = way == "one group" and len(self.struck[last]) == 2
        raised = set(re.findall(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception)\b.*)", text, re.MULTILINE))
        raised -= {one for one in raised if ENDS_BEFORE.search(one)}
        clear = {one for one in raised if (lost_group and LOST.search(one)) or (way == "start" and AGAIN in one)}
        if self.status == 0 and lost_group:
            found.append("status 0, but two ranks of one group were lost")
        if self.status != 0 and not clear:
            found.append(f"status {self.status}, and no error that says what to do")
        if raised != clear or (clear and self.status == 0):
            found.append(f"errors: {sorted(raised)}")
        return found + self._wrong_bits()

    def _told(self, epoch=math.inf):
        """Return what ranks have said of each step: size, rank, loss. A step is repeated in a later epoch.

        ``epoch``: what was known then.
        """
        told = {}
        for step, size, rank, number, _, loss, _ in self.steps:
            if number <= epoch:
                told.setdefault(step, {}).setdefault(number, []).append((size, rank, loss))
        return {step: of_epoch[max(of_epoch)] for step, of_epoch in told.items()}

    def _wrong_bits(self):
        told, oracle, found = self._told(), Unsharded(clip=killed_script.CLIP), []
        for step in range(max(told, default=-1) + 1):
            sizes = {size for size, _, _ in told.get(step, ())}
            if len(sizes) != 1:
                return [f"step {step} was done by worlds of the sizes {sizes}"]
            losses = oracle.step(step, *sizes)
            found += [
                f"step {step}: rank {rank} has the loss {loss}, expected {losses[rank]}"
                for _, rank, loss in told[step]
                if loss != losses[rank]
            ]
        if self.status == 0:
            if len(told) != self.until:
                found.append(f"{len(told)} steps were done, expected {self.until}")
            if set(self.ends) != {oracle.params().numpy().tobytes().hex()}:
                found.append(f"wrong bits at the end, on {len(self.ends)} ranks")
        for name, (step, epoch), params in self.saved:
            told, oracle = self._told(epoch), Unsharded(clip=killed_script.CLIP)
            for before in range(step):
                oracle.step(before, told[before][0][0])
            if not torch.equal(params, oracle.params()):
                found.append(f"wrong bits in {name}, of step {step} in epoch {epoch}")
        return found


def play(orders, redundancy, shows=lambda job, number: None):
    """Run a job, and check it. Returns: the job."""
    with tempfile.TemporaryDirectory(prefix="flatparam-kills-") as folder:
        job = Job(orders, redundancy, folder).run(shows)
    job.problems = job.check()
    return job


def row_of(way, strikes):
    """Return the row of the table for an order."""
    rows = {
        "one": "stopped" if strikes[0]["kind"] == "stop" else strikes[0]["phase"],
        "two groups": "two of different groups",
        "recovery": "one in the recovery of another group",
        "one group": "two of one group",
        "joining": "a process that joins",
        "growth": "a rank, as a process joins",
        "start": "in the first build",
    }
    return rows[way]


def table(jobs):
    """Return the lines of a table: point of the kill, orders, ranks, seconds to the next step, how it ended."""
    rows = collections.defaultdict(list)
    for job in jobs:
        for number, struck in sorted(job.struck.items()):
            if struck:
                is_last = number == max(job.struck) and job.status != 0
                outcome = "trained on" if not is_last else "problem" if job.problems else "clear end"
                rows[row_of(*job.orders[number])].append((len(struck), job.seconds.get(number), outcome))
    lines = ["| killed | times | ranks | seconds to the next step: median, most | result |", "|---|---|---|---|---|"]
    for name in sorted(rows, key=lambda name: ([*LOOP, name].index(name), name)):
        counts, seconds, outcomes = zip(*rows[name], strict=True)
        seconds = [one for one in seconds if one is not None]
        told = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""
        results = ", ".join(f"{outcome} {times}" for outcome, times in collections.Counter(outcomes).items())
        lines.append(f"| {name} | {len(counts)} | {sum(counts)} | {told} | {results} |")
    return lines


def slope(values):
    """Return how much ``values`` grow from one to the next, by least squares."""
    return statistics.linear_regression(range(len(values)), values).slope if len(values) > 1 else 0.0


def growth(job, member="0.0"):
    """Return what one world after another adds to a process: bytes, threads, open files; and how many worlds it had."""
    kept = job.resources[member][5:]  # the first ones fill caches
    _, *columns = zip(*kept, strict=True) if kept else [()] * 4
    return [slope(column) for column in columns], len(kept)


def campaign(kills, seed, per_job=20):
    """Run jobs until ``kills`` have struck. Returns: the jobs. Rank 0 of the first one is spared, and measured."""
    jobs, done = [], 0
    while done < kills:
        source = random.Random(f"kills {seed} {len(jobs)}")
        redundancy = source.choice(list(MOST))
        spared = None if jobs else 0
        count = min(kills - done, per_job if jobs else 60)
        orders = [] if spared == 0 or source.random() < 0.7 else [("start", [strike(1, "build", 0, source.random())])]
        orders += [draw(source, redundancy, spared) for _ in range(count)]
        begin = time.monotonic()

        def shows(job, number, before=done, begin=begin):
            way, strikes = job.orders[number]
            taken, seconds = job.seconds.get(number), time.monotonic() - begin
            at = f"kill {before + job.kills} of {kills}, job {len(jobs)}, {seconds:.0f} s"
            places = ", ".join(f"{one['kind']} in {one['phase']}" for one in strikes)
            print(f"{at}: {way}: {places}: {'' if taken is None else f'{taken:.1f} s'}", flush=True)

        job = play(orders, redundancy, shows)
        done += job.kills
        jobs.append(job)
        for problem in (*job.problems, *(job.errors[-150:] if job.problems else ())):
            print(
                f"PROBLEM in job {len(jobs) - 1} ({redundancy}, {orders[max(job.struck, default=0)]}): {problem}",
                flush=True,
            )
        if spared is not None:
            (size, threads, files), worlds = growth(job)
            grows = f"{size / 2**20:.2f} MiB, {threads:.2f} threads, {files:.2f} open files"
            print(f"each of {worlds} worlds adds to rank {spared}: {grows}", flush=True)
        if not job.kills:
            break
    return jobs


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.elastic.kills", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="how many ranks are killed or stopped (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of victims and points (default: 0)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    jobs = campaign(given.kills, given.seed)
    print("\n".join(table(jobs)))
    print(f"taken for lost, and not struck: {sum(len(job.also_lost) for job in jobs)}")
    return int(any(job.problems for job in jobs))


if __name__ == "__main__":
    sys.exit(main())
