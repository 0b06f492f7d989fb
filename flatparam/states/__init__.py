"""What a model and its optimizer keep, and in which form: pieces of ranks, rows, whole tensors; saved and loaded."""
