"""``bytes_per_token`` measures the activations that ``advise --activations`` takes: against models computed by hand."""

import pytest
import torch
from torch import nn

from flatparam.advise.activations import bytes_per_token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("between", "kept"), [(nn.ReLU(), 4 + 8), (nn.GELU(), 4 + 8 + 8)])
def test_bytes_are_those_of_arithmetic(dtype, between, kept):
    """The input is kept for the first weight. A ReLU keeps its output, which the second weight needs too; GELU's input
    is kept besides. Weights are no activations."""
    module = nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 4)).to(dtype)
    x = torch.ones(2, 3, 4, dtype=dtype)
    assert bytes_per_token(module, x, tokens=6) == kept * dtype.itemsize
    assert bytes_per_token(module, x, tokens=4) == -(-6 * kept * dtype.itemsize // 4)  # rounded up
    assert not x.requires_grad
    assert all(param.grad is None for param in module.parameters())


def test_a_frozen_weight_keeps_no_input_and_integers_are_taken():
    module = nn.Linear(4, 8).requires_grad_(False)
    assert bytes_per_token(module, torch.ones(3, 4), tokens=3) == 0
    assert bytes_per_token(nn.Embedding(5, 4), torch.tensor([1, 2, 3]), tokens=3) == 8  # the indices


def test_tokens_must_be_positive():
    with pytest.raises(ValueError, match="expected tokens to be at least 1, got 0"):
        bytes_per_token(nn.Linear(4, 8), torch.ones(3, 4), tokens=0)
