"""Optimizer states by names, whole. The oracle: an unsharded module with the same optimizer.

Promises:
- whole optimizer states are the unsharded optimizer's, and train on in another model: strategies, kinds of state,
  blocks
- an empty parameter whose optimizer state stayed behind keeps no state from a flat parameter:
  `test_the_state_of_an_empty_parameter_says_nothing_of_a_flat_one`
- a parameter that was frozen when its momentum was saved begins without any in a flat parameter with others:
  `test_a_parameter_that_was_frozen_has_no_momentum_in_a_flat_one`; all ranks have the same states then:
  `test_all_ranks_load_momentum_and_gradients_of_a_flat_parameter_or_none`
"""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Averaged, Block, assert_same, data, loss_of, make
from gloo import note
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, OptimStateKeyType, StateDictType

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, checkpoint


class Odd(nn.Module):
    """Blocks, tied names, a transposed parameter, one without dimensions, one that no unit manages, a frozen one."""

    def __init__(self):
        super().__init__()
        self.ignored = nn.Parameter(torch.ones(5))
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([Block(5) for _ in range(2)])
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.again = nn.ModuleList([self.first])
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = self.first(x) * self.ignored
        for block in self.blocks:
            x = self.frozen(block(x))
        return self.scale * (x @ self.turned)


def adam(params):
    return torch.optim.Adam(params, lr=0.01, amsgrad=True)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Own(torch.optim.Optimizer):
    """State of every kind: like the parameter, of another shape, without dimensions, Python values, None, bytes."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "betas": (0.5, 0.25)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(sum=torch.zeros_like(p), history=torch.zeros(7), count=0, pair=(1, 2), nothing=None)
                    state.update(mask=torch.zeros_like(p, dtype=torch.bool), scale=torch.tensor(2.0))
                    state["low"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["sum"].add_(p.grad)
                state["mask"].copy_(p.grad > 0)
                state["low"].copy_(p.grad)
                state["history"][state["count"] % 7] = state["count"]
                state["count"] += 1
                state["scale"].mul_(1.5)
                p.sub_(state["sum"], alpha=group["lr"])


OPTIMIZERS = {"adam": adam, "momentum": momentum, "own": Own}


def wrapped(module, strategy, uo, **more):
    settings = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo, **more}
    if "process_group" not in more and strategy in ("HYBRID_SHARD", "LAYER_ZERO", "LAYER_ZERO_NESTED"):
        settings["device_mesh"] = dist.device_mesh.init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    for i, block in enumerate(module.blocks):
        module.blocks[i] = FSDP(block, **settings)
    return FSDP(module, ignored_states=[module.ignored], segments=not uo, **settings)


def averaged(model):
    """What no unit manages is the user's to average."""
    grad = model.ignored.grad
    dist.all_reduce(grad)
    grad.div_(dist.get_world_size())


def train(model, optimizer, plain, plain_optimizer, steps):
    """Both, alike."""
    for step in steps:
        loss_of(model, data(step)).backward()
        averaged(model)
        optimizer.step()
        optimizer.zero_grad()
        Averaged(Trainable(plain), dist.get_world_size()).backward(lambda rank, step=step: [data(step, rank)])
        plain_optimizer.step()
        plain_optimizer.zero_grad()


class Trainable:
    """What ``Averaged`` needs of a module with frozen parameters."""

    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module(x)

    def parameters(self):
        return [param for param in self.module.parameters() if param.requires_grad]


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    return one == other


def assert_states(found, wanted, exact=True):
    """By name, key, dtype, shape and value."""
    assert set(found["state"]) == set(wanted["state"]), (sorted(found["state"]), sorted(wanted["state"]))
    for name, values in wanted["state"].items():
        assert list(found["state"][name]) == list(values), name
        for key, value in values.items():
            have = found["state"][name][key]
            if exact or not isinstance(value, torch.Tensor):
                assert equal(have, value), (name, key, have, value)
            else:
                assert have.shape == value.shape
                assert torch.allclose(have.float(), value.float(), atol=1e-5), (name, key)


def names_of(plain, optimizer, state):
    return FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, plain, optim=optimizer)


def full_states(strategy, uo, which, more):
    """Saved whole it is the unsharded optimizer's; loaded into another model it trains on as that."""
    note(f"{strategy} {uo} {which}")
    make_optimizer, rank = OPTIMIZERS[which], dist.get_rank()
    exact = dist.get_world_size() == 2 and strategy != "NO_SHARD"
    plain, model = make(cls=Odd), wrapped(make(cls=Odd), strategy, uo, **more)
    plain_optimizer = make_optimizer([p for p in plain.parameters() if p.requires_grad])
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    assert FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"] == {}
    train(model, optimizer, plain, plain_optimizer, range(2))

    wanted = names_of(plain, plain_optimizer, copy.deepcopy(plain_optimizer.state_dict()))
    before = copy.deepcopy(optimizer.state_dict())
    found = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert_states(found, wanted, exact)
    assert sorted(found["param_groups"][0]["params"]) == wanted["param_groups"][0]["params"]
    assert {k: v for k, v in found["param_groups"][0].items() if k != "params"} == {
        k: v for k, v in wanted["param_groups"][0].items() if k != "params"
    }
    only = FSDP.full_optim_state_dict(model, optimizer)
    assert only == {} if rank else equal(only, found)
    after = optimizer.state_dict()
    assert all(equal(after["state"][key], before["state"][key]) for key in before["state"])

    # into another model
    for way in ("shard", "scatter", "to_load", "to_load rank0"):
        other = wrapped(make(seed=5, cls=Odd), strategy, uo, **more)
        other.load_state_dict(model.state_dict())
        other_optimizer = make_optimizer([p for p in other.parameters() if p.requires_grad])
        if way == "shard":
            state = FSDP.shard_full_optim_state_dict(found, other, optim=other_optimizer)
        elif way == "scatter":
            state = FSDP.scatter_full_optim_state_dict(only or None, other, optim=other_optimizer)
        else:
            config = FullOptimStateDictConfig(rank0_only="rank0" in way)
            with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), config):
                given = only if "rank0" in way else found
                state = FSDP.optim_state_dict_to_load(other, other_optimizer, given)
        own = optimizer.state_dict()
        assert list(state["state"]) == list(own["state"]), (way, list(state["state"]), list(own["state"]))
        for number, values in own["state"].items():
            assert list(state["state"][number]) == list(values)
            for key, value in values.items():
                loaded = state["state"][number][key]
                if (
                    not isinstance(value, torch.Tensor)
                    or value.dim() == 0
                    or uo
                    or (which == "own" and key == "history")
                ):
                    assert equal(loaded, value), (way, number, key, loaded, value)
                else:
                    assert loaded.shape == value.shape  # padding may have other values
        other_optimizer.load_state_dict(state)
        again = FSDP.full_optim_state_dict(other, other_optimizer, rank0_only=False)
        assert_states(again, found, which != "own")  # load_state_dict() has changed dtypes
        if way == "scatter":
            fresh, fresh_optimizer = copy.deepcopy(plain), None
            fresh_optimizer = make_optimizer([p for p in fresh.parameters() if p.requires_grad])
            fresh_optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
            train(other, other_optimizer, fresh, fresh_optimizer, range(2, 4))
            if exact:
                assert_same(other, fresh)


SETTINGS = [
    *itertools.product(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1"], [False, True]),
]


@pytest.mark.sweep(8)
@pytest.mark.multiprocess
@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize(("strategy", "uo"), SETTINGS)
def test_full_states_are_the_unsharded_optimizers(strategy, uo, which):
    simulate_ranks(full_states, 2, strategy, uo, which, {})


@pytest.mark.sweep(4)
@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "LAYER_ZERO", "LAYER_ZERO_NESTED"])
def test_full_states_of_four_ranks(strategy, uo):
    simulate_ranks(full_states, 4, strategy, uo, "adam", {})


@pytest.mark.multiprocess
@pytest.mark.parametrize("atomic", ["row", torch.Tensor.numel])
def test_full_states_of_blocks(atomic):
    simulate_ranks(full_states, 2, "FULL_SHARD", True, "adam", {"atomic": atomic})


def factors(strategy, atomic):
    """Factored moments are the unsharded module's where parameters lie whole; they fit no piece."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 6), nn.Linear(6, 3))
    more = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True}
    model = FSDP(copy.deepcopy(plain), **more, **({"atomic": torch.Tensor.numel} if atomic else {}))
    plain_optimizer, optimizer = (torch.optim.Adafactor(m.parameters(), lr=0.1) for m in (plain, model))
    x = torch.randn(2, 1)
    for _ in range(2):
        for module, its in ((plain, plain_optimizer), (model, optimizer)):
            module(x).square().sum().backward()
            its.step()
            its.zero_grad()
    found = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert_states(found, names_of(plain, plain_optimizer, plain_optimizer.state_dict()))
    for other_strategy, uo, fits in (
        ("FULL_SHARD", True, True),
        ("NO_SHARD", True, True),
        ("NO_SHARD", False, False),
        ("FULL_SHARD", True, False),
    ):
        settings = {"sharding_strategy": ShardingStrategy[other_strategy], "use_orig_params": uo}
        settings |= {"atomic": torch.Tensor.numel} if fits and other_strategy != "NO_SHARD" else {}
        other = FSDP(copy.deepcopy(plain), **settings)
        other_optimizer = torch.optim.Adafactor(other.parameters(), lr=0.1)
        first = found if dist.get_rank() == 0 else None
        for load, given in ((FSDP.shard_full_optim_state_dict, found), (FSDP.scatter_full_optim_state_dict, first)):
            if not fits:
                with pytest.raises(ValueError, match=r"`\w+_var` of parameter `\d.weight` has shape .* is cut here"):
                    load(given, other, optim=other_optimizer)
                continue
            other_optimizer.load_state_dict(load(given, other, optim=other_optimizer))
            assert_states(FSDP.full_optim_state_dict(other, other_optimizer, rank0_only=False), found)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("strategy", "atomic"), [("FULL_SHARD", True), ("NO_SHARD", False)])
def test_factored_moments(strategy, atomic):
    simulate_ranks(factors, 2, strategy, atomic)


class WithAnEmptyOne(nn.Module):
    """``empty`` gets no gradient of its own, and so no step."""

    def __init__(self):
        super().__init__()
        self.empty, self.weight = nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(5))

    def forward(self, x):
        return (self.weight * x).sum()


@pytest.mark.multiprocess
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("way", ["full state", "checkpoint"])
def test_the_state_of_an_empty_parameter_says_nothing_of_a_flat_one(tmp_path, way, size):
    simulate_ranks(loads_into_a_flat_parameter, size, tmp_path / "saved", way)


def loads_into_a_flat_parameter(folder, way):
    wanted = WithAnEmptyOne()
    wanted_optimizer = torch.optim.AdamW(wanted.parameters(), lr=0.5)
    model = optimizer = None
    for step, uo in enumerate((False, True, False)):  # the flat parameter's state is the empty one's, too
        loaded = FSDP(WithAnEmptyOne(), use_orig_params=uo)
        loaded_optimizer = torch.optim.AdamW(loaded.parameters(), lr=0.5)
        if model is not None:
            move(folder, way, model, optimizer, loaded, loaded_optimizer)
        model, optimizer = loaded, loaded_optimizer
        for module, its in ((model, optimizer), (wanted, wanted_optimizer)):
            its.zero_grad()
            module(torch.arange(5.0) + step).backward()
            its.step()
    assert_same(model, wanted)


def move(folder, way, model, optimizer, loaded, loaded_optimizer):
    if way == "checkpoint":
        checkpoint.save(folder, model, optimizer, overwrite=True)
        checkpoint.load(folder, loaded, loaded_optimizer)
    else:
        loaded.load_state_dict(model.state_dict())
        state = FSDP.optim_state_dict(model, optimizer)
        loaded_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(loaded, loaded_optimizer, state))


@pytest.mark.multiprocess
@pytest.mark.parametrize("size", [2, 4])  # of four ranks some have parameters without momentum alone
@pytest.mark.parametrize("way", ["full state", "checkpoint"])
def test_a_parameter_that_was_frozen_has_no_momentum_in_a_flat_one(tmp_path, way, size):
    simulate_ranks(frozen_and_then_trained, size, tmp_path / "saved", way)


def frozen_and_then_trained(folder, way):
    wanted = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model = FSDP(copy.deepcopy(wanted), use_orig_params=True)
    loaded = FSDP(copy.deepcopy(wanted))
    of_wanted, of_model, of_loaded = (momentum(each.parameters()) for each in (wanted, model, loaded))
    for module, its in ((wanted, of_wanted), (model, of_model), (loaded, of_loaded)):
        if module is loaded:
            move(folder, way, model, of_model, loaded, of_loaded)
        trained = getattr(module, "module", module)
        for requires_grad in (True,) if module is loaded else (False,) if module is model else (False, True):
            trained[1].requires_grad_(requires_grad)
            its.zero_grad()
            module(torch.arange(3.0)).sum().backward()
            its.step()
    assert_same(loaded, wanted)


@pytest.mark.multiprocess
def test_all_ranks_load_momentum_and_gradients_of_a_flat_parameter_or_none(tmp_path):
    simulate_ranks(loads_and_saves, 4, tmp_path / "saved")


def loads_and_saves(folder):
    """The first layer alone has gradients and momentum; some ranks' shards have no element of it."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model, loaded = FSDP(copy.deepcopy(module), use_orig_params=True), FSDP(copy.deepcopy(module))
    optimizer, its = momentum(model.parameters()), momentum(loaded.parameters())
    model.module[1].requires_grad_(False)
    for _ in range(2):
        model(torch.arange(3.0)).sum().backward()
        optimizer.step()
    checkpoint.save(folder, model, optimizer)
    checkpoint.load(folder, loaded, its)
    assert [state["momentum_buffer"] is not None for state in its.state.values()] == [True]
    FSDP.optim_state_dict(loaded, its)
    checkpoint.save(folder.with_name("again"), loaded, its)
