"""The launcher of one rank, without torchrun: children that are forked here stand for the training process.

Promises:
- a process that a real-time signal ends, which has no name, is replaced like any other:
  `test_a_signal_without_a_name_is_told_by_its_number`
- a signal for the job ends the launcher by that signal, also if the training process has just ended:
  `test_a_signal_after_the_end_of_the_child_ends_the_launcher`
"""

import os
import signal

import pytest

from flatparam.elastic import __main__ as launcher


def forked(body):
    """Run ``body`` in a child, which ends with status 0 or with 1 after an exception. Returns: its number."""
    child = os.fork()
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGRTMIN + 3])
def test_a_signal_without_a_name_is_told_by_its_number(monkeypatch, capsys, number):
    slot = launcher._Slot("2", [])
    lives = [lambda: os.kill(os.getpid(), number), lambda: None]

    def fork():
        slot._child = forked(lives.pop(0))
        return False

    monkeypatch.setattr(slot, "_fork", fork)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert slot.run(1) == 0
    name = "SIGKILL" if number == signal.SIGKILL else f"signal {number}"
    assert f"2.0 was killed by {name}" in capsys.readouterr().err


def test_a_signal_after_the_end_of_the_child_ends_the_launcher():
    def end():
        slot = launcher._Slot("2", [])
        slot._child = forked(lambda: None)
        os.waitpid(slot._child, 0)  # by ``_wait``, which the signal interrupts before it notes that
        slot._pass_on(signal.SIGTERM, None)

    assert status_of(forked(end)) == -signal.SIGTERM
