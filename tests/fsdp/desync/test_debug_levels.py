"""TORCH_DISTRIBUTED_DEBUG has the effect that it has with torch's handle: traces, warnings, the check of the order."""

import functools

import pytest
from debug_behaviours import LEVELS, SETTINGS, observe
from gloo import run_both
from recording import first_difference

pytestmark = pytest.mark.multiprocess
CASES = [(level, behaviour, *setting) for level in LEVELS for behaviour in LEVELS[level] for setting in SETTINGS]


@functools.cache
def results(level, behaviour, strategy, orig):
    """Of each of two ranks what the behaviour gave with torch's handle and with ours."""
    return run_both(observe, 2, level, behaviour, (strategy, orig), environment={"TORCH_DISTRIBUTED_DEBUG": level})


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("level", "behaviour", "strategy", "orig"), CASES, ids=lambda value: getattr(value, "__name__", str(value)).lower()
)
def test_a_debug_level_does_what_it_does_with_torchs_handle(level, behaviour, strategy, orig):
    for rank, (expected, got) in enumerate(results(level, behaviour, strategy, orig)):
        for whose, events in (("torch", expected), ("ours", got)):
            raised = [values[0] for label, values in events if label == "raised"]
            assert not raised, f"rank {rank}, {whose}: {raised[0]}"
        assert first_difference(expected, got) is None, f"rank {rank}: {first_difference(expected, got)}"


def said(level, name, strategy="FULL_SHARD", orig=True):
    """All that our handle's run of one behaviour said, on both ranks."""
    [behaviour] = [behaviour for behaviour in LEVELS[level] if behaviour.__name__ == name]
    events = [event for _, got in results(level, behaviour, strategy, orig) for event in got]
    return [" ".join(values) for label, values in events if label.endswith(("logged", "warned", "refused"))]


@pytest.mark.parametrize(
    ("level", "name", "text"),
    [
        ("INFO", "training_is_traced", "FSDP firing post-backward hooks for parameters"),
        ("INFO", "writeback_is_told", "Parameter needs writeback in"),
        ("INFO", "writeback_is_told", "Gradient needs writeback in"),
        ("INFO", "some_ranks_have_no_gradients", "Only some but not all ranks have a `None`"),
        ("DETAIL", "the_order_changes", "Forward order differs from that of the first iteration"),
        ("DETAIL", "the_order_changes", "Expected to not all-gather any more parameters"),
        ("DETAIL", "the_ranks_disagree", "KeyError"),
    ],
)
def test_a_debug_level_says_something(level, name, text):
    """The comparison above would pass where neither handle says anything."""
    assert any(text in line for line in said(level, name))


def test_an_order_that_differs_between_ranks_is_refused_with_the_names():
    lines = said("DETAIL", "the_ranks_disagree", orig=False)
    assert len(lines) == 2
    assert all("Forward order differs across ranks" in line and "blocks.1.up.weight" in line for line in lines)
