"""The words between a training process and the small process that starts it (``__main__.py``)."""

import signal

MEMBER = "FLATPARAM_ELASTIC_MEMBER"  # environment variable: the training process's name as a member, "slot.life"
REPLACED = 76  # exit status of a training process that others took for lost


def signal_name(number: int) -> str:
    """Return the name of a signal. Real-time signals have none."""
    return next((one.name for one in signal.Signals if one == number), f"signal {number}")
