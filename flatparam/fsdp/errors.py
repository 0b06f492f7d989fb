"""The exceptions of the runtime."""

from .. import _C

StateError = _C.StateError  # a call at a time or on a unit where it may not be made; of all the types that torch's are


class OrderError(RuntimeError):
    """The ranks of a group have come to different collectives, or some cannot come; the message is the same on all."""


class StoreGoneError(OrderError):
    """The store through which the ranks tell each other things cannot be reached any more."""


class WritebackError(ValueError, NotImplementedError):
    """What both of torch's versions raise for writeback with rank0_only."""


def without_store(error: Exception) -> str:
    """What an OrderError says where the store of the process group raises ``error``."""
    return (
        "the store of the process group cannot be reached any more, so ranks cannot say what they do or why they end: "
        "the process that has it, most often that of rank 0, has ended, with an error or before the others "
        f"({(str(error) or type(error).__name__).splitlines()[0]})"
    )
