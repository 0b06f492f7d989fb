"""Gradients that are no numbers, on one rank: the norm says so on all of them, as that of an unsharded module does."""

import math

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import nn

import flatparam

pytestmark = pytest.mark.multiprocess


def norms(value):
    """The norm of each order for which one gradient on one of the ranks is ``value``; which raise where asked to."""
    found, raised = [], []
    for rank in range(2):
        for order in (2.0, math.inf):
            torch.manual_seed(0)
            model = flatparam.FullyShardedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)))
            model(torch.ones(2, 6)).sum().backward()
            if dist.get_rank() == rank:
                next(model.parameters()).grad[1] = value
            with pytest.raises(RuntimeError, match="norm of order"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5, order, error_if_nonfinite=True)
            raised.append(order)
            found.append(float(model.clip_grad_norm_(0.5, order)))
    return found, raised


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_norm_is_that_of_all_ranks(value):
    for found, raised in run_ranks(norms, 2, value):
        assert str(found) == str([value] * 4)
        assert raised == [2.0, math.inf] * 2
