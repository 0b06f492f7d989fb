"""What a rank holds of a model's parameters, buffers and optimizer state."""

from .. import fsdp as fsdp  # its wrapper imports the modules here: begun first, it finds them whole
