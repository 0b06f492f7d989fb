"""Gradients with NaN or infinity on one rank: the norm shows them on all ranks, as with an unsharded module."""

import math

import pytest
import torch
import torch.distributed as dist
from simulated_ranks import simulate_ranks
from torch import nn

import flatparam
from flatparam import _C

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
    for found, raised in simulate_ranks(norms, 2, value):
        assert str(found) == str([value] * 4)
        assert raised == [2.0, math.inf] * 2


@pytest.mark.parametrize("dtypes", [["float32"], ["bfloat16", "float64"], ["float32", "complex64"]])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, torch.inf])
def test_clipping_in_one_call_has_the_bits_of_single_operations(order, dtypes):
    params = [nn.Parameter(torch.zeros(9, dtype=getattr(torch, dtype))) for dtype in dtypes for _ in range(2)]
    wide = "float64" in dtypes
    precision = torch.float64 if wide else torch.float32
    for bound in (1e-3, 1e3):
        for param in params:
            param.grad = torch.randn_like(param)
        grads = [param.grad.clone() for param in params]
        each = [torch._foreach_norm([g], order, torch.promote_types(g.dtype, precision))[0] for g in grads]
        norm = torch.linalg.vector_norm(torch.stack([one.to(precision) for one in each]), order)
        total = norm if order == torch.inf else norm**order
        found = _C.grad_norm(params, order, wide, torch.device("cpu"))
        assert torch.equal(found, total)
        root = 1.0 if order == torch.inf else 1.0 / order
        assert torch.equal(_C.clip_grads(params, found, root, bound), total**root)
        factor = torch.clamp(bound / (total**root + 1e-6), max=1.0)
        for param, grad in zip(params, grads, strict=True):
            assert torch.equal(param.grad, grad * factor.to(grad.dtype.to_real()))
