"""The error of saves and loads, and a block that adds the checkpoint's path to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..fsdp.names import printable


class CheckpointError(RuntimeError):
    """A save or a load has failed. The message names the rank, the file and the tensor."""

    def __init__(self, message: str):
        super().__init__(printable(message))


@contextmanager
def naming_checkpoint(path: Path) -> Iterator[None]:
    """Put ``path`` into the message of a CheckpointError of the block, unless it is there already."""
    try:
        yield
    except CheckpointError as error:
        if printable(str(path)) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error
