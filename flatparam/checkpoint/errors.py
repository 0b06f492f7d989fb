"""A block that adds the checkpoint's path to a CheckpointError."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..fsdp.errors import CheckpointError
from ..fsdp.names import printable

__all__ = ["CheckpointError", "naming_checkpoint"]


@contextmanager
def naming_checkpoint(path: Path) -> Iterator[None]:
    """Put ``path`` into the message of a CheckpointError of the block, unless it is there already."""
    try:
        yield
    except CheckpointError as error:
        if printable(str(path)) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error
