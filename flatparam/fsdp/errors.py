"""Every exception that flatparam defines. ``flatparam`` exports them all.

| exception | is a | raised when |
|---|---|---|
| ``StateError`` | RuntimeError, AssertionError, ValueError | the state of a unit does not allow a call |
| ``ShardError`` | ValueError | a size, rank or range of elements is out of range |
| ``DeviceError`` | ValueError, RuntimeError | a tensor is on the wrong device |
| ``OrderError`` | RuntimeError | ranks issue different collectives, or one has ended |
| ``StoreGoneError`` | OrderError | the store of the process group is gone |
| ``WritebackError`` | ValueError, NotImplementedError | ``summon_full_params(writeback=True, rank0_only=True)`` |
| ``CheckpointError`` | RuntimeError | a save or load of a checkpoint has failed |
| ``ModelTypeError`` | CheckpointError, TypeError | the model of a save or load is no module |
| ``FileError`` | ValueError | a file is not in the safetensors format |
"""

from .. import _C
from .names import printable

# A call that this state of a unit does not allow. It derives from each type that torch raises in such cases
StateError = _C.StateError
ShardError = _C.ShardError


class DeviceError(ValueError, RuntimeError):
    """A tensor is on the wrong device. torch raised ValueError or RuntimeError for it, depending on the version."""


class OrderError(RuntimeError):
    """The ranks of a group issue different collectives, or a rank has ended. All ranks raise the same message."""


class StoreGoneError(OrderError):
    """The store of the process group, through which ranks exchange messages, cannot be reached any more."""


class CheckpointError(RuntimeError):
    """A save or a load has failed. The message names the rank, the file and the tensor."""

    def __init__(self, message: str):
        super().__init__(printable(message))


class ModelTypeError(CheckpointError, TypeError):
    """The model of a save or a load is no module."""


class FileError(ValueError):
    """A file is not in the safetensors format, or not a file. The message names it."""

    def __init__(self, message: str):
        super().__init__(printable(message))


class WritebackError(ValueError, NotImplementedError):
    """summon_full_params(writeback=True, rank0_only=True): torch raises one base or the other, by version."""


def without_store(error: Exception) -> str:
    """Return the message of a StoreGoneError for an ``error`` of the store."""
    return (
        "the store of the process group cannot be reached any more, so ranks cannot tell each other their state: "
        "the process that serves it, usually that of rank 0, has ended, with an error or before the others "
        f"({(str(error) or type(error).__name__).splitlines()[0]})"
    )
