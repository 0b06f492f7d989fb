"""A weight that is used outside of its unit's forward: it trains if nothing is sharded, else an error names it.

nn.MultiheadAttention reads the weight of its out_proj, which a policy over nn.Linear makes a unit. The oracle is the
mean over the ranks of an unsharded module's gradients.

Promises:
- a weight that is used outside of its unit's forward is reduced with NO_SHARD, and named by the strategies that shard
  it
"""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import FSDP, full_grads, full_params
from gloo import note, run_ranks
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam import ShardingStrategy

pytestmark = pytest.mark.multiprocess


class Net(nn.Module):
    """``penalty``: adds a loss over all weights as they are."""

    def __init__(self):
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)
        self.tied = nn.Linear(2, 2)

    def forward(self, x):
        x = self.out(self.attention(x, x, x, need_weights=False)[0])
        return torch.tanh(self.tied(x)) @ self.tied.weight  # in and outside of its forward


def made(seed=0):
    torch.manual_seed(seed)
    return Net()


def wrapped(strategy, uo, **settings):
    settings["sharding_strategy"] = ShardingStrategy[strategy]
    return FSDP(made(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=uo, **settings)


def loss_of(model, step, rank=None):
    rank = dist.get_rank() if rank is None else rank
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()


def penalty(model):
    return sum(param.square().sum() for name, param in sorted(model.named_parameters()) if "weight" in name)


def averaged(module, losses):
    """Add to .grad the mean over two ranks of the gradients of ``losses(rank)``."""
    found = []
    for rank in range(2):
        grads = torch.autograd.grad(losses(rank), list(module.parameters()), allow_unused=True, materialize_grads=True)
        found.append(grads)
    for param, a, b in zip(module.parameters(), *found, strict=True):
        grad = a / 2 + b / 2
        param.grad = grad if param.grad is None else param.grad + grad


def assert_close(found, module, what):
    for name, param in module.named_parameters():
        torch.testing.assert_close(found[name], param.grad, msg=lambda text, name=name: f"{what} {name}: {text}")


def is_alike(value):
    both = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(both, value.contiguous())
    return torch.equal(*both)


def unsharded(uo):
    module, model = made(), wrapped("NO_SHARD", uo)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (module, model)]
    plan = ("s", "ns", "nns", "sns", "ss", "psp" if uo else "s")
    for step, moves in enumerate(plan):
        for number, move in enumerate(moves):
            note(f"uo={uo} step {step} {moves}")
            at = 10 * step + number
            if move == "p":  # a penalty alone
                averaged(module, lambda rank: penalty(module))
                penalty(model).backward()
                continue
            averaged(module, lambda rank, at=at: loss_of(module, at, rank) + (penalty(module) if uo else 0.0))
            with model.no_sync() if move == "n" else contextlib.nullcontext():
                (loss_of(model, at) + (penalty(model) if uo else 0.0)).backward()
        assert_close(full_grads(model), module, f"uo={uo} {moves}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_params(model).items():
        assert is_alike(value), (uo, name)
        torch.testing.assert_close(value, module.get_parameter(name))


@pytest.mark.parametrize("uo", [False, True])
def test_a_weight_used_outside_of_its_units_forward_is_reduced_where_nothing_is_sharded(uo):
    run_ranks(unsharded, 2, uo)


def hooked():
    """A hook sees the reduced gradient, once; of a weight that is used elsewhere it would see two."""
    model, seen = wrapped("NO_SHARD", True), []
    model.out.module.weight.register_hook(lambda grad: seen.append(grad.clone()))
    loss_of(model, 0).backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], full_grads(model)["out.weight"])
    model.zero_grad()
    model.attention.out_proj.module.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(
        ValueError, match=r"out_proj`: parameter `weight` has hooks, and is used outside of the forward"
    ):
        loss_of(model, 0).backward()


def test_hooks_of_a_weight_that_is_used_elsewhere_are_refused():
    run_ranks(hooked, 2)


def sharded(strategy, uo):
    with pytest.raises(RuntimeError, match=r"a parameter of the unit of .*Linear.* was used while it is sharded"):
        loss_of(wrapped(strategy, uo), 0).backward()


@pytest.mark.parametrize(
    ("strategy", "uo"), list(itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "ZERO_1"), (False, True)))
)
def test_a_weight_used_outside_of_its_units_forward_is_named_where_it_is_sharded(strategy, uo):
    run_ranks(sharded, 2, strategy, uo)


def asked_for_gradients():
    torch.manual_seed(0)
    model = FSDP(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
    weight = model.module.weight
    x = torch.ones(1, 2)
    with model.no_sync():
        model(x).sum().backward()
    for create_graph in (False, True):
        (grad,) = torch.autograd.grad(weight.square().sum(), [weight], create_graph=create_graph)
        assert torch.equal(grad, 2 * weight)
        assert torch.equal(weight.grad, torch.ones(2, 2))
    model(x).sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0))


def test_asking_autograd_for_a_gradient_returns_it_and_leaves_grad_alone():
    run_ranks(asked_for_gradients, 2)
