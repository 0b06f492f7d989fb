"""One unit: its flat parameters, what users write to them, and what is computed over its shards."""
