"""Weights that programs exchange by ``.data`` around an evaluation, as averages of them. The oracle is unsharded.

diffusers' EMAModel: ``store()``, ``copy_to()``, an evaluation, ``restore()``; trl's ``sync_ref_model``.

Promises:
- if weights are exchanged by `.data` around an evaluation (averages, reference models), the runtime trains, evaluates
  and saves the exchanged weights; the drop-in saves them, and warns if others are trained or evaluated
"""

import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from fsdp_models import data, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from torch.distributed.fsdp import ShardingStrategy
from trainers import under

from flatparam.dropin import recovery

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
KINDS = ("dropin", "runtime")
TOLD = "were written between two forwards"


def wrapped(kind, strategy, uo):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    arguments = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
    return wrap_blocks(make(), FSDP, **arguments)


class Average:
    """diffusers' EMAModel in so far: what is kept of parameters, whatever they are, and given to them by ``.data``."""

    def __init__(self, params):
        self.params = list(params)
        self.average = [param.detach().clone() for param in self.params]

    def step(self):
        for average, param in zip(self.average, self.params, strict=True):
            average.lerp_(param.detach(), 0.5)

    def copy_to(self):
        self.stored = [param.detach().clone() for param in self.params]
        for average, param in zip(self.average, self.params, strict=True):
            param.data.copy_(average)

    def restore(self):
        for stored, param in zip(self.stored, self.params, strict=True):
            param.data.copy_(stored)


def evaluated(model, step):
    with torch.no_grad():
        return loss_of(model, data(step)).detach()


def averaged_losses(model, whole):
    """Losses of training and of evaluating averages, and all weights after each evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    average, seen = Average(model.parameters()), []
    for step in range(2):
        loss = loss_of(model, data(step))
        loss.backward()
        reduce(model)
        optimizer.step()
        optimizer.zero_grad()
        average.step()
        average.copy_to()
        seen += [loss.detach(), evaluated(model, 9)]
        average.restore()
        if step:  # the first time a forward of training follows
            seen += whole(model)
        else:
            gather_next_time(model)
    return seen


def gather_next_time(model):
    """As the warning says. The runtime gathers in every forward."""
    for handle in getattr(model, "_all_handles", ()):
        if handle.uses_sharded_strategy:
            handle.reshard(True)


def reduce(model):
    """What the sharded ones do in backward."""
    if type(model).__name__ == "Model":
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())


def whole_of(model):
    with type(model).summon_full_params(model, writeback=False):
        return [param.detach().clone() for param in model.parameters()]


def averages():
    expected = averaged_losses(make(), lambda model: [param.detach().clone() for param in model.parameters()])
    ways = [("dropin", *way) for way in itertools.product(STRATEGIES, (False, True))]
    for kind, strategy, uo in [*ways, ("runtime", "FULL_SHARD", False), ("runtime", "SHARD_GRAD_OP", True)]:
        note(f"{kind} {strategy} {uo}")
        with under(kind), warnings.catch_warnings():
            warnings.filterwarnings("error", message=f".*{TOLD}")
            found = averaged_losses(wrapped(kind, strategy, uo), whole_of)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def set_to(model, values):
    """As trl's SyncRefModelCallback, between evaluations."""
    for param, value in zip(model.parameters(), values, strict=True):
        param.data.mul_(0.25).add_(value, alpha=0.75)


def reference_models():
    """Nothing but evaluations, and writes between them: told, and right after the way out that is told."""
    for strategy, uo in itertools.product(STRATEGIES[:2], (False, True)):
        note(f"{strategy} {uo}")
        losses = {}
        for kind in KINDS:
            with under(kind), warnings.catch_warnings(record=True) as caught:
                recovery._told_of_old_values.clear()
                warnings.simplefilter("always")
                model = wrapped(kind, strategy, uo).eval()
                first = [evaluated(model, 0) for _ in range(6)]
                assert all(torch.equal(one, first[0]) for one in first)
                assert not [each for each in caught if TOLD in str(each.message)]
                set_to(model, [torch.ones_like(param) for param in model.parameters()])
                later = [evaluated(model, 0) for _ in range(9)]
                told = [str(each.message) for each in caught if TOLD in str(each.message)]
                if kind == "dropin":
                    assert len(told) == 1
                    assert "handle.reshard(True)" in told[0]
                    gather_next_time(model)
                else:
                    assert not told
                    assert all(torch.equal(one, later[0]) for one in later)
                losses[kind] = evaluated(model, 0)
                assert not torch.equal(losses[kind], first[0])
        plain = copy.deepcopy(make())
        set_to(plain, [torch.ones_like(param) for param in plain.parameters()])
        assert losses["dropin"] == losses["runtime"] == evaluated(plain, 0)


class Partly(torch.nn.Module):
    """Its first layer may be computed without gradients, while the runtime prefetches the second."""

    def __init__(self, frozen):
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(6, 6) for _ in range(3))
        self.first.requires_grad_(not frozen)

    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.first.weight.requires_grad):
            x = self.first(x)
        return self.third(torch.tanh(self.second(torch.tanh(x))))


def prefetched():
    """Losses of training with evaluations in between, in both modes, where units are gathered ahead in forward."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy, x = ModuleWrapPolicy({torch.nn.Linear}), torch.linspace(-1, 1, 12).view(2, 6)
    for strategy, uo, frozen in itertools.product(STRATEGIES[:2], (False, True), (False, True)):
        note(f"{strategy} {uo} {frozen}")
        found = []
        for kind in ("torch", "dropin"):
            with under(kind):
                torch.manual_seed(0)
                arguments = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
                model = FSDP(Partly(frozen), auto_wrap_policy=policy, forward_prefetch=True, **arguments)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                for step in range(3):
                    loss = model(x).square().sum()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found.append(loss.detach())
                    for training in (True, False, False):
                        model.train(training)
                        with torch.no_grad():
                            found.append(model(x))
                    model.train()
                    if step:
                        with torch.no_grad():
                            found.append(model(x))
        half = len(found) // 2
        assert all(torch.equal(one, other) for one, other in zip(found[:half], found[half:], strict=True))


def gathered_anew():
    """Evaluations of other weights, after each of which all units are resharded, as verl does it."""
    with under("dropin"), warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{TOLD}")
        recovery._told_of_old_values.clear()
        model = wrapped("dropin", "SHARD_GRAD_OP", True).eval()
        seen = []
        for _ in range(3):
            seen.append(evaluated(model, 0))
            set_to(model, [torch.ones_like(param) for param in model.parameters()])
            gather_next_time(model)
        assert len({loss.item() for loss in seen}) == 3


def restored_before_training(kind, strategy, uo, write):
    """What training computes after an evaluation between two writes, and what is said."""
    with under(kind), warnings.catch_warnings(record=True) as caught:
        recovery._told_of_old_values.clear()
        warnings.simplefilter("always")
        model = wrapped(kind, strategy, uo)
        evaluated(model, 0)
        write(model)
        losses = [loss_of(model, data(0)).detach() for _ in range(3)]
        return losses, [each for each in caught if TOLD in str(each.message)]


def halve_data(model):
    for param in model.parameters():
        param.data.mul_(0.5)


def halve(model):
    with torch.no_grad():
        for param in model.parameters():
            if param.numel():
                param.mul_(0.5)


def told():
    for strategy, uo, write in itertools.product(STRATEGIES, (False, True), (halve_data, halve)):
        note(f"{strategy} {uo} {write.__name__}")
        expected, _ = restored_before_training("torch", strategy, uo, write)
        found, warned = restored_before_training("dropin", strategy, uo, write)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        assert len(warned) == (strategy != "NO_SHARD")


@pytest.mark.multiprocess
def test_writes_between_an_evaluation_and_training_are_told():
    run_ranks(told, 2)


@pytest.mark.multiprocess
def test_units_that_are_gathered_ahead_after_an_evaluation_are_gathered_once():
    run_ranks(prefetched, 2)


@pytest.mark.multiprocess
def test_what_is_gathered_anew_is_not_told_of():
    run_ranks(gathered_anew, 2)


@pytest.mark.multiprocess
def test_averages_are_evaluated_and_taken_back():
    run_ranks(averages, 2)


@pytest.mark.multiprocess
def test_writes_between_evaluations_are_told():
    run_ranks(reference_models, 2)
