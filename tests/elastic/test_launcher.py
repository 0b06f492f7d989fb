"""The launcher of one rank, without torchrun: children that are forked here stand for the training process.

Promises:
- a process that a real-time signal ends, which has no name, is replaced like any other:
  `test_a_signal_without_a_name_is_told_by_its_number`
- a signal for the job ends the launcher by that signal, also if the training process has just ended:
  `test_a_signal_after_the_end_of_the_child_ends_the_launcher`
- a stopped process that an epoch has dropped is ended and replaced, also one that had joined:
  `test_a_dropped_process_is_replaced`
- so is one that has ended by an error after it was dropped: `test_a_dropped_process_that_fails_is_replaced`
- a process that is ended gets one signal, and time for its handler: `test_a_handler_of_the_script_runs_once`
- so does one that is ended with the whole job: `test_the_end_of_the_job_leaves_a_handler_its_time`; then it is killed,
  with what it has started, before torchrun kills the launcher alone:
  `test_the_end_of_the_job_leaves_no_process_behind`
- the data loaders of a killed process end with it, as they hold its connections, for which others would wait:
  `test_a_killed_process_takes_its_children_along`
- a script that ends with the status of a replaced process ends the job, as any error does:
  `test_the_status_of_a_replaced_process_is_not_enough`
- a process that ends with status 0 ends the job, also if it has left the loop early:
  `test_a_process_that_ends_well_ends_the_job`
- the launcher of a process that is killed after the loop has a status that is not 0:
  `test_a_process_that_is_killed_after_the_loop_fails_the_job`; but for one that an epoch has dropped before:
  `test_a_dropped_process_that_aborts_is_replaced`
- if the job ends as a rank is missing, each process ends by its own error:
  `test_a_job_that_ends_before_it_begins_replaces_nobody`
- a process that is stopped for longer than the heartbeat at the end of the job is ended, and the launcher's status is
  0; one that goes on has the time that it needs: `test_the_end_of_the_job_ends_a_stopped_process`
"""

import contextlib
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from flatparam.elastic import __main__ as launcher
from flatparam.fsdp.desync.stores import in_memory


def forked(body):
    """Run ``body`` in a child with its own process group, which ends with status 0, or 1 after an exception."""
    child = os.fork()
    with contextlib.suppress(OSError):
        os.setpgid(child, 0)
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return child


def status_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def status_of_run(monkeypatch, said, lives, are_over=False):
    """Run the launcher of slot 2, whose processes are ``lives``, in a child. ``said``: the keys in the job's store.

    ``are_over``: it looks at them first when they have ended.
    """
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = in_memory()
    for key, value in said.items():
        store.set(f"flatparam elastic/{key}", value)
    monkeypatch.setattr(launcher, "store_of_job", lambda: store)
    monkeypatch.setattr(launcher, "_LOOKING", 0.05)

    def run():
        slot = launcher._Slot("2", [])

        def fork():
            slot._child = forked(lives.pop(0))
            if are_over:
                os.waitid(os.P_PID, slot._child, os.WEXITED | os.WNOWAIT)
            return False

        slot._fork = fork
        os._exit(slot.run(len(lives) - 1))

    return status_of(forked(run))


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)


def end_with(status, seconds=0.0):
    time.sleep(seconds)
    os._exit(status)


@pytest.fixture(autouse=True)
def _four_slots(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGRTMIN + 3])
def test_a_signal_without_a_name_is_told_by_its_number(monkeypatch, capfd, number):
    assert status_of_run(monkeypatch, {}, [lambda: die(number), lambda: end_with(7)]) == 7
    name = "SIGKILL" if number == signal.SIGKILL else f"signal {number}"
    assert f"2.0 was killed by {name}" in capfd.readouterr().err


def test_a_signal_after_the_end_of_the_child_ends_the_launcher():
    def end():
        slot = launcher._Slot("2", [])
        slot._child = forked(lambda: None)
        os.waitpid(slot._child, 0)  # by ``_wait``, which the signal interrupts before it notes that
        slot._pass_on(signal.SIGTERM, None)

    assert status_of(forked(end)) == -signal.SIGTERM


def test_a_dropped_process_is_replaced(monkeypatch, capfd):
    epochs = {
        "epoch/1": '[["0.0", "1.0", "2.0"], 0, "3.0 was killed"]',
        "epoch/2": '[["0.0", "1.0"], 0, "2.0 is silent"]',
    }
    assert status_of_run(monkeypatch, epochs, [stop, lambda: end_with(7)]) == 7
    assert "2.0 was replaced in epoch 2: 2.0 is silent" in capfd.readouterr().err
    epochs |= {"epoch/3": '[["0.0", "1.0", "2.1"], 1, "2.1 joined"]', "epoch/4": '[["0.0", "1.0"], 1, "2.1 is silent"]'}
    assert status_of_run(monkeypatch, epochs, [die, stop, lambda: end_with(8, 0.3)]) == 8
    assert "2.1 was replaced in epoch 4: 2.1 is silent" in capfd.readouterr().err


DROPPED = {"epoch/1": '[["0.0", "1.0"], 0, "2.0 is silent"]'}


def slot_with_child(monkeypatch, status):
    """A launcher whose process has ended, and the job's store."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = in_memory()
    monkeypatch.setattr(launcher, "store_of_job", lambda: store)
    slot = launcher._Slot("2", [])
    slot._child = forked(lambda: end_with(status))
    os.waitid(os.P_PID, slot._child, os.WEXITED | os.WNOWAIT)
    return slot, store


def test_a_dropped_process_that_fails_is_replaced(monkeypatch):
    slot, store = slot_with_child(monkeypatch, 1)
    for key, value in DROPPED.items():
        store.set(f"flatparam elastic/{key}", value)
    assert slot._wait("2.0") == (launcher.REPLACED, "2.0 was replaced in epoch 1: 2.0 is silent")


def handling(signals):
    """A training process whose handler of SIGTERM takes half a second, and notes in the file that it runs."""

    def handle():
        def at_end(number, frame):
            with signals.open("a") as file:
                file.write("x")
            time.sleep(0.5)
            os._exit(0)

        signal.signal(signal.SIGTERM, at_end)
        signals.touch()
        time.sleep(60.0)

    slot = launcher._Slot("2", [])
    slot._child = forked(handle)
    while not signals.exists():
        time.sleep(0.01)
    return slot


def test_a_handler_of_the_script_runs_once(tmp_path):
    handling(tmp_path / "signals")._end(signal.SIGTERM)
    assert (tmp_path / "signals").read_text() == "x"


def test_the_end_of_the_job_leaves_a_handler_its_time(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "_GRACE", 0.1)

    def end():
        handling(tmp_path / "signals")._pass_on(signal.SIGTERM, None)

    begin = time.monotonic()
    job = forked(end)
    while not (tmp_path / "signals").exists() or not (tmp_path / "signals").read_text():
        time.sleep(0.01)
    os.kill(job, signal.SIGTERM)  # torchrun sends one, and the scheduler another one
    assert status_of(job) == -signal.SIGTERM
    assert time.monotonic() - begin > 0.5
    assert (tmp_path / "signals").read_text() == "x"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
@pytest.mark.parametrize("is_patient", [True, False])
def test_the_end_of_the_job_leaves_no_process_behind(monkeypatch, tmp_path, number, is_patient):
    monkeypatch.setattr(launcher, "_MOST_GRACE", 0.6)
    started = tmp_path / "started"

    def ignore():
        signal.signal(number, signal.SIG_IGN)
        child = os.fork()
        if child:
            signal.signal(number, signal.SIG_IGN if is_patient else signal.SIG_DFL)
            started.with_suffix(".new").write_text(f"{os.getpid()} {child}")
            started.with_suffix(".new").replace(started)
        time.sleep(600.0)

    def run():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        slot = launcher._Slot("2", [])

        def fork():
            slot._child = forked(ignore)
            return False

        slot._fork = fork
        os._exit(slot.run(0))

    job = forked(run)
    while not started.exists():
        time.sleep(0.01)
    begin = time.monotonic()
    os.kill(job, number)
    if is_patient:
        time.sleep(0.3)
        os.kill(job, signal.SIGTERM)  # the second signal changes nothing
    assert status_of(job) == -number
    assert time.monotonic() - begin < 60.0
    assert all(has_ended(one) for one in started.read_text().split())


def has_ended(process):
    """Whether a process that was killed ends in some seconds."""
    end = time.monotonic() + 30.0
    with contextlib.suppress(OSError):  # there is no such process any more
        while Path(f"/proc/{process}/stat").read_text().split()[2] != "Z":
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
    return True


def test_a_killed_process_takes_its_children_along(monkeypatch, tmp_path):
    loads = tmp_path / "loads"

    def die_with_a_loader():
        loads.write_text(str(os.fork() or (time.sleep(60.0), os._exit(0))))
        die()

    assert status_of_run(monkeypatch, {}, [die_with_a_loader, lambda: end_with(7, 0.2)]) == 7
    assert has_ended(loads.read_text())


def test_the_status_of_a_replaced_process_is_not_enough(monkeypatch):
    slot, _ = slot_with_child(monkeypatch, launcher.REPLACED)
    assert slot._wait("2.0") == (launcher.REPLACED, "")


def test_a_process_that_ends_well_ends_the_job(monkeypatch):
    for status, is_done in ((1, False), (0, True)):
        slot, store = slot_with_child(monkeypatch, status)
        assert slot._wait("2.0") == (status, "")
        assert store.check(["flatparam elastic/done"]) == is_done


def test_a_process_that_is_killed_after_the_loop_fails_the_job(monkeypatch):
    assert status_of_run(monkeypatch, {"left/2.0": "", "done": ""}, [die, stop]) == 128 + signal.SIGKILL


def test_a_dropped_process_that_aborts_is_replaced(monkeypatch):
    said = DROPPED | {"left/2.0": ""}
    assert status_of_run(monkeypatch, said, [die, lambda: end_with(7)], are_over=True) == 7


def test_a_job_that_ends_before_it_begins_replaces_nobody(monkeypatch, capfd):
    assert (
        status_of_run(monkeypatch, {"epoch/1": '[[], 0, "a rank is missing"]'}, [lambda: end_with(1, 0.5), stop]) == 1
    )
    assert not capfd.readouterr().err


def test_the_end_of_the_job_ends_a_stopped_process(monkeypatch):
    monkeypatch.setenv("FLATPARAM_HEARTBEAT", "0.4")
    assert status_of_run(monkeypatch, {"done": ""}, [stop]) == 0
    assert status_of_run(monkeypatch, {"done": ""}, [lambda: end_with(7, 1.0)]) == 7

    def go_on():
        me = os.getpid()
        forked(lambda: (time.sleep(0.2), os.kill(me, signal.SIGCONT)))
        stop()
        end_with(8, 0.6)

    assert status_of_run(monkeypatch, {"done": ""}, [go_on]) == 8
