"""Events that one rank alone causes or sees do not decide whether a unit is gathered again.

Each rank is disturbed at random, and differently: optimizers of other models step, by a thread too, models of a group
of its own train, pieces of which it has nothing and tensors of others get new versions, garbage is collected. The
oracle is the unsharded module, bit for bit.

Promises:
- events that one rank alone causes or sees (other optimizers, threads, other models, versions of its pieces) decide no
  collective: `test_what_one_rank_does_decides_nothing_that_ranks_do_together`; of the drop-in
  `test_dropin_one_rank_alone.py`
- a forward's writes to a unit before the unit's turn are used, also if a rank has no element of it and gathers run
  ahead: `test_what_a_forward_writes_to_a_unit_before_its_turn_is_used`
"""

import contextlib
import copy
import functools
import gc
import random

import pytest
import torch
import torch.distributed as dist
from disturbing import stepping_in_a_thread
from fsdp_models import assert_same, assert_same_grads, data, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from layer_zero_ranks import layer_zero
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy

pytestmark = pytest.mark.multiprocess
PLAIN = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1")
GRIDS = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "LAYER_ZERO")


def wrapped(strategy, ahead, uo=True):
    if strategy == "LAYER_ZERO":
        return layer_zero(2, strategy, use_orig_params=uo, forward_prefetch=ahead)
    mesh = {"device_mesh": init_device_mesh("cpu", (1, 2))} if strategy in GRIDS else {}
    return wrap_blocks(
        make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo, forward_prefetch=ahead, **mesh
    )


class Disturbing:
    """What happens on this rank alone: call it wherever a program may do something."""

    def __init__(self, model, seed, group):
        self.model, self.random = model, random.Random(seed)
        self.probe, self.other = nn.Linear(2, 2), FSDP(nn.Linear(3, 3), process_group=group, use_orig_params=True)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.probe, self.other)]
        self.calls = 0

    def __call__(self, *_):
        self.calls += 1
        for act in (self.step_probe, self.train_other, self.write_nothing, self.collect):
            if self.random.random() < 0.4:
                act()

    def step_probe(self):
        for param in self.probe.parameters():
            param.grad = torch.ones_like(param)
        self.optimizers[0].step()

    def train_other(self):
        with torch.enable_grad():
            self.other(torch.ones(1, 3)).sum().backward()
        self.optimizers[1].step()
        self.optimizers[1].zero_grad()

    def write_nothing(self):
        """To pieces of which this rank has nothing, and to buffers of others."""
        with torch.no_grad():
            for param in self.model.parameters():
                if param.numel() == 0:
                    param.add_(0.0)
            self.probe.weight.add_(0.0)

    def collect(self):
        gc.collect(0)


def halve(module):
    """As programs do it: only of what this rank has."""
    with torch.no_grad():
        for param in module.parameters():
            if param.numel():
                param.mul_(0.5)


def oracle_step(module, step, count, halved):
    """Let ``.grad`` be the mean over two ranks of the sum of micro-batches; after those in ``halved`` weights are."""
    start = copy.deepcopy(module.state_dict())
    totals = []
    for rank in range(2):
        module.load_state_dict(start)
        grads = None
        for k in range(count):
            new = torch.autograd.grad(loss_of(module, data(10 * step + k, rank)), list(module.parameters()))
            grads = list(new) if grads is None else [a + b for a, b in zip(grads, new, strict=True)]
            if k in halved:
                halve(module)
        totals.append(grads)
    for param, first, second in zip(module.parameters(), *totals, strict=True):
        param.grad = (first + second) / 2


def disturbed(strategy, uo):
    me = dist.get_rank()
    alone = [dist.new_group([rank]) for rank in range(2)][me]
    for ahead in (False, True):
        module, model = make(), wrapped(strategy, ahead, uo)
        disturb = Disturbing(model, 100 * ahead + me, alone)
        for inner in model.modules():
            if isinstance(inner, nn.Linear):
                inner.register_forward_hook(disturb)
                inner.register_full_backward_hook(disturb)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, model)]
        for step in range(6):
            note(f"{strategy} uo={uo} ahead={ahead} {step}")
            halved = {0: [], 1: [0], 2: [], 3: [1], 4: [0, 1], 5: []}[step]
            with stepping_in_a_thread(disturb.random) if step % 2 else contextlib.nullcontext():
                for k in range(3):
                    with model.no_sync() if k < 2 else contextlib.nullcontext():
                        loss_of(model, data(10 * step + k)).backward()
                        disturb()
                    if k in halved:
                        halve(model)
                        disturb()
            oracle_step(module, step, 3, halved)
            assert_same_grads(model, module, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            disturb()
            assert_same(model, module, step)
            if step == 3:
                with torch.no_grad():
                    assert torch.equal(model(data(step)), module(data(step)))
        assert disturb.calls > 100


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("strategy", "uo"), [(s, uo) for s in PLAIN + GRIDS for uo in (True, False)])
def test_what_one_rank_does_decides_nothing_that_ranks_do_together(strategy, uo):
    run_ranks(disturbed, 2, strategy, uo)


class Scaled(nn.Module):
    """Of ``scale``, a unit of its own, rank 1 has nothing but a bias; ``between`` is called before its turn."""

    def __init__(self, bias):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.scale = nn.Linear(1, 1, bias=bias)
        self.last = nn.Linear(3, 1)
        self.between = None

    def forward(self, x):
        x = self.first(x)
        if self.between is not None:
            self.between()
        return self.last(self.scale(x.unsqueeze(-1)).squeeze(-1))


def scaled(bias=False):
    module, model = Scaled(bias), Scaled(bias)
    for name in ("first", "scale", "last"):
        setattr(model, name, FSDP(getattr(model, name), use_orig_params=True, forward_prefetch=True))
    return module, FSDP(model, use_orig_params=True, forward_prefetch=True)


def train_alike(module, model, steps, records=True):
    for step in steps:
        with torch.set_grad_enabled(records):
            found = model(data(step))
            for rank in range(2):
                wanted = [module(data(step, rank))] if records or rank == dist.get_rank() else []
                if records:
                    (wanted[0].square().mean() / 2).backward()
                if rank == dist.get_rank():
                    assert torch.equal(found, wanted[0]), step
        if records:
            found.square().mean().backward()
            for m in (module, model):
                torch.optim.SGD(m.parameters(), lr=0.1).step()
                m.zero_grad()
        assert_same(model, module, step)


def halving(module, steps):
    """Halve ``module`` once in each of ``steps``, in which it runs for two ranks, and in each call after these."""
    calls = []

    def call():
        calls.append(None)
        if len(calls) % 2 == 1 or len(calls) > 2 * steps:
            halve(module)

    return call


def written_before_its_turn():
    for records in (True, False):
        note(f"from the first forward on, records={records}")
        module, model = scaled()
        model.module.between = functools.partial(halve, model.scale)
        module.between = halving(module.scale, 5 if records else 0)
        train_alike(module, model, range(5), records)

    note("later")
    module, model = scaled(bias=True)
    train_alike(module, model, range(3), records=False)
    train_alike(module, model, range(3, 6))
    model.module.between = functools.partial(halve, model.scale)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"at `scale`: its parameters were written to in this forw"):
        model(data(6))
    halve(module.scale)
    model.refresh()
    module.between = halving(module.scale, 3)
    train_alike(module, model, range(7, 10))
    train_alike(module, model, range(10, 13), records=False)


def test_what_a_forward_writes_to_a_unit_before_its_turn_is_used():
    run_ranks(written_before_its_turn, 2)
