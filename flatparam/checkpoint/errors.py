"""What is raised when a checkpoint cannot be saved or loaded."""


class CheckpointError(RuntimeError):
    """A save or a load that failed; its message names the rank, the file, the tensor."""
