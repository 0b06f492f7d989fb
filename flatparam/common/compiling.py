"""Keeping flatparam's own code out of the graphs that torch.compile makes, as torch keeps its FSDP's out."""

import functools


@functools.cache
def leave_out_of_graphs() -> None:
    """Have torch.compile run flatparam's files as they are. Called as the first model is wrapped, not before.

    Importing Dynamo takes as long as a third of torch. An optimizer imports it anyway.
    """
    import torch._dynamo.trace_rules as rules

    rules.add("flatparam")
