"""The environment switches of FSDP have the effect that they have with torch's handle, for modules wrapped after."""

import os
from unittest import mock

import pytest
import torch
from dropin_behaviours import Setting
from gloo import fake_world, handle_of, run_both
from recording import first_difference
from switch_behaviours import SETTINGS, SWITCHES, evaluations, observe, train_on_rank_0
from torch import nn

pytestmark = pytest.mark.multiprocess

WARNED_OF = {"FSDP_SKIP_WRITEBACK_CHECK", "FSDP_USE_FAKE_ALL_GATHER", "FSDP_USE_FAKE_REDUCE"}
SAME = {  # where a switch has nothing to do
    ("FSDP_SKIP_WRITEBACK_CHECK", "FULL_SHARD", False),
    ("FSDP_SKIP_WRITEBACK_CHECK", "SHARD_GRAD_OP", False),
    ("FSDP_SKIP_WRITEBACK_CHECK", "NO_SHARD", False),
    ("FSDP_USE_FAKE_ALL_GATHER", "NO_SHARD", True),
    ("FSDP_USE_FAKE_ALL_GATHER", "NO_SHARD", False),
    ("FSDP_USE_FAKE_REDUCE", "NO_SHARD", True),
    ("FSDP_USE_FAKE_REDUCE", "NO_SHARD", False),
}


def each_observed(kind, cases):
    """What is observed of each (switch, value, setting): a switch is read when a module is wrapped."""
    seen = {}
    for switch, value, setting in cases:
        with mock.patch.dict(os.environ, {switch: value}):
            seen[switch, value] = observe(kind, switch, setting)
    return seen


def name_of(switch, strategy, orig):
    return f"{SWITCHES[switch].__name__}-{strategy.lower()}-{'orig' if orig else 'flat'}"


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("strategy", "orig"), SETTINGS, ids=lambda value: str(value).lower())
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_does_what_it_does_with_torchs_handle(switch, strategy, orig):
    name = name_of(switch, strategy, orig)
    cases = [(switch, value, (strategy, orig)) for value in "01"]
    for rank, (torchs, ours) in enumerate(run_both(each_observed, 2, cases)):
        (expected, _), (got, _) = torchs[switch, "1"], ours[switch, "1"]
        for whose, events in (("torch", expected[name]), ("ours", got[name])):
            raised = [values[0] for label, values in events if label == "raised"]
            assert not raised, f"rank {rank}, {whose}: {raised[0]}"
        difference = first_difference(expected[name], got[name])
        assert difference is None, f"rank {rank}: {difference}"
        off = ours[switch, "0"][0][name]
        assert (off == got[name]) == ((switch, strategy, orig) in SAME)


def test_a_switch_is_warned_of_once():
    """Whatever other switches are on in the process before it."""
    cases = [(switch, value, SETTINGS[0]) for value in "01" for switch in SWITCHES]
    for both in run_both(each_observed, 2, cases):
        for seen in both:
            for (switch, value), (_, logged) in seen.items():
                wanted = ["WARNING"] * (value == "1" and switch in WARNED_OF)
                assert [level for level, _ in logged] == wanted, (switch, value)
                assert all(f"{switch}=1" in message for _, message in logged)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("strategy", "orig"), SETTINGS[:4], ids=lambda value: str(value).lower())
def test_nobody_is_waited_for_without_collectives(strategy, orig):
    both = {"FSDP_USE_FAKE_ALL_GATHER": "1", "FSDP_USE_FAKE_REDUCE": "1"}
    (torchs, ours), others = run_both(train_on_rank_0, 2, strategy, orig, environment=both, timeout=60.0)
    if torch.__version__ >= (2, 13):  # before, a fake group writes nothing: the gradients are what lay in memory
        assert ours == torchs
    assert [len(grad) for grad in ours] == [len(grad) for grad in torchs]
    assert others == (None, None)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("strategy", "orig"), SETTINGS, ids=lambda value: str(value).lower())
def test_evaluations_in_full_precision_have_the_weights_of_the_last_step(strategy, orig):
    """With torch those of sharded units that stay gathered after forward, as the root does, are of the first one."""
    switch = {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}
    for torchs, ours in run_both(evaluations, 2, strategy, orig, environment=switch, timeout=60.0):
        assert ours == [(True, True)] * 3
        assert torchs == [(True, True)] + [(strategy == "NO_SHARD",) * 2] * 2


@pytest.mark.sweep(6)
@pytest.mark.parametrize("value", ["", "0", "true", "2", "11", "1"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_only_1_switches_on(switch, value, monkeypatch):
    """And it is read when a module is wrapped, not when torch or flatparam is imported."""
    seen = []
    for kind in ("torch", "flatparam"):
        with fake_world(2, 0), handle_of(kind):
            before = Setting(kind, "FULL_SHARD", True).wrap(nn.Linear(5, 3), blocks=None)._handle
            monkeypatch.setenv(switch, value)
            after = Setting(kind, "FULL_SHARD", True).wrap(nn.Linear(5, 3), blocks=None)._handle
            monkeypatch.delenv(switch)
            seen.append([flags(before), flags(after)])
    assert seen[0] == seen[1]
    assert (seen[0][0] != seen[0][1]) == (value == "1")


def flags(handle):
    names = ("_skip_writeback_check", "_use_full_prec_in_eval", "_use_fake_all_gather", "_use_fake_reduce")
    values = [getattr(handle, name) for name in names]
    ways = (handle._setattr_tensor, handle._setattr_param)
    return [*values, hasattr(handle, "_fake_process_group"), *[way.__name__ for way in ways]]
