"""``python -m flatparam inspect``: print the units, shards and bytes per rank of a model, without running it."""
