"""The demo of a killed rank: its output and its comparison of losses, in a whole run and with made-up events.

Promises:
- `make demo ARGS=--kill` kills a rank, times the others, shows the return, and ends with losses equal to those of
  unsharded training: `test_a_killed_rank_is_shown_and_its_loss_changes_nothing`
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import forked_scripts
import pytest

from examples.demo import cli, killed

ROOT = Path(__file__).resolve().parents[2]
DEMO = [sys.executable, "-m", "examples.demo", "--kill"]
SMALL = ["--steps", "160", "--width", "32", "--depth", "2", "--context", "32", "--batch", "4"]
CONFIG = dataclasses.replace(cli.KILL, steps=8, validate_every=4)


@pytest.mark.multiprocess
def test_a_killed_rank_is_shown_and_its_loss_changes_nothing():
    done = forked_scripts.completed([*DEMO, *SMALL], cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    told = [
        r"step   40: killed rank 1, process \d+",
        r"step +\d+: 1 rank goes on, \d+\.\d s after the kill; a new process starts",
        r"step +\d+: it has joined, \d+\.\d s after the kill; 2 ranks go on",
        r"\[ok\] losses of 160 steps to those without interruption, max \|difference\|: 0 \(must be 0\)",
    ]
    lines = done.stdout.splitlines()
    found = [next((i for i, line in enumerate(lines) if re.fullmatch(pattern, line)), -1) for pattern in told]
    assert found == sorted(found), done.stdout
    assert found[0] > 0, done.stdout
    rows = [line.split() for line in lines if re.fullmatch(r"\d+ +\d +\d\.\d{6} +\d\.\d{6}", line)]
    assert {row[1] for row in rows} == {"1", "2"}
    assert all(loss == other for _, _, loss, other in rows)


@pytest.mark.thorough
@pytest.mark.multiprocess
def test_a_signal_ends_the_ranks_too():
    with forked_scripts.Popen(
        [*DEMO, *SMALL], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        process = 0
        for line in demo.stdout:
            if match := re.search(r"it has joined, .*", line):
                break
            if match := re.search(r"killed rank 1, process (\d+)", line):
                process = int(match[1])
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 130
        assert demo.stderr.read() == "examples.demo: stopped by SIGINT; all processes ended\n"
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


LOSSES = [[5.0, 5.0], [4.0, 4.5], [4.0, 3.5], [3.5], [3.0], [3.0, 2.5], [2.5, 2.5], [2.0, 2.5]]


@pytest.fixture
def watch(monkeypatch):
    """A watcher that has followed events at these times: killed at 100 s. Its kills are in ``.kills``."""
    kills = []
    monkeypatch.setattr(killed, "monotonic", lambda: 100.0)
    monkeypatch.setattr(killed.os, "kill", lambda process, number: kills.append((process, number)))

    def followed(steps=((0, 2, 99.0), (2, 2, 99.9), (2, 2, 100.1), (3, 1, 101.5), (4, 1, 102), (5, 2, 104.0)), **end):
        watcher = killed.Watcher(CONFIG)
        events = [{"slot": slot, "process": 70 + slot} for slot in range(2)]
        events += [{"step": step, "ranks": ranks, "begin": at, "last": LOSSES[:1]} for step, ranks, at in steps]
        events += [{"losses": LOSSES, "uninterrupted": LOSSES, **end}]
        watcher.follow([json.dumps(event) for event in events])
        assert kills == [(71, signal.SIGKILL)]
        return watcher

    return followed


def test_seconds_are_counted_from_the_kill(watch, capsys):
    watcher = watch()
    assert watcher.went_on == (3, 1.5)
    assert watcher.joined == (5, 4.0)
    assert [check for check in watcher.checks() if not check.holds] == []
    assert capsys.readouterr().out.splitlines() == [
        "step    0: loss 5.0000",
        "step    2: killed rank 1, process 71",
        "step    3: 1 rank goes on, 1.5 s after the kill; a new process starts",
        "step    4: loss 5.0000",
        "step    5: it has joined, 4.0 s after the kill; 2 ranks go on",
    ]
    steps = [line.split() for line in watcher.report().splitlines()]
    assert ["2", "2", "3.750000", "3.750000"] in steps
    assert ["3", "1", "3.500000", "3.500000"] in steps
    assert ["5", "2", "2.750000", "2.750000"] in steps


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({"steps": ((0, 2, 99.0), (2, 2, 99.9), (3, 1, 101.5))}, "all ranks trained again: never"),
        ({"uninterrupted": [*LOSSES[:3], [3.5000001], *LOSSES[4:]]}, "losses of 8 steps"),
        ({"losses": LOSSES[:7], "uninterrupted": LOSSES[:7]}, "losses of 7 steps"),
        ({"uninterrupted": LOSSES[:7]}, "losses of 8 steps"),
    ],
)
def test_a_fault_fails_its_check_and_no_other(change, failing, watch):
    failed = [check.text for check in watch(**change).checks() if not check.holds]
    assert len(failed) == 1
    assert failed[0].startswith(failing)


def test_a_training_that_fails_is_told(monkeypatch, capsys, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("raise ValueError('wrong data')\n")
    monkeypatch.setattr(killed, "WORKER", script)
    monkeypatch.setattr(killed.subprocess, "Popen", forked_scripts.Popen)
    assert cli.main(["--kill"]) == 1
    errors = capsys.readouterr().err
    assert errors.endswith("examples.demo: torchrun ended with status 1; all processes ended\n")
