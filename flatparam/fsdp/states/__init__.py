"""State dicts of a wrapped model and of its optimizer: full, sharded by rows, or local; and files of safetensors."""
