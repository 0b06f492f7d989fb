"""Training on the runtime is training unsharded: parameters and gradients, bit for bit at two ranks in fp32.

Promises:
- steps of SGD and Adam are those of the unsharded module: strategies, prefetch, forward prefetch, `use_orig_params`:
  `test_five_steps_equal_the_unsharded_module`,
  `test_equality.py::test_two_ranks_train_bit_for_bit_as_one_and_as_torch`
- a forward without backward leaves nothing stale; several graphs, several backwards, retained graphs add up:
  `test_graphs_that_outlive_a_pass`
- micro-batches add up, in any mix of synced and `no_sync`: `test_micro_batches_add_up`
- where torch 2.13 goes wrong: a forward without backward, then a step: old weights are used:
  `test_graphs_that_outlive_a_pass`
- where torch 2.13 goes wrong: a second backward over a graph finds freed storage: `test_graphs_that_outlive_a_pass`
"""

import copy
import itertools

import pytest
import torch
from fsdp_models import (
    SETTINGS,
    STRATEGIES,
    Averaged,
    Model,
    assert_same,
    assert_same_grads,
    data,
    every_setting,
    full_params,
    loss_of,
    make,
    wrap_blocks,
)
from gloo import note
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy

from flatparam import _C, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP

pytestmark = pytest.mark.multiprocess

PREFETCH = [None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST]
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def settings():
    """Every pair of values of two settings occurs in some row."""
    rows = []
    for i, (strategy, uo) in enumerate(SETTINGS):
        for j, prefetch in enumerate(PREFETCH):
            rows.append((strategy, uo, prefetch, (i + j) % 2 == 0, ("SGD", "Adam")[(i // 2 + j) % 2]))
    return rows


def train_each(strategy, uo, prefetch, forward_prefetch, optimizer):
    what = f"{strategy} uo={uo} {prefetch} forward_prefetch={forward_prefetch} {optimizer}"
    note(what)
    module = make()
    model = wrap_blocks(
        make(),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=uo,
        backward_prefetch=prefetch,
        forward_prefetch=forward_prefetch,
    )
    assert_same(model, module, what)
    ours, plain = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](module.parameters())
    oracle = Averaged(module, 2)
    for step in range(5):
        oracle.backward(lambda rank, step=step: [data(step, rank)])
        loss = loss_of(model, data(step))
        loss.backward()
        assert torch.equal(loss, loss_of(module, data(step)))
        if step == 0:
            assert_same_grads(model, module, what)
        for optim in (ours, plain):
            optim.step()
            optim.zero_grad()
    assert_same(model, module, what)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("strategy", "uo", "prefetch", "forward_prefetch", "optimizer"), settings())
def test_five_steps_equal_the_unsharded_module(strategy, uo, prefetch, forward_prefetch, optimizer):
    simulate_ranks(train_each, 2, strategy, uo, prefetch, forward_prefetch, optimizer)


def against_torch(strategy, uo):
    note(f"{strategy} uo={uo}")
    arguments = {"sharding_strategy": TorchStrategy[strategy], "use_orig_params": uo}
    models = [
        wrap_blocks(make(), FSDP, **arguments),
        wrap_blocks(make(), TorchFSDP, device_id=torch.device("cpu"), **arguments),
    ]
    names = [[(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()] for model in models]
    assert names[0] == names[1]
    for model in models:
        optim = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(3):
            loss_of(model, data(step)).backward()
            norm = model.clip_grad_norm_(0.5)
            optim.step()
            optim.zero_grad()
        model.norm = norm
    assert torch.equal(models[0].norm, models[1].norm)
    for ours, torchs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, torchs)
    states = [model.state_dict() for model in models]
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("strategy", "uo"), list(itertools.product(STRATEGIES[:3], (False, True))))
def test_the_same_bits_and_names_as_torch(strategy, uo):
    simulate_ranks(against_torch, 2, strategy, uo)


def accumulate(strategy, uo):
    """Micro-batches, each synced or not: the sum of what each gives."""
    plans = [(False, True), (False, False, True), (True, False, True), (True, True), (False, True, False, True)]
    for plan in plans:
        note(f"{strategy} uo={uo} {plan}")
        module, model = make(), wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        ours, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, module))
        oracle = Averaged(module, 2)
        for step in range(2):
            pending = []
            for i, synced in enumerate(plan):
                pending.append(10 * step + i)
                if synced:
                    loss_of(model, data(pending[-1])).backward()
                    oracle.backward(lambda rank, batch=tuple(pending): [data(k, rank) for k in batch])
                    pending = []
                else:
                    with model.no_sync():
                        loss_of(model, data(pending[-1])).backward()
            assert_same_grads(model, module, f"{strategy} uo={uo} {plan}")
            for optim in (ours, plain):
                optim.step()
                optim.zero_grad()
        assert_same(model, module, f"{strategy} uo={uo} {plan}")


def given_up():
    """Gradients that were kept and then given up leave no trace."""
    for set_to_none in (True, False):
        module, model = make(), wrap_blocks(make(), use_orig_params=True)
        with model.no_sync():
            loss_of(model, data(0)).backward()
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model, data(1)).backward()
        Averaged(module, 2).backward(lambda rank: [data(1, rank)])
        assert_same_grads(model, module, f"set_to_none={set_to_none}")


@pytest.mark.sweep(3)
@every_setting
def test_micro_batches_add_up(strategy, uo):
    simulate_ranks(accumulate, 2, strategy, uo)


def test_micro_batches_that_are_given_up():
    simulate_ranks(given_up, 2)


def graphs(strategy, uo):
    """Evaluation between steps, several graphs at once, retained ones."""
    note(f"{strategy} uo={uo}")
    module, model = make(), wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
    ours, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, module))
    oracle = Averaged(module, 2)

    def step_both(ours=ours, plain=plain):
        for optim in (ours, plain):
            optim.step()
            optim.zero_grad()

    for step in range(2):  # a forward without backward, then a step: nothing stale is used
        loss_of(model, data(step)).backward()
        oracle.backward(lambda rank, step=step: [data(step, rank)])
        with torch.no_grad():
            loss_of(model, data(7))
        unused = loss_of(model, data(8))
        step_both()
        assert torch.equal(loss_of(model, data(9)), loss_of(module, data(9)))
        del unused
    first, second = loss_of(model, data(20)), loss_of(model, data(21))
    first.backward()
    second.backward()
    oracle.backward(lambda rank: [data(20, rank)])
    oracle.backward(lambda rank: [data(21, rank)])
    assert_same_grads(model, module, f"{strategy} two graphs")
    step_both()
    loss = loss_of(model, data(22))
    loss.backward(retain_graph=True)
    loss.backward()
    oracle.backward(lambda rank: [data(22, rank)])
    oracle.backward(lambda rank: [data(22, rank)])
    assert_same_grads(model, module, f"{strategy} retained graph")
    step_both()
    assert_same(model, module)
    graph = loss_of(model, data(23))  # weights change between forward and backward: refused, as unsharded
    if uo and strategy != "NO_SHARD":
        for param in model.parameters():
            param.detach().add_(1.0)
        with pytest.raises(RuntimeError, match="modified"):
            graph.backward()


def frozen_graphs(strategy, uo):
    """Of a frozen unit that is called several times; what it gathers for them is freed."""
    for calls, again in itertools.product((1, 2), (False, True)):
        note(f"{strategy} uo={uo} {calls} calls, again={again}")
        torch.manual_seed(0)
        kept = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
        first, frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        module = nn.Sequential(first, *[frozen] * calls)
        inner = FSDP(copy.deepcopy(frozen), **kept)
        model = FSDP(nn.Sequential(copy.deepcopy(first), *[inner] * calls), **kept)
        gathered = []

        def note_weight(module, args, output, gathered=gathered):
            gathered.append(module.weight)

        inner.module.register_forward_hook(note_weight)
        x = torch.ones(2, 8)
        for one in (module, model):
            loss = one(x).square().mean()
            loss.backward(retain_graph=True)
            for _ in range(again):
                loss.backward()
        assert_same_grads(model, module)
        if strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            assert all(_C.lacks_memory(weight) for weight in gathered)


@pytest.mark.sweep(3)
@every_setting
def test_graphs_that_outlive_a_pass(strategy, uo):
    simulate_ranks(graphs, 2, strategy, uo)
    simulate_ranks(frozen_graphs, 2, strategy, uo)


def four(strategy, uo):
    note(f"{strategy} uo={uo}")
    module, model = make(), wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
    oracle = Averaged(module, 4)
    for p, optim in ((module, torch.optim.SGD(module.parameters(), 0.1)),):
        for step in range(2):
            oracle.backward(lambda rank, step=step: [data(step, rank)])
            optim.step()
            p.zero_grad()
    optim = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        loss_of(model, data(step)).backward()
        optim.step()
        model.zero_grad()
    for name, value in full_params(model).items():
        torch.testing.assert_close(value, dict(module.named_parameters())[name], rtol=1e-6, atol=1e-6)


@pytest.mark.sweep(3)
@every_setting
def test_four_ranks(strategy, uo):
    simulate_ranks(four, 4, strategy, uo)


def test_the_model_has_padding_and_empty_shards():
    """What the other tests rely on: sizes that do not divide, at two and at four ranks."""
    sizes = [p.numel() for p in Model().blocks[0].parameters()]
    assert sum(sizes) % 2 or sum(sizes) % 4
