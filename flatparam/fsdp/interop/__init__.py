"""Functions of torch that are replaced or refused, because they would take a shard for a whole parameter."""
