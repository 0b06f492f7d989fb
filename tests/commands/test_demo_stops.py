"""The demo ended by force: no process stays, no checkpoint breaks, one line says why."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked_scripts
import pytest
import torch

import flatparam.checkpoint
from examples.demo import checkpoint, cli, messages, processes

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
DEMO = [sys.executable, "-m", "examples.demo"]


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def stat_fields(pid):
    """The fields of /proc/PID/stat from the third (state) on; None when the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields


def children_of(parent):
    """The processes that ``parent`` started and that live, in the order of their start.

    Without the one that multiprocessing starts from Python 3.14 on in a fork, too, to clean up after them.
    """
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    alive = [(fields, pid) for pid in pids if (fields := stat_fields(pid)) is not None]
    found = sorted((int(fields[19]), pid) for fields, pid in alive if int(fields[1]) == parent)
    return [pid for _, pid in found if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


STARTING, TRAINING = "starting", "step    6"  # how lines begin that the demo prints then


@pytest.fixture
def endless(tmp_path, request):
    """A demo that trains for ever, on (so many ranks), at (a moment): (its process, its children, its out folder)."""
    ranks, moment = getattr(request, "param", (1, TRAINING))
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    out.mkdir()
    scratch.mkdir()
    flatparam.checkpoint.save(out / "checkpoint", torch.nn.Linear(2, 2), extra="of an earlier run")
    process = forked_scripts.Popen(
        [*DEMO, "--quick", "--ranks", str(ranks), "--steps", "1000000", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torchs")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    children = []
    try:
        for line in process.stdout:
            if line.startswith(moment):
                break
        wait_until(lambda: len(children_of(process.pid)) == 1 + 2 * ranks, 60)
        children = children_of(process.pid)
        yield process, children, out
    finally:
        for pid in (process.pid, *children):
            if stat_fields(pid) is not None:
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def all_end(process, children):
    wait_until(lambda: all(stat_fields(pid) is None for pid in (process.pid, *children)), 30)


def leaves_nothing_broken(out, partial=False):
    names = [path.name for path in out.iterdir()]
    assert [name for name in names if not (partial and name.startswith(".checkpoint.partial-"))] == ["checkpoint"]
    flatparam.checkpoint.verify(out / "checkpoint")
    extra = flatparam.checkpoint.read_extra(out / "checkpoint")
    assert extra == "of an earlier run" or extra["step"] % cli.QUICK.validate_every == 0


@pytest.mark.parametrize(
    ("endless", "which", "name"),
    [
        ((1, STARTING), 2, "flatparam rank 0"),
        pytest.param((1, TRAINING), 0, "unsharded", marks=pytest.mark.thorough),
        pytest.param((2, TRAINING), 2, "torch FSDP1 rank 1", marks=pytest.mark.thorough),
        pytest.param((2, TRAINING), 3, "flatparam rank 0", marks=pytest.mark.thorough),
    ],
    indirect=["endless"],
)
def test_a_killed_process_ends_all(endless, which, name):
    process, children, out = endless
    os.kill(children[which], signal.SIGKILL)
    all_end(process, children)
    assert process.stderr.read() == f"examples.demo: {name} was killed by SIGKILL; all processes ended\n"
    assert list(out.with_name("scratch").iterdir()) == []
    assert process.wait() == 1
    leaves_nothing_broken(out)


@pytest.mark.thorough
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_ends_all(endless, signum):
    process, children, out = endless
    process.send_signal(signum)
    process.send_signal(signum)  # an impatient user
    all_end(process, children)
    assert process.stderr.read() == f"examples.demo: stopped by {signum.name}; all processes ended\n"
    assert list(out.with_name("scratch").iterdir()) == []
    assert process.wait() == 128 + signum
    leaves_nothing_broken(out)


@pytest.mark.thorough
def test_a_killed_parent_takes_its_children_along(endless):
    process, children, out = endless
    process.kill()
    all_end(process, children)
    leaves_nothing_broken(out, partial=True)  # which the next save removes


@pytest.mark.thorough
def test_processes_that_wait_do_not_spin_and_one_that_hangs_is_named(tmp_path, monkeypatch):
    def cpu_ticks(pid):
        return sum(map(int, stat_fields(pid)[11:13]))  # user and system time

    of_other_tests = children_of(os.getpid())
    with processes.Team(cli.QUICK, tmp_path) as team:
        team.start()
        team.ask(messages.FLATPARAM, "train", 0, 2)
        pids = [pid for pid in children_of(os.getpid()) if pid not in of_other_tests]
        assert len(pids) == 5
        before = [cpu_ticks(pid) for pid in pids]
        time.sleep(1.0)
        assert all(
            cpu_ticks(pid) - ticks <= 0.1 * os.sysconf("SC_CLK_TCK") for pid, ticks in zip(pids, before, strict=True)
        )

        monkeypatch.setattr(processes, "ANSWER_SECONDS", 2.0)
        os.kill(pids[4], signal.SIGSTOP)
        with pytest.raises(processes.DemoFailed, match=r"no answer for 2 s from flatparam rank 0, flatparam rank 1"):
            team.ask(messages.FLATPARAM, "train", 2, 1)
    assert set(children_of(os.getpid())) <= set(of_other_tests)


WRITE_FOR_EVER = """
import sys, pathlib, torch
from examples.demo import checkpoint
for step in range(10**9):
    weights = torch.full((1_000_000,), float(step))
    checkpoint.write_atomically({"step": step, "model": {"w": weights}}, pathlib.Path(sys.argv[1]))
"""


@pytest.mark.thorough
def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    for delay in (0.0, 0.013, 0.037):
        path.unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(path)], cwd=ROOT) as writer:
            wait_until(path.exists, 60)
            time.sleep(delay)
            writer.kill()
        state = checkpoint.read(path)
        assert torch.equal(state["model"]["w"], torch.full((1_000_000,), float(state["step"])))
