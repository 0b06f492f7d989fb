"""Checkpoint folders and state dicts that an older version has written load into this one.

The folder ``written_at_2751a33`` has what ``write`` leaves at that commit, on two ranks. All values follow from names,
by arithmetic, so no expectation depends on how either version computes.
"""

import gzip
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp_models import full_grads, full_params
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp import StateDictType

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy as S
from flatparam import checkpoint

pytestmark = pytest.mark.multiprocess
WRITTEN = Path(__file__).parent / "written_at_2751a33"
KINDS = {kind: StateDictType[f"{kind.upper()}_STATE_DICT"] for kind in ("full", "sharded", "local")}
MOMENTS = ("exp_avg", "exp_avg_sq")
EXTRA = {"epoch": 3, "rates": [0.5, float("inf")], "seed": torch.arange(3), ("a", 1): None}


class Small(nn.Module):
    """With a tied weight, a transposed one, a scalar, buffers, an extra state, and a parameter without a unit."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.tied = nn.Linear(2, 3, bias=False)
        self.again = nn.Linear(2, 3, bias=False)
        self.again.weight = self.tied.weight
        self.turned = nn.Parameter(torch.zeros(4, 2).t())
        self.gain = nn.Parameter(torch.zeros(()))
        self.alone = nn.Linear(2, 1)
        self.extra = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def forward(self, factor):
        """The gradient of each parameter is ``factor`` times its values of the key "grad"."""
        own = {"norm.weight": self.norm.weight, "norm.bias": self.norm.bias, "tied.weight": self.again.weight}
        own |= {"turned": self.turned, "gain": self.gain, "alone.weight": self.alone.weight}
        own |= {"alone.bias": self.alone.bias}
        found = [(param * value(name, param.shape, "grad")).sum() for name, param in own.items()]
        return factor * (self.inner(torch.ones(1, 3)).sum() + sum(found))


NAMES = [name for name, _ in Small().named_parameters()]


def value(name, shape, key=""):
    """The values of a parameter, of the state ``key`` of its optimizer, or of its gradient."""
    if key == "grad" and name.startswith("inner."):
        return torch.ones(shape)
    first = NAMES.index(name) + 16 * ("", *MOMENTS, "grad").index(key)
    return torch.arange(shape.numel(), dtype=torch.float32).view(shape) / 8 + first


@torch.no_grad()
def module(is_filled=True):
    """The module with its values, or with zeros."""
    made = Small()
    for name, param in made.named_parameters():
        param.copy_(value(name, param.shape) if is_filled else torch.zeros_like(param))
    if is_filled:
        made.norm.running_mean.copy_(torch.tensor([0.5, 0.25]))
        made.norm.num_batches_tracked.fill_(7)
        made.extra = {"seen": torch.tensor([1.5, 2.5]), "count": 4}
    return made


def wrapped(made, **arguments):
    """The model, and its optimizer: with original parameters it has a group of biases."""
    alone = list(made.alone.parameters())
    made.inner = FSDP(made.inner, **arguments)
    model = FSDP(made, ignored_states=alone, **arguments)
    named = list(model.named_parameters())
    if arguments["use_orig_params"]:
        weights, biases = (
            [param for name, param in named if name.endswith("bias") == is_bias] for is_bias in (False, True)
        )
        groups = [{"params": weights, "lr": 0.5}, {"params": biases, "lr": 0.25, "betas": (0.5, 0.75)}]
    else:
        groups = [{"params": [param for _, param in named], "lr": 0.5}]
    return model, torch.optim.Adam(groups)


def states():
    """The states of the optimizer, by name."""
    step = torch.tensor(3.0)
    return {
        name: {"step": step, **{key: value(name, param.shape, key) for key in MOMENTS}}
        for name, param in Small().named_parameters()
    }


def write(folder):
    """Leave two checkpoints, and state dicts of all kinds."""
    folder.mkdir(exist_ok=True)
    me = dist.get_rank()
    for use_orig_params in (True, False):
        model, optimizer = wrapped(module(), use_orig_params=use_orig_params)
        full = FSDP.optim_state_dict(model, optimizer) | {"state": states()}
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, full))
        if use_orig_params:
            model(1.0).backward()
        else:
            with model.no_sync():
                model(me + 1.0).backward()
            for param in model.module.alone.parameters():  # no unit manages it: a checkpoint has one gradient of it
                param.grad = None
        checkpoint.save(folder / ("stepped" if use_orig_params else "between"), model, optimizer, EXTRA)
        for kind in ("full", "sharded") if use_orig_params else ("local",):
            with FSDP.state_dict_type(model, KINDS[kind]):
                found = {"model": model.state_dict()}
                if use_orig_params:
                    found["optimizer"] = FSDP.optim_state_dict(model, optimizer)
            if me == 0 or kind != "full":
                with gzip.open(folder / f"{kind}-{me}.pt.gz", "wb") as file:
                    torch.save(found, file)


def differing(model, optimizer=None):
    """Names whose values in the model, its buffers or its optimizer are not those that were written."""
    params = full_params(model)
    wrong = [name for name in NAMES if not torch.equal(params[name], value(name, params[name].shape))]
    wrong += [name for name, buffer in module().named_buffers() if not torch.equal(buffer, model.get_buffer(name))]
    if optimizer is not None:
        got, wanted = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"], states()
        wrong += [
            f"{key} of {name}"
            for name, values in wanted.items()
            for key in values
            if got[name].keys() != values.keys() or not torch.equal(got[name][key], values[key])
        ]
    return wrong


def check_extra(model):
    extra = model.module.extra
    assert torch.equal(extra["seen"], torch.tensor([1.5, 2.5]))
    assert extra["count"] == 4


def load_checkpoints():
    for strategy in (S.FULL_SHARD, S.NO_SHARD):
        model, optimizer = wrapped(module(False), use_orig_params=True, sharding_strategy=strategy)
        found = checkpoint.load(WRITTEN / "stepped", model, optimizer)
        assert not differing(model, optimizer), strategy
        check_extra(model)
        assert found.extra.pop("seed").equal(EXTRA["seed"])
        assert found.extra == {key: one for key, one in EXTRA.items() if key != "seed"}
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
        assert optimizer.param_groups[1]["betas"] == (0.5, 0.75)
        for name, grad in full_grads(model).items():
            assert torch.equal(grad, value(name, grad.shape, "grad")), (strategy, name)


def load_between_micro_batches():
    """The sum of each rank is there: the next backward adds to it, and averages over the ranks."""
    model, optimizer = wrapped(module(False), use_orig_params=False)
    checkpoint.load(WRITTEN / "between", model, optimizer)
    assert not differing(model, optimizer)
    check_extra(model)
    model(1.0).backward()
    for name, grad in full_grads(model).items():
        if not name.startswith("alone."):
            assert torch.equal(grad, 2.5 * value(name, grad.shape, "grad")), name


def load_state_dicts():
    for kind, use_orig_params in (("full", True), ("full", False), ("sharded", True), ("local", False)):
        model, optimizer = wrapped(module(False), use_orig_params=use_orig_params)
        rank = 0 if kind == "full" else dist.get_rank()
        with gzip.open(WRITTEN / f"{kind}-{rank}.pt.gz") as file:
            found = torch.load(file, weights_only=False)
        with FSDP.state_dict_type(model, KINDS[kind]):
            model.load_state_dict(found["model"])
            if use_orig_params:
                optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, found["optimizer"]))
        assert not differing(model, optimizer if use_orig_params else None), (kind, use_orig_params)
        check_extra(model)


@pytest.mark.parametrize("load", [load_checkpoints, load_between_micro_batches, load_state_dicts])
def test_what_an_older_version_has_written_loads(load):
    simulate_ranks(load, 2)
