"""The model of the runtime's tests, and training it unsharded, on torch's FSDP and on ours, each on its rank's data."""

import contextlib
import itertools
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatparam
from benchmarks.c_testing import _C_testing
from flatparam import _C
from flatparam import FullyShardedDataParallel as FSDP

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1")
SETTINGS = tuple(itertools.product(STRATEGIES, (False, True)))  # (strategy, use_orig_params)
every_setting = pytest.mark.parametrize(("strategy", "uo"), SETTINGS)


def counts_of(model):
    """How often units of ``model`` were gathered, secondary shards refreshed and gradients reduced so far."""
    root = model._unit.core.root
    return SimpleNamespace(**({"reductions": 0} if root is None else _C_testing.counts(root)))


def have_memory(step):
    """Of each flat parameter of a unit, whether its unsharded data have memory."""
    return [views is not None and _C.storage_numel(views[0]) > 0 for views in step.views()]


class Block(nn.Module):
    """Odd sizes, a parameter of its own, one layer without bias: padding and empty shards occur."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, 2 * width + 1)
        self.outer = nn.Linear(2 * width + 1, width, bias=False)
        self.scale = nn.Parameter(torch.full((width,), 1.5))

    def forward(self, x):
        return x + self.scale * self.outer(torch.tanh(self.inner(x)))


class Model(nn.Module):
    """Three blocks, and parameters of the root before and after them."""

    def __init__(self, width=5, blocks=3):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.last = nn.Linear(width, 1, bias=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def make(seed=0, cls=Model, **kwargs):
    torch.manual_seed(seed)
    return cls(**kwargs)


@contextlib.contextmanager
def first_rank_warns(match):
    """Rank 0 warns with ``match`` in the block, the others do not."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    told = [str(one.message) for one in found]
    assert any(re.search(match, text) for text in told) == (dist.get_rank() == 0), (match, told)


def wrap_blocks(module, wrapper=FSDP, **arguments):
    """``module`` with its blocks and itself as units."""
    for i, block in enumerate(module.blocks):
        module.blocks[i] = wrapper(block, **arguments)
    return wrapper(module, **arguments)


def data(step, rank=None, rows=4):
    """What a rank sees in a step."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 3, generator=generator)


def loss_of(model, x):
    return model(x).square().mean()


class Averaged:
    """The oracle: an unsharded module whose gradients are the mean of what every rank's data give, taken here.

    The sum over ranks is taken in rank order and halved before, as two ranks do it; each gradient is of one backward.
    """

    def __init__(self, module, ranks):
        self.module, self.ranks = module, ranks

    def backward(self, batches):
        """Add to ``.grad`` the mean over ranks of the sum over each rank's ``batches`` (a function of the rank)."""
        before, _ = flatparam.fsdp.sharding.placement.averaging_factors(self.ranks)
        totals = None
        for rank in range(self.ranks):
            grads = None
            for x in batches(rank):
                new = torch.autograd.grad(
                    loss_of(self.module, x), list(self.module.parameters()), allow_unused=True, materialize_grads=True
                )
                grads = list(new) if grads is None else [a + b for a, b in zip(grads, new, strict=True)]
            grads = [grad / before for grad in grads]
            totals = grads if totals is None else [a + b for a, b in zip(totals, grads, strict=True)]
        for param, grad in zip(self.module.parameters(), totals, strict=True):
            grad = grad / (self.ranks / before)
            param.grad = grad if param.grad is None else param.grad + grad


def full_params(model):
    """Copies of every parameter by its clean name."""
    with FSDP.summon_full_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_same(model, module, what=""):
    """Fail unless ``model`` has ``module``'s parameters, bit for bit."""
    found = full_params(model)
    wanted = dict(module.named_parameters())
    assert list(found) == list(wanted), (what, list(found), list(wanted))
    for name, value in wanted.items():
        assert torch.equal(found[name], value), (what, name, found[name] - value)


def full_grads(model):
    """Copies of every gradient by its clean name."""
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        named = [(name.replace("_checkpoint_wrapped_module.", ""), p.grad) for name, p in model.named_parameters()]
        return {name: None if grad is None else grad.clone() for name, grad in named}


def assert_same_grads(model, module, what=""):
    """Fail unless ``model`` has ``module``'s gradients, bit for bit."""
    found = full_grads(model)
    for name, param in module.named_parameters():
        if param.grad is None:
            assert found[name] is None or not found[name].any(), (what, name)
        else:
            assert found[name] is not None, (what, name)
            assert torch.equal(found[name], param.grad), (what, name, found[name] - param.grad)


class Blockwise(torch.optim.Optimizer):
    """Momentum kept in 8 bits, each block of elements over its own largest value."""

    def __init__(self, params, block, lr=0.05):
        super().__init__(params, {"lr": lr, "block": block})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.one(param, self.state[param], **group)

    def one(self, param, state, block, lr, **_):
        numel = param.numel()
        grad = torch.zeros(-(-numel // block) * block)
        grad[:numel] = param.grad.reshape(-1)
        grad = grad.view(-1, block)
        if state:
            grad += 0.9 * state["codes"].float() * state["scale"]
        state["scale"] = grad.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        state["codes"] = (grad / state["scale"]).round().to(torch.int8)
        step = state["codes"].float() * state["scale"]
        param.sub_(lr * step.view(-1)[:numel].view_as(param))
