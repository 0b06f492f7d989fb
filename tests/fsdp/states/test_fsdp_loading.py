"""A state dict that does not fit, on all ranks or on one, changes nothing on any rank.

Promises:
- a state dict that does not fit, on any rank, changes nothing on any
"""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Averaged, assert_same, data, loss_of, make, wrap_blocks
from gloo import note
from simulated_ranks import simulate_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, defer_init


class WithBuffers(nn.Module):
    """Two units, a parameter that no unit manages, buffers of the root and below it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        self.ignored = nn.Parameter(torch.ones(5))
        self.last = nn.Linear(5, 2)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        return self.last(self.first(x) * self.ignored)


def wrapped(strategy, uo):
    module = make(cls=WithBuffers)
    settings = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
    module.first = FSDP(module.first, **settings)
    return FSDP(module, ignored_states=[module.ignored], **settings)


def changed(state, name, value):
    return {**state, name: value}


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


WRONG = {  # how a state dict is wrong; what is said; under strict=False too
    "a shape": (lambda s: changed(s, "last.weight", torch.ones(3, 3)), r"size mismatch for last\.weight", True),
    "a shape of a child": (lambda s: changed(s, "first.0.bias", torch.ones(7)), r"first\.0\.bias.*\[7\]", True),
    "a shape of a buffer": (lambda s: changed(s, "first.1.running_mean", torch.ones(2)), "running_mean", True),
    "a shape of what is ignored": (lambda s: changed(s, "ignored", torch.ones(2)), "ignored", True),
    "no tensor": (lambda s: changed(s, "last.bias", "text"), r"last\.bias", True),
    "a missing key": (lambda s: without(s, "first.0.weight"), r'Missing key.*"first\.0\.weight"', False),
    "an unexpected key": (lambda s: changed(s, "more", torch.ones(1)), r'Unexpected key.*"more"', False),
}


def values(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, [id(p) for p in model.parameters()]


def check(model, state, wrong, message, strict, here):
    before, ids = values(model)
    assert any(not torch.equal(before[name], value) for name, value in state.items())
    given = wrong(state) if here else state
    with pytest.raises(RuntimeError) as raised:
        model.load_state_dict(given, strict=strict)
    assert re.search(message, str(raised.value), re.DOTALL), str(raised.value)
    if not here:
        assert str(raised.value).startswith("load_state_dict: nothing was loaded: rank 1: RuntimeError: Error(s)")
    after, ids_after = values(model)
    assert ids == ids_after
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def all_or_nothing():
    for strategy, uo in itertools.product(("FULL_SHARD", "NO_SHARD", "ZERO_1"), (False, True)):
        model = wrapped(strategy, uo)
        model(data(0)).sum().backward()
        model.zero_grad()
        state = {name: value + 1 for name, value in make(seed=1, cls=WithBuffers).state_dict().items()}
        for what, (wrong, message, always) in WRONG.items():
            for strict, here in itertools.product((True, False), (True, dist.get_rank() == 1)):
                if strict or always:
                    note(f"{strategy} {uo} {what} strict={strict} here={here}")
                    check(model, state, wrong, message, strict, here)
        model.load_state_dict(state)
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), name
    model, module = wrap_blocks(make(), use_orig_params=True), make()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(changed(make(seed=3).state_dict(), "last.weight", torch.ones(2)))
    loss_of(model, data(0)).backward()
    Averaged(module, 2).backward(lambda rank: [data(0, rank)])
    for m in (model, module):
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    assert_same(model, module)


def deferred():
    """A model without values has none after a load that failed, and takes those of the next."""
    with torch.device("meta"):
        module = make()
    model = wrap_blocks(module, param_init_fn=defer_init)
    state = make().state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(changed(state, "last.weight", torch.ones(2)))
    for unit in FSDP.fsdp_modules(model):
        [flat] = unit.params
        assert flat[: flat.numel() - unit.numel_padded_per_param[0]].isnan().all()
    model.load_state_dict(state)
    assert_same(model, make())


def both():
    all_or_nothing()
    deferred()


@pytest.mark.multiprocess
def test_loading_is_all_or_nothing():
    simulate_ranks(both, 2)


class WithoutElements(nn.Module):
    """A parameter without elements in the root, and a unit that is loaded after it."""

    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(0, 3))])
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(x @ self.listed[0]) + self.listed[1].sum()


def load_what_has_no_elements(atomic):
    module = make(cls=WithoutElements)
    given = {name: value + 1 for name, value in module.state_dict().items()}
    module.last = FSDP(module.last, segments=True, atomic=atomic)
    model = FSDP(module, segments=True, atomic=atomic)
    loaded = model.load_state_dict(given)
    return list(loaded.missing_keys), all(torch.equal(value, given[name]) for name, value in model.state_dict().items())


@pytest.mark.multiprocess
@pytest.mark.parametrize("atomic", [None, "row"])
def test_a_parameter_without_elements_before_a_unit_is_no_missing_key(atomic):
    assert simulate_ranks(load_what_has_no_elements, 4, atomic) == [([], True)] * 4
