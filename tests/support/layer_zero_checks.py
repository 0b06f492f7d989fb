"""What the tests of LayerZero's handle compare with."""

import torch
from layer_zero_driver import full_grads, full_params, losses, unsharded_backward
from torch import nn

LOW = torch.bfloat16


def assert_close(found, expected, atol=1e-6):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=atol)


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


class Example(nn.Module):
    """The parameters of a known layout: 6, 3 and 2 elements."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.arange(6.0).view(2, 3) + 1)
        self.b = nn.Parameter(torch.arange(3.0) + 11)
        self.c = nn.Parameter(torch.arange(2.0) + 21)

    def forward(self, x):
        return (x @ self.a.t()).sum(-1) * self.b.sum() + self.c.sum()


def train(model, driver, reference, count, make_optimizer, steps=3, exact=False):
    optimizers = [make_optimizer(m.parameters()) for m in (model, reference)]
    for step in range(steps):
        driver.backward(losses(model, step, count))
        unsharded_backward(reference, step, count)
        if exact:
            assert_equal(full_grads(driver.handles, model), [p.grad for p in reference.parameters()])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    compare = assert_equal if exact else assert_close
    compare(full_params(driver.handles, model), list(reference.parameters()))


def named(case):
    """The id of a test that runs ``(world size, function, *arguments)``."""
    world_size, function, *_ = case
    return f"{function.__name__}-{world_size}"
