"""Steps by few calls (flatparam/_fused.py) against the same steps one by one, and the two mixed at random."""

import os
import random
import subprocess
import sys

import pytest
from patching import MODES, train
from recording import first_difference

from flatparam import _fused

MIXED = [*MODES, ("FULL_SHARD", False, "fp32"), ("FULL_SHARD", True, "bf16"), ("SHARD_GRAD_OP", False, "fp32")]


class Flipping:
    """True or false by chance, each time it is asked."""

    def __init__(self, seed):
        self.source = random.Random(seed)
        self.answers = set()

    def __bool__(self):
        answer = self.source.random() < 0.5
        self.answers.add(answer)
        return answer


def calls_in(run):
    """Run and return how often the extension's fused calls were made, and what run returned."""
    count = 0

    def note(frame, event, called):
        nonlocal count
        if event == "c_call" and called.__name__ in ("use_unsharded", "use_sharded"):
            count += 1

    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return count, result


@pytest.mark.parametrize("mode", MIXED, ids=["-".join(map(str, mode)) for mode in MIXED])
def test_training_is_the_same_with_and_without(mode, monkeypatch):
    expected = train("torch", mode, {}, "class")
    monkeypatch.setattr(_fused, "enabled", True)
    count, events = calls_in(lambda: train("flatparam", mode, {}, "class"))
    assert first_difference(expected, events) is None
    assert (count > 0) == (mode[0] != "NO_SHARD")
    monkeypatch.setattr(_fused, "enabled", False)
    count, events = calls_in(lambda: train("flatparam", mode, {}, "class"))
    assert first_difference(expected, events) is None
    assert count == 0
    for seed in range(6):
        flipping = Flipping(seed)
        monkeypatch.setattr(_fused, "enabled", flipping)
        assert first_difference(expected, train("flatparam", mode, {}, "class")) is None
        assert flipping.answers == {True, False}


def test_the_environment_turns_it_off():
    for value, expected in (("0", "False"), ("1", "True")):
        done = subprocess.run(
            [sys.executable, "-c", "import flatparam._fused as f; print(f.enabled)"],
            env={**os.environ, "FLATPARAM_FUSED": value},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected
