"""Gradients in users' hands: in summon_full_params(with_grads=True) and in hooks; and how exactly they add up.

Promises:
- with `with_grads=True` gradients that are cleared, set, replaced or edited in place stay so, without writeback as
  they were; a frozen parameter keeps its own: `test_gradients_in_users_hands` (`edited`, `frozen`)
- hooks of parameters see this rank's piece of the reduced gradient; those of parameters that become a flat one are
  named: `test_gradients_in_users_hands` (`hooks`), `test_hooks_of_parameters_that_become_a_flat_one_are_missed_aloud`
- 512 micro-batches of bf16 add up in fp32, as planned; after `.double()` LAYER_ZERO reduces in fp64:
  `test_gradients_in_users_hands` (`sums`), `test_what_one_rank_adds_up_in_no_sync_is_exact_and_can_be_stepped_with`
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    Averaged,
    assert_same_grads,
    data,
    every_setting,
    full_grads,
    full_params,
    loss_of,
    make,
    wrap_blocks,
)
from gloo import fake_world, note, run_ranks
from torch import nn

from benchmarks.c_testing import _C_testing
from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardingStrategy


class Square(nn.Module):
    """Two weights of one shape, which swap gradients, and one that has none."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def swap(a, b):
    a.grad, b.grad = b.grad, a.grad


def replace(p, function):
    p.grad = None if p.grad is None else function(p.grad)


EDITS = {
    "nothing": lambda m: None,
    "scaled": lambda m: [p.grad.mul_(2) for p in m.parameters() if p.grad is not None],
    "replaced": lambda m: [replace(p, lambda grad: 3 * grad) for p in m.parameters()],
    "transposed": lambda m: replace(m.a.weight, lambda grad: grad.t()),
    "swapped": lambda m: swap(m.a.weight, m.b.weight),
    "zero_grad": lambda m: m.zero_grad(),
    "some cleared": lambda m: setattr(m.b.weight, "grad", None),
    "some set": lambda m: setattr(m.unused, "grad", torch.full_like(m.unused, 0.25)),
    "all set": lambda m: [setattr(p, "grad", torch.full_like(p, 0.5)) for p in m.parameters()],
}


def assert_grads(model, wanted, uo, what):
    """As ``wanted``, by name; a flat parameter has one of all or of none of its parts."""
    for name, grad in full_grads(model).items():
        if uo or all(other is None for other in wanted.values()):
            assert (grad is None) == (wanted[name] is None), (what, name, grad, wanted[name])
        expected = torch.zeros_like(grad) if wanted[name] is None and grad is not None else wanted[name]
        assert grad is None or torch.equal(grad, expected), (what, name, grad, expected)


def edited(strategy, uo):
    x = data(0)
    for edit, after in itertools.product(EDITS, (True, False)):
        what = f"{strategy} uo={uo} {edit} after a backward={after}"
        note(what)
        module = make(cls=Square)
        model = FSDP(make(cls=Square), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        if after:
            loss_of(model, x).backward()
            Averaged(module, 2).backward(lambda rank: [data(0, rank)])
            if uo:
                module.unused.grad = None
                model.unused.grad = None
        elif edit in ("transposed", "swapped", "some cleared"):
            continue
        before = {name: p.grad if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        assert_grads(model, before, uo, f"{what}: before")
        if strategy != "NO_SHARD":
            with FSDP.summon_full_params(model, with_grads=True, writeback=False):
                EDITS[edit](model.module)
            assert_grads(model, before, uo, f"{what}: not written back")
        with FSDP.summon_full_params(model, with_grads=True):
            for name, p in model.named_parameters():
                assert uo is False or (p.grad is None) == (before[name] is None), (what, name)
            EDITS[edit](model.module)
        EDITS[edit](module)
        assert_grads(model, {name: p.grad for name, p in module.named_parameters()}, uo, what)


def frozen(strategy, uo):
    model, module = FSDP(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo), make()
    loss_of(model, data(0)).backward()
    Averaged(module, 2).backward(lambda rank: [data(0, rank)])
    for p in model.parameters():
        p.requires_grad_(False)
    with FSDP.summon_full_params(model, with_grads=True):
        assert all(p.grad is not None and not p.requires_grad for p in model.parameters())
    assert_same_grads(model, module, f"{strategy} uo={uo}")
    assert all((p.grad is not None) or p.numel() == 0 for p in model.parameters())


def hooks(strategy, uo):
    """Called as of any parameter, with what this rank has of the gradient, once it is reduced."""
    what = f"{strategy} uo={uo}"
    note(what)
    module = make()
    model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
    seen, handles = [], []
    for p in model.parameters():
        handles.append(p.register_hook(lambda grad, p=p, seen=seen: seen.append(grad.shape == p.shape)))
        handles.append(p.register_hook(lambda grad: 0.5 * grad))
        handles.append(p.register_hook(lambda grad: grad.clamp_(-0.01, 0.01)))
    with model.no_sync():
        loss_of(model, data(0)).backward()
    assert not seen
    loss_of(model, data(1)).backward()
    held = sum(p.grad is not None for p in model.parameters())
    assert len(seen) == held > 0, what
    assert all(seen), what
    loss_of(model, data(2)).backward()
    assert len(seen) == 2 * held, what
    first, second = make(), make()
    Averaged(first, 2).backward(lambda rank: [data(0, rank), data(1, rank)])
    Averaged(second, 2).backward(lambda rank: [data(2, rank)])
    for p, a, b in zip(module.parameters(), first.parameters(), second.parameters(), strict=True):
        p.grad = (0.5 * a.grad).clamp_(-0.01, 0.01) + (0.5 * b.grad).clamp_(-0.01, 0.01)
    assert_same_grads(model, module, what)
    for handle in handles:
        handle.remove()

    def step(p):
        with torch.no_grad():
            p.sub_(0.1 * p.grad)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    model.zero_grad()
    before = full_params(model)
    loss_of(model, data(3)).backward()
    assert all(p.grad is None for p in model.parameters())
    module.zero_grad()
    Averaged(module, 2).backward(lambda rank: [data(3, rank)])
    grads = {name: p.grad for name, p in module.named_parameters()}
    for name, value in full_params(model).items():
        torch.testing.assert_close(value, before[name] - 0.1 * grads[name], msg=f"{what} {name}")


def sums(strategy, uo):
    """512 gradients of 1 in bf16 are 512, in fp32; after .double() nothing is reduced in less."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    module = nn.Linear(1, 8, bias=False).bfloat16()
    model = FSDP(module, sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
    with model.no_sync():
        for _ in range(511):
            model(one).sum().backward()
    assert model.memory_plan().no_sync == _C_testing.accumulated_bytes(model._unit.core)[0] == 4 * 8
    model(one).sum().backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters() if p.grad is not None)
    [grad] = full_grads(model).values()
    assert torch.equal(grad, torch.full_like(grad, 512.0)), (strategy, uo, grad)
    tiny = 1.0 + 2.0**-40
    for low in (None, torch.bfloat16):
        model = FSDP(
            nn.Linear(1, 8, bias=False),
            process_group=(alone, dist.group.WORLD),
            sharding_strategy=ShardingStrategy.LAYER_ZERO,
            mixed_precision=MixedPrecision(param_dtype=low),
            use_orig_params=uo,
        ).double()
        for _ in range(2):
            with model.no_sync():
                model(torch.full((1, 1), tiny, dtype=torch.float64)).sum().backward()
            model(torch.full((1, 1), tiny, dtype=torch.float64)).sum().backward()
        if low is None:
            [grad] = full_grads(model).values()
            assert grad.dtype == torch.float64
            assert torch.equal(grad, torch.full_like(grad, 4 * tiny)), (uo, grad)
        assert model._unit.flat_params[0].reduce_dtype == torch.float64


def dtypes(strategy, uo):
    """The ranks show gradients in one dtype, which has the values of all, whoever has none or set others."""
    low = MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
    for rows, is_set in itertools.product((3, 1), (False, True)):
        note(f"{strategy} uo={uo} {rows} {is_set}")
        module = nn.Sequential(nn.Linear(1, rows, bias=False), nn.Linear(rows, 1))
        model = FSDP(module, sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo, mixed_precision=low)
        model(torch.ones(2, 1)).sum().backward()
        had = full_grads(model)
        for p in model.parameters() if is_set and dist.get_rank() == 1 else ():
            if p.grad is None or not uo:
                p.grad = torch.full_like(p, 1 / 3)
        for name, grad in full_grads(model).items():
            assert grad.dtype in (torch.bfloat16, torch.float32)
            parts = torch.stack([had[name], torch.full_like(had[name], 1 / 3, dtype=grad.dtype)])
            assert (grad == parts).any(0).all()
            dist.broadcast(same := grad.clone(), 0)
            assert torch.equal(same, grad) or strategy == "NO_SHARD"


def gradients(strategy, uo):
    dtypes(strategy, uo)
    edited(strategy, uo)
    frozen(strategy, uo)
    hooks(strategy, uo)
    sums(strategy, uo)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_one_rank_adds_up_in_no_sync_is_exact_and_can_be_stepped_with(dtype, use_orig_params):
    """Gradients of 1 add up in fp32 where ``dtype`` would not; an optimizer gets them in it, and adding goes on."""
    count = {torch.bfloat16: 512, torch.float16: 4096}[dtype]
    with fake_world(1):
        model = FSDP(nn.Linear(1, 8, bias=False).to(dtype), use_orig_params=use_orig_params)
        [param] = model.parameters()
        optimizer = torch.optim.Adam([param], lr=0.0)
        one, wanted = torch.ones(1, 1, dtype=dtype), torch.ones(8)
        with model.no_sync():
            for _ in range(count):
                model(one).sum().backward()
            assert model.memory_plan().no_sync == _C_testing.accumulated_bytes(model._unit.core)[0] == 4 * 8
            assert torch.equal(param.grad.flatten(), count * wanted)
            optimizer.step()
            assert param.grad.dtype == dtype
            assert torch.equal(param.grad.flatten().float(), count * wanted)
            for _ in range(32):
                model(one).sum().backward()
            assert torch.equal(param.grad.flatten(), (count + 32) * wanted)
        for _ in range(2):
            model.zero_grad()
            model(one).sum().backward()
            assert param.grad.dtype == dtype
            assert torch.equal(param.grad.flatten().float(), wanted)
            optimizer.step()


@pytest.mark.multiprocess
@pytest.mark.sweep(3)
@every_setting
def test_gradients_in_users_hands(strategy, uo):
    run_ranks(gradients, 2, strategy, uo)


def test_hooks_of_parameters_that_become_a_flat_one_are_missed_aloud():
    with fake_world(2):
        module = nn.Linear(3, 3)
        module.weight.register_hook(lambda grad: grad)
        with pytest.warns(UserWarning, match=r"hooks of `weight` .* use_orig_params=True"):
            FSDP(module)


@pytest.mark.parametrize("uo", [False, True])
def test_what_parameters_are_views_of_is_not_computed_with(uo):
    class OfBase(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self.weight._base.sum()

    with fake_world(2):
        model = FSDP(OfBase(3, 3), use_orig_params=uo)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"the unit of OfBase: the base of its parameters \(`_base`\)"):
                model(torch.ones(2, 3)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2, 3))
