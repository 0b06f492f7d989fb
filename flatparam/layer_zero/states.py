"""The states of a LayerZero handle, and the conversion from torch's and the reference's enums."""

from enum import auto
from typing import Any

from ..fsdp.api import EqualByName

_ENUM = "HandleTrainingState"


class HandleTrainingState(EqualByName):
    """torch's states of a handle, and SYNC_PARAMS: gathering changed masters outside of a forward.

    A member equals a member with its name of any enum with this class's name: torch's and the reference's.
    """

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()
    SUMMON_FULL_PARAMS = auto()
    SYNC_PARAMS = auto()


IDLE, FORWARD, BACKWARD_PRE, BACKWARD_POST, SUMMON_FULL_PARAMS, SYNC_PARAMS = HandleTrainingState

# The states before each. Activation checkpointing runs forwards, and uses a unit again, within a backward
_BEFORE: dict[int, tuple[HandleTrainingState, ...]] = {
    IDLE._value_: tuple(HandleTrainingState),
    FORWARD._value_: (IDLE, FORWARD),
    BACKWARD_PRE._value_: (IDLE, BACKWARD_PRE, BACKWARD_POST),
    BACKWARD_POST._value_: (BACKWARD_PRE, IDLE, BACKWARD_POST),
    SUMMON_FULL_PARAMS._value_: (IDLE,),
    SYNC_PARAMS._value_: (IDLE,),
}


def before(state: HandleTrainingState) -> tuple[HandleTrainingState, ...]:
    """Return the states that ``state`` may follow."""
    return _BEFORE[state._value_]


def state_of(value: Any) -> HandleTrainingState:
    """Convert a member of torch's or the reference's enum. Raises: ValueError for any other value."""
    name = getattr(value, "_name_", "")
    state = HandleTrainingState.__members__.get(name) if type(value).__name__ == _ENUM else None
    if state is None:
        names = ", ".join(HandleTrainingState.__members__)
        raise ValueError(f"expected a HandleTrainingState ({names}), got {value!r}")
    return state
