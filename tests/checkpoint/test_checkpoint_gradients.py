"""Gradients in checkpoints: between micro-batches, and between backward and step, nothing of them is lost."""

import itertools

import pytest
import torch
import torch.distributed as dist
from checkpoints import STRATEGIES, adam, differing, full_state, train, wrapped
from fsdp_models import Model, data, full_grads, loss_of, make
from gloo import note
from simulated_ranks import simulate_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint
from flatparam.checkpoint import CheckpointError

pytestmark = pytest.mark.multiprocess


def backward(model, step, *, synced=True):
    if synced:
        loss_of(model, data(step)).backward()
    else:
        with model.no_sync():
            loss_of(model, data(step)).backward()


def made(strategy, use_orig_params=True, seed=0, cls=Model, **arguments):
    model = wrapped(strategy, use_orig_params, cls=cls, seed=seed, **arguments)
    return model, adam(model)


def shown(model):
    """What ``.grad`` are."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(
        (a[name] is None) == (b[name] is None) and (a[name] is None or torch.equal(a[name], b[name])) for name in a
    )


def goes_on(model, optimizer):
    backward(model, 5)
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 6, 1)
    return full_state(model, optimizer)


def between_micro_batches(folder, strategies, use_orig_params, asynchronous):
    """After a synced backward, or none, and micro-batches that are not reduced."""
    offloaded = [("LAYER_ZERO", {"offload_grads": True}), ("LAYER_ZERO_NESTED", {"offload_grads": True})]
    for i, (strategy, options) in enumerate([(name, {}) for name in strategies] + offloaded):
        for before in (False, True):
            what = f"{strategy} {options} synced before: {before}"
            note(what)
            path = folder / f"{i} {before}"
            model, optimizer = made(strategy, use_orig_params, **options)
            train(model, optimizer, 0, 1)
            if before:
                backward(model, 1)
            backward(model, 2, synced=False)
            backward(model, 3, synced=False)
            grads = shown(model)
            if asynchronous:
                pending = checkpoint.async_save(path, model, optimizer)
            else:
                checkpoint.save(path, model, optimizer)
            assert same(shown(model), grads), what
            wanted = goes_on(model, optimizer)
            if asynchronous:
                pending.wait()

            again, other = made(strategy, use_orig_params, seed=1, **options)
            backward(again, 8)
            backward(again, 9, synced=False)  # which the load drops
            checkpoint.load(path, again, other)
            assert same(shown(again), grads), what
            found = goes_on(again, other)
            assert not differing(found, wanted), (what, differing(found, wanted))


@pytest.mark.parametrize(("use_orig_params", "asynchronous"), [(True, False), (False, True)])
def test_between_micro_batches(tmp_path, use_orig_params, asynchronous):
    simulate_ranks(between_micro_batches, 2, tmp_path, STRATEGIES, use_orig_params, asynchronous)


@pytest.mark.thorough
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_between_micro_batches_of_four_ranks(tmp_path, use_orig_params):
    strategies = ("LAYER_ZERO", "LAYER_ZERO_NESTED", "HYBRID_SHARD")
    simulate_ranks(between_micro_batches, 4, tmp_path, strategies, use_orig_params, False)


def before_the_step(folder):
    """Reduced gradients go wherever parameters go: into every strategy, and a plain module."""
    for strategy, use_orig_params in itertools.product(STRATEGIES, (True, False)):
        model, optimizer = made(strategy, use_orig_params)
        train(model, optimizer, 0, 1)
        backward(model, 1)
        checkpoint.save(folder / f"{strategy} {use_orig_params}", model, optimizer)
        grads = full_grads(model)
        optimizer.step()
        wanted = full_state(model, optimizer)
        module = make(3)
        plain = adam(module)
        checkpoint.load(folder / f"{strategy} {use_orig_params}", module, plain)
        assert same({name: p.grad for name, p in module.named_parameters()}, grads)
        for other, flag in ((strategy, use_orig_params), ("FULL_SHARD", not use_orig_params), ("LAYER_ZERO", True)):
            note(f"{strategy} {use_orig_params} into {other} {flag}")
            again, second = made(other, flag, seed=1, units=other == strategy)
            backward(again, 7)
            checkpoint.load(folder / f"{strategy} {use_orig_params}", again, second)
            assert same(full_grads(again), grads)
            second.step()
            assert not differing(full_state(again, second), wanted)


def test_between_backward_and_step(tmp_path):
    simulate_ranks(before_the_step, 2, tmp_path)


class Parts(nn.Module):
    """Of two parameters."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)

    def forward(self, x):
        return self.a(x) + self.b(x)


def some_have_none(folder):
    """What had no gradient has none again; in a flat parameter it counts as zeros. A load without any clears."""
    model, optimizer = made("FULL_SHARD", cls=Parts, units=False)
    model(torch.ones(1, 3)).sum().backward()
    model.module.b.weight.grad = None
    checkpoint.save(folder / "one", model, optimizer)
    for strategy, flag in (("FULL_SHARD", True), ("FULL_SHARD", False), ("NO_SHARD", True)):
        again, second = made(strategy, flag, cls=Parts, units=False, seed=1)
        again(torch.ones(1, 3)).sum().backward()
        checkpoint.load(folder / "one", again, second)
        grads = full_grads(again)
        assert torch.equal(grads["a.weight"], full_grads(model)["a.weight"])
        assert grads["b.weight"] is None or not grads["b.weight"].any()
        assert (grads["b.weight"] is None) == flag
    optimizer.zero_grad()
    checkpoint.save(folder / "two", model, optimizer)
    checkpoint.load(folder / "two", again, second)
    assert set(shown(again).values()) == {None}


def test_parameters_without_gradient(tmp_path):
    simulate_ranks(some_have_none, 2, tmp_path)


def frozen(folder):
    """A parameter that is frozen after a micro-batch keeps its gradient of that."""
    for strategy in ("LAYER_ZERO", "FULL_SHARD"):
        model, optimizer = made(strategy, cls=Parts, units=False)
        backward(model, 2, synced=False)
        model.b.weight.requires_grad_(False)
        checkpoint.save(folder / strategy, model, optimizer)
        backward(model, 3)
        optimizer.step()
        wanted = full_state(model, optimizer)
        again, second = made(strategy, cls=Parts, units=False, seed=1)
        again.b.weight.requires_grad_(False)
        checkpoint.load(folder / strategy, again, second)
        backward(again, 3)
        second.step()
        assert not differing(full_state(again, second), wanted), strategy


def test_frozen_between_micro_batches(tmp_path):
    simulate_ranks(frozen, 2, tmp_path)


def sums_elsewhere(folder):
    """A sum of one rank alone fits no other groups: refused by all, and nothing is changed."""
    if dist.get_world_size() == 4:
        for strategy in ("LAYER_ZERO", "LAYER_ZERO_NESTED"):
            model, optimizer = made(strategy)
            backward(model, 0, synced=False)
            checkpoint.save(folder / strategy, model, optimizer)
            with pytest.raises(ValueError, match=r"checkpoint\.save: gradients of .* are not reduced"):
                checkpoint.save(folder / "without optimizer", model)
        where = r"the rank had \d+ elements of its sum from \d+ on, and in the unit of (Model|\w+ at `.+`) it has"
    else:
        where = r"each of 4 ranks has its own, and here are 2"
    for strategy, into in (("LAYER_ZERO", "LAYER_ZERO_NESTED"), ("LAYER_ZERO_NESTED", "FULL_SHARD")):
        again, second = made(into, seed=1)
        backward(again, 1)
        grads, before = shown(again), full_state(again)
        with pytest.raises(CheckpointError, match=rf"sum of gradients of `.*` does not fit: {where}"):
            checkpoint.load(folder / strategy, again, second)
        assert same(shown(again), grads)
        assert not differing(full_state(again), before)
        checkpoint.load(folder / strategy, again)  # the model alone
        if dist.get_world_size() == 4:
            assert not differing(full_state(again), full_state(model))


def test_sums_do_not_fit_elsewhere(tmp_path):
    simulate_ranks(sums_elsewhere, 4, tmp_path)
    simulate_ranks(sums_elsewhere, 2, tmp_path)


def not_managed(folder):
    """Gradients of what no unit manages are whole on every rank; where they differ, none of them is taken for all."""
    module = make()
    model = FSDP(module, ignored_states=list(module.last.parameters()))
    optimizer = adam(model)
    backward(model, 0)
    with pytest.raises(CheckpointError, match=r"the gradient of `last\.weight` differs on rank 0 and rank 1"):
        checkpoint.save(folder / "one", model, optimizer)
    for param in module.last.parameters():
        dist.all_reduce(param.grad)
    checkpoint.save(folder / "one", model, optimizer)
    grads = shown(model)
    optimizer.zero_grad()
    checkpoint.load(folder / "one", model, optimizer)
    assert same(shown(model), grads)


def test_of_parameters_that_no_unit_manages(tmp_path):
    simulate_ranks(not_managed, 2, tmp_path)


def test_a_sparse_gradient_is_refused(tmp_path):
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(CheckpointError, match=r"the gradient of `weight` is torch.sparse_coo .* zero_grad\(\)"):
        checkpoint.save(tmp_path / "one", table, torch.optim.SparseAdam(table.parameters()))
