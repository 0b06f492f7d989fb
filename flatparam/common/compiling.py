"""Keeping flatparam's own code out of the graphs that torch.compile makes, as torch keeps its FSDP's out."""

import functools

from .torch_private import dynamo_trace_rules


@functools.cache
def leave_out_of_graphs() -> None:
    """Have torch.compile run flatparam's files as they are. Called as the first model is wrapped, not before.

    This imports Dynamo, which an optimizer does anyway.
    """
    dynamo_trace_rules().add("flatparam")
