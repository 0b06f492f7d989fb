"""The life cycle of a unit: exactly the moves written here are possible, and the message names those that are.

Oracle: the moves that torch's FSDP runtime makes (HandleTrainingState in _runtime_utils.py, _unshard_param_utils.py).
"""

import itertools

import pytest
from torch.distributed.fsdp._common_utils import HandleTrainingState

from flatparam import _C

STATES = [state.name for state in HandleTrainingState]
EVENTS = ["begin_forward", "end_forward", "begin_backward", "end_backward"]
EVENTS += ["finish_backward", "begin_summon", "end_summon", "reset"]

MOVES = {
    ("IDLE", "begin_forward"): "FORWARD",
    ("FORWARD", "end_forward"): "IDLE",
    ("IDLE", "begin_backward"): "BACKWARD_PRE",
    ("BACKWARD_PRE", "begin_backward"): "BACKWARD_PRE",
    ("BACKWARD_PRE", "begin_forward"): "BACKWARD_PRE",  # activation checkpointing computes the forward pass again
    ("BACKWARD_PRE", "end_forward"): "BACKWARD_PRE",
    ("BACKWARD_PRE", "end_backward"): "BACKWARD_POST",
    ("BACKWARD_POST", "end_backward"): "BACKWARD_POST",  # several times with reentrant checkpointing
    ("BACKWARD_POST", "begin_backward"): "BACKWARD_PRE",  # a unit that was used twice
    ("BACKWARD_POST", "begin_forward"): "FORWARD",
    ("IDLE", "end_backward"): "BACKWARD_POST",  # no output needed a gradient
    ("IDLE", "finish_backward"): "IDLE",
    ("BACKWARD_PRE", "finish_backward"): "IDLE",
    ("BACKWARD_POST", "finish_backward"): "IDLE",
    ("IDLE", "begin_summon"): "SUMMON_FULL_PARAMS",
    ("SUMMON_FULL_PARAMS", "end_summon"): "IDLE",
    **{(state, "reset"): "IDLE" for state in STATES},
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(STATES, EVENTS)))
def test_moves(state, event):
    if (state, event) in MOVES:
        assert _C.next_state(state, event) == MOVES[state, event]
        return
    with pytest.raises(RuntimeError) as caught:
        _C.next_state(state, event)
    possible = [other for other in STATES if (other, event) in MOVES]
    assert str(caught.value) == f"{event} is not possible in state {state}, only in {', '.join(possible)}"


@pytest.mark.parametrize(
    ("events", "states"),
    [
        (
            ["begin_forward", "end_forward", "begin_backward", "end_backward", "finish_backward"],
            ["FORWARD", "IDLE", "BACKWARD_PRE", "BACKWARD_POST", "IDLE"],
        ),
        (
            ["begin_backward", "begin_forward", "end_forward", "end_backward", "finish_backward"],
            ["BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", "IDLE"],
        ),
        (["begin_summon", "end_summon"], ["SUMMON_FULL_PARAMS", "IDLE"]),
        (["begin_forward", "reset", "begin_forward"], ["FORWARD", "IDLE", "FORWARD"]),
    ],
)
def test_steps_of_training(events, states):
    assert list(itertools.accumulate(events, _C.next_state, initial="IDLE"))[1:] == states


def test_what_is_no_state_or_event_is_refused():
    for arguments in [("idle", "reset"), ("IDLE", "RESET"), ("", ""), ("IDLE\0", "reset"), ("IDLE", "r\udcff")]:
        with pytest.raises(ValueError, match="expected the names"):
            _C.next_state(*arguments)
    for arguments in [(0, "reset"), ("IDLE", None), (b"IDLE", "reset")]:
        with pytest.raises(TypeError, match="expected the names"):
            _C.next_state(*arguments)
    with pytest.raises(TypeError, match="exactly 2 arguments"):
        _C.next_state("IDLE")
