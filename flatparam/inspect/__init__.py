"""``python -m flatparam inspect``: what a model's units, shards and bytes per rank will be, without running it."""
