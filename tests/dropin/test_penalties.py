"""Gradients of gradients over the inputs: right where nothing that they need is freed, else refused by name.

The oracle is the unsharded module; torch's handle where that is right.
"""

import pytest
import torch
from gloo import run_both, run_ranks
from penalties import (
    REFUSED,
    SHARDED,
    all_harmless,
    all_in_no_sync,
    all_refusals,
    all_without_sharding,
    penalty,
    saliency,
    without_output,
)

pytestmark = pytest.mark.multiprocess


def test_without_sharding_they_are_those_of_the_unsharded_module():
    """torch does not reduce them over the ranks, and with original parameters leaves the model without parameters."""
    orders = ("alone", "with output", "before others", "after others")
    cases = [(orig, penalty, order) for orig in (True, False) for order in orders]
    cases += [(orig, saliency, "then backward") for orig in (True, False)]
    for results in run_ranks(all_without_sharding, 2, cases):
        for case, right in zip(cases, results, strict=True):
            assert right == [True, True, True], case


def test_where_parameters_are_freed_a_second_backward_says_so():
    """torch says that a storage is out of bounds."""
    cases = [(*setting, False) for setting in SHARDED] + [("FULL_SHARD", True, True), ("NO_SHARD", False, True)]
    for results in run_ranks(all_refusals, 2, cases):
        for case, (said, right_after) in zip(cases, results, strict=True):
            assert right_after, case
            assert len(said) == len(REFUSED)
            for text in said:
                assert "weight" in text, case
                assert "create_graph=True" in text, case
                assert "sharding_strategy=NO_SHARD" in text, case


def test_a_graph_that_is_not_used_without_its_memory_harms_nothing():
    for torchs, ours in run_both(all_harmless, 2):
        for setting, expected, got in zip(SHARDED, torchs, ours, strict=True):
            assert len(expected) == len(got) > 0
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), setting


def test_a_gradient_that_nobody_would_reduce_is_refused():
    """The output has no part in the second backward. One rank needs no reduction."""
    for alone, together in run_ranks(without_output, 2):
        assert alone is True
        assert "inner.weight" in together
        assert "would not be reduced over the 2 ranks" in together


def test_a_penalty_without_the_output_in_no_sync_is_added_up():
    """torch says that a matrix is expected, or has a KeyError."""
    cases = [(strategy, orig) for strategy in ("NO_SHARD", "SHARD_GRAD_OP") for orig in (True, False)]
    assert run_ranks(all_in_no_sync, 2, cases) == [[True] * len(cases)] * 2
