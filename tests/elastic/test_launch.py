"""Elastic training under stock torchrun, with real processes: ``torchrun ... -m flatparam.elastic script.py``.

Oracle: the unsharded module, trained on the batches of the ranks that each step had in the end. Its gradients are whole
numbers, so sums of them have the same bits in each order.

Promises:
- after SIGKILL the others soon begin their next step, without a new process; it joins, all train as the unsharded
  module does, and the job ends with status 0: `test_a_killed_process_is_replaced`
- the same holds for the rank whose number is 0, and for one rank after another: `test_each_rank_can_be_lost_in_turn`
- a stopped process is replaced after the heartbeat: `test_a_stopped_process_is_replaced`
- an error of the script ends the job with a status that is not 0, and is printed: `test_an_error_ends_the_job`
- with `--max-restarts 1` torchrun starts all anew after an error, here `sys.exit(3)`: `test_a_second_start_begins_anew`
- without torchrun, or with one rank, the error says what to do, also where no process is forked from a warm one:
  `test_bad_starts_are_told`
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import elastic_script
import forked_scripts
import pytest
from elastic_oracle import Unsharded

from flatparam.elastic.__main__ import main

pytestmark = pytest.mark.multiprocess
SUPPORT = Path(elastic_script.__file__).parent
LAUNCH = ["-m", "torch.distributed.run", "--standalone"]
SOON = 8.0  # seconds: it takes 1, but for a busy machine
HEARTBEAT = 4.0


def launched(ranks, *arguments, restarts=0, begin=forked_scripts.Popen, **settings):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"OMP_NUM_THREADS": "1", **settings}
    command = [sys.executable, *LAUNCH, f"--max-restarts={restarts}", f"--nproc-per-node={ranks}"]
    command += ["-m", "flatparam.elastic", *arguments]
    return begin(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process):
    said, errors = process.communicate(timeout=120)
    return said, errors, process.returncode


def struck(said):
    """Return the members that have struck themselves, and when, in this order."""
    return re.findall(r"^struck (\S+) (\S+)$", said, re.MULTILINE)


def trains_as_the_unsharded_module(said, until, device="cpu"):
    """Return the number of ranks of each step."""
    sizes = {}
    for step, size in re.findall(r"^step (\d+) (\d+) ", said, re.MULTILINE):
        sizes[int(step)] = int(size)
    assert sorted(sizes) == list(range(until)), said
    oracle = Unsharded(device)
    for step, size in sorted(sizes.items()):
        oracle.step(step, size)
    expected = oracle.params().cpu().numpy().tobytes().hex()
    ends = re.findall(r"^end (\w+)", said, re.MULTILINE)
    assert set(ends) == {expected}, said
    assert len(ends) >= sizes[until - 1], said  # processes may join after the last step
    return [sizes[step] for step in range(until)]


@pytest.fixture(scope="module")
def job():
    """A job in which each process that torchrun has started is lost, one after another: killed, stopped, killed."""
    faults = ["0.0:4:kill", "1.0:24:stop", "2.0:44:kill"]
    heartbeat = {"FLATPARAM_HEARTBEAT": f"{HEARTBEAT:g}"}
    said, errors, status = ended(launched(3, SUPPORT / "elastic_script.py", "70", *faults, **heartbeat))
    assert status == 0, said + errors
    return said, errors, trains_as_the_unsharded_module(said, 70)


def test_a_killed_process_is_replaced(job):
    said, errors, sizes = job
    assert sizes[0] == sizes[-1] == 3, sizes
    for step in (3, 43):  # from which the others go on
        assert 2 in sizes[step : step + 2], sizes
    killed = float(dict(struck(said))["2.0"])
    begins = map(float, re.findall(r"^step \d+ \d \S+ (\S+)", said, re.MULTILINE))
    assert min(begin for begin in begins if begin > killed) - killed < SOON
    assert "2 ranks go on from step" in errors
    assert "2.0 was killed by SIGKILL" in errors
    assert "2.1 joined" in errors


def test_each_rank_can_be_lost_in_turn(job):
    said, errors, _ = job
    assert [member for member, _ in struck(said)] == ["0.0", "1.0", "2.0"]
    killed = re.findall(r"^flatparam.elastic: (\S+) was killed by SIGKILL$", errors, re.MULTILINE)
    assert killed == ["0.0", "2.0"]
    assert not re.search("(. was killed by SIGKILL); \\1", errors), errors
    assert all(re.search(rf"^step \d+ 3 {rank}\.1 ", said, re.MULTILINE) for rank in range(3)), errors


def test_a_stopped_process_is_replaced(job):
    _, errors, _ = job
    assert re.search(r"1\.0 was replaced in epoch \d", errors), errors
    assert "1.1 joined" in errors
    assert "1.0 was killed" not in errors


def test_an_error_ends_the_job():
    said, errors, status = ended(launched(2, SUPPORT / "elastic_script.py", "40", "1.0:5:raise"))
    assert status != 0, said
    assert "end" not in said
    assert "ValueError: this batch is bad" in errors


def test_a_second_start_begins_anew():
    faults = ["2.0:3:kill", "1.0:6:exit"]
    said, errors, status = ended(launched(3, SUPPORT / "elastic_script.py", "10", *faults, restarts=1))
    assert status == 0, said + errors
    assert re.search(r"failed \(exitcode: 3\)", errors), errors
    assert trains_as_the_unsharded_module(said, 10) == [3] * 10


def test_bad_starts_are_told(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ends:
        main([str(SUPPORT / "elastic_script.py"), "4"])
    assert ends.value.code == 2
    assert "the environment has no RANK: start it with torchrun" in capsys.readouterr().err
    said, errors, status = ended(launched(1, SUPPORT / "elastic_script.py", "4", begin=subprocess.Popen))
    assert status != 0, said
    assert "expected at least 2 ranks" in errors
