"""Model states, optimizer states and summoned parameters equal those of torch's handle, bit for bit."""

import dropin_optim_states
import dropin_state_dicts
import dropin_summon
import pytest
from dropin_behaviours import run_all
from gloo import run_both
from recording import first_difference

pytestmark = pytest.mark.multiprocess

BEHAVIOURS = [*dropin_state_dicts.BEHAVIOURS, *dropin_optim_states.BEHAVIOURS, *dropin_summon.BEHAVIOURS]
# Of the strategies with and without original parameters, what a behaviour gets in turn: by the number of processes
SETTINGS = {
    2: (
        (("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("NO_SHARD", True)),
        (("FULL_SHARD", False), ("SHARD_GRAD_OP", True), ("NO_SHARD", False)),
    ),
    4: (
        (("HYBRID_SHARD", True),),
        (("HYBRID_SHARD", False),),
        (("_HYBRID_SHARD_ZERO2", True),),
    ),
}


def settings_of(behaviour, world):
    return SETTINGS[world][BEHAVIOURS.index(behaviour) % len(SETTINGS[world])]


CASES = [
    (behaviour, world, *setting)
    for world in SETTINGS
    for behaviour in BEHAVIOURS
    for setting in settings_of(behaviour, world)
]


def to_compare(behaviour, events):
    """All, but for the collectives of a behaviour that summons gathered units: ours gathers them anew."""
    if behaviour is dropin_summon.summoned_between_forward_and_backward:
        return [event for event in events if event[0] != "collective"]
    return events


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("behaviour", "world", "strategy", "orig"),
    [pytest.param(*case, marks=pytest.mark.thorough) if case[1] == 4 else case for case in CASES],
    ids=lambda value: getattr(value, "__name__", str(value)).lower(),
)
def test_is_as_with_torchs_handle(behaviour, world, strategy, orig):
    results = run_both(run_all, world, [behaviour], [(strategy, orig)])
    name = f"{behaviour.__name__}-{strategy.lower()}-{'orig' if orig else 'flat'}"
    for rank, (expected, got) in enumerate(results):
        for whose, events in (("torch", expected[name]), ("ours", got[name])):
            raised = [values[0] for label, values in events if label == "raised"]
            assert not raised, f"rank {rank}, {whose}: {raised[0]}"
        difference = first_difference(to_compare(behaviour, expected[name]), to_compare(behaviour, got[name]))
        assert difference is None, f"rank {rank}: {difference}"
        assert expected[name]
