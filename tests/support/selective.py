"""Selective activation checkpoints, by what they keep."""

import functools

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = {"collectives": "c10d.", "products": "mm", "all": ""}  # a part of the names of operations


def kept(function, x, part):
    """``function(x)`` in one that keeps what operations give that have ``part`` in their names."""

    def policy(context, operation, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if part in str(operation) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)
