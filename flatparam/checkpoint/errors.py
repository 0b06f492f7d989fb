"""What is raised when a checkpoint cannot be saved or loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..fsdp.names import printable


class CheckpointError(RuntimeError):
    """A save or a load that failed; its message names the rank, the file, the tensor."""

    def __init__(self, message: str):
        super().__init__(printable(message))


@contextmanager
def naming_checkpoint(path: Path) -> Iterator[None]:
    """A CheckpointError of the block, which reads the checkpoint at ``path``, has that in its message."""
    try:
        yield
    except CheckpointError as error:
        if printable(str(path)) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error
