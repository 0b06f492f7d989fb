"""What a model and its optimizer keep, as state dicts: whole, by rows, or as ranks have it."""
