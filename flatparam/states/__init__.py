"""What a model and its optimizer keep, and in which form: pieces of ranks, rows, whole tensors; saved and loaded."""

from .. import fsdp as fsdp  # its wrapper imports the modules here: begun first, it finds them whole
