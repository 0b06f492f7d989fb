"""The exceptions of the runtime. DeviceError is in ``sharding/pytrees.py``; ShardError comes from ``_C``."""

from .. import _C

# A call that this state of a unit does not allow. It derives from each type that torch raises in such cases
StateError = _C.StateError


class OrderError(RuntimeError):
    """The ranks of a group issue different collectives, or a rank has ended. All ranks raise the same message."""


class StoreGoneError(OrderError):
    """The store of the process group, through which ranks exchange messages, cannot be reached any more."""


class WritebackError(ValueError, NotImplementedError):
    """summon_full_params(writeback=True, rank0_only=True): torch raises one base or the other, by version."""


def without_store(error: Exception) -> str:
    """Return the message of a StoreGoneError for an ``error`` of the store."""
    return (
        "the store of the process group cannot be reached any more, so ranks cannot tell each other their state: "
        "the process that serves it, usually that of rank 0, has ended, with an error or before the others "
        f"({(str(error) or type(error).__name__).splitlines()[0]})"
    )
