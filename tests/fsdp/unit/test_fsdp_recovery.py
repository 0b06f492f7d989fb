"""After an exception in backward, or a write that torch does not count, the next step is right.

Promises:
- gradients that an optimizer clears after an exception in backward stay cleared:
  `test_what_an_optimizer_clears_after_an_exception_does_not_come_back`
"""

import pytest
import torch
from gloo import fake_world
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy

every_uo = pytest.mark.parametrize("uo", [False, True])


class Failing(torch.autograd.Function):
    """Raises in backward while ``armed``."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Failing.armed:
            raise KeyError("in backward")
        return grad


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.b(Failing.apply(self.a(x))).sum()


def wrapped(uo):
    return FSDP(Pair(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=uo)


def grads(model):
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def fail(model, x):
    Failing.armed = True
    try:
        with pytest.raises(KeyError, match="in backward"):
            model(x).backward()
    finally:
        Failing.armed = False


@every_uo
def test_a_gradient_put_aside_before_an_exception_does_not_come_back(uo):
    x = torch.ones(2, 3)
    with fake_world(1):
        model, fresh = wrapped(uo), wrapped(uo)
        model(x).backward()
        with model.no_sync():
            model(x).backward()
            fail(model, x)
        model.zero_grad()
        model(x).backward()
        fresh(x).backward()
        assert all(torch.equal(*pair) for pair in zip(grads(model), grads(fresh), strict=True))


@every_uo
@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_what_an_optimizer_clears_after_an_exception_does_not_come_back(uo, synced, to_none):
    x = torch.ones(2, 3)
    with fake_world(2):
        model = wrapped(uo)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        params = list(model.parameters())
        model(x).backward()
        with model.no_sync():
            model(x).backward()
            if not synced:
                fail(model, x)
        if synced:
            fail(model, x)
        assert any(p.grad is not None for p in params)
        optimizer.zero_grad(set_to_none=to_none)  # which does not ask the model for its parameters
        with torch.no_grad():
            model(x)
        assert all(p.grad is None or not p.grad.any() for p in params)


@every_uo
def test_an_exception_drops_the_micro_batches_of_all_units_alike(uo):
    x = torch.ones(2, 3)
    with fake_world(1):
        model, fresh = wrapped(uo), wrapped(uo)
        with model.no_sync():
            model(x).backward()
            fail(model, x)
        model(x).backward()
        fresh(x).backward()
        assert all(torch.equal(*pair) for pair in zip(grads(model), grads(fresh), strict=True))


@every_uo
def test_a_reentrant_checkpoint_inside_a_unit_that_stays_full_loses_nothing(uo):
    class Checkpointed(Pair):
        def forward(self, x):
            return self.b(checkpoint(self.a, x, use_reentrant=True)).sum()

    x = torch.ones(2, 3, requires_grad=True)
    plain = Checkpointed()
    with fake_world(1):
        model = FSDP(Checkpointed(), use_orig_params=uo)
        model(x).backward()
        plain(x).backward()
        found = [p.grad.reshape(-1) for p in model.parameters()]
        assert torch.equal(torch.cat(found), torch.cat([p.grad.reshape(-1) for p in plain.parameters()]))


@every_uo
def test_zero_1_trains_without_an_optimizer_that_counts_its_steps(uo):
    with fake_world(2):
        model = FSDP(nn.Linear(4, 4, bias=False), sharding_strategy=ShardingStrategy.ZERO_1, use_orig_params=uo)
        for value in (7.0, 8.0):
            model(torch.ones(1, 4)).sum().backward()
            for param in model.parameters():
                param.data.fill_(value)
            seen = []
            handle = model.module.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(module.weight))
            model(torch.ones(1, 4))
            handle.remove()
            assert seen[0][:2].tolist() == [[value] * 4] * 2  # this rank's half


def test_what_is_unfrozen_after_a_forward_without_backward_gets_its_gradient():
    with fake_world(2):
        model = FSDP(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.ZERO_1, use_orig_params=True)
        x = torch.ones(1, 4, requires_grad=True)
        params = list(model.parameters())  # after a forward the modules have views
        for requires_grad in (False, True):
            for param in params:
                param.requires_grad_(requires_grad)
            output = model(x)
        output.sum().backward()
        assert all((p.grad is not None) == (p.numel() > 0) for p in params)


def test_masters_in_full_precision_stay_so():
    with fake_world(4) as world:
        inner = torch.distributed.new_group([0, 1])
        torch.distributed.new_group([2, 3])
        model = FSDP(
            nn.Linear(4, 4),
            sharding_strategy=ShardingStrategy.LAYER_ZERO,
            process_group=(inner, world),
            use_orig_params=True,
        )
        before = [p.dtype for p in model.parameters()]
        with pytest.raises(ValueError, match=r"MixedPrecision\(param_dtype"):
            model.to(torch.bfloat16)
        assert [p.dtype for p in model.parameters()] == before
        assert model.to(torch.float64).params[0].dtype == torch.float64
