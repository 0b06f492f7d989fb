"""Buffers, modules and data that a program exchanges between steps: as in the unsharded module, or refused by name.

Promises:
- weights of several units that exchange their data, in pairs and in a ring, have each other's values; data that are
  kept through a module come back: `test_weights_exchange_their_data`
- data that weights get or exchange between backward and the optimizer's step are stepped:
  `test_data_are_stepped_that_come_between_backward_and_step`
- data of a weight that is sharded are refused for another weight, which is named: `test_data_of_a_sharded_weight`
- a weight that a forward swaps with another tensor, whose gradient nobody would reduce, is refused by name, and the
  weights are as before: `test_a_weight_is_swapped_in_a_forward`
- a module with parameters of one unit is refused in another one, by name; whole units may move:
  `test_modules_stay_in_their_unit`
- a buffer, parameter or module that a program sets on a wrapper replaces that of the wrapped module, whose forward uses
  it, and so does a buffer given to `functional_call`: `test_what_is_set_on_the_wrapper_is_set_in_the_module`,
  `test_a_wrapper_around_a_unit_passes_it_on`
- a part that a subclass of the wrapper sets does not replace the wrapped module's, and setting an attribute calls no
  property of the wrapped module: `test_what_others_mean_by_a_name_stays_theirs`
"""

import copy

import pytest
import torch
from fsdp_models import every_setting
from gloo import fake_world
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy

pytestmark = pytest.mark.multiprocess

X = torch.linspace(-1.0, 1.0, 12).view(3, 4)


class Layer(nn.Module):
    """A unit of two parameters."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh()


class Net(nn.Module):
    """Three units, and a parameter and buffers of the root's own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer(), Layer())
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 2)
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("mask", None)
        self.bias = None

    def forward(self, x):
        x = self.layers(x * self.scale + self.shift)
        x = x if self.bias is None else x + self.bias
        return self.head(x if self.mask is None else x * self.mask)


def alone(module):
    return module


def pair(strategy, uo, within=alone):
    """``within``: may put another wrapper between the model and its module."""
    torch.manual_seed(0)
    module = Net()
    model = FSDP(
        within(copy.deepcopy(module)),
        auto_wrap_policy={Layer},
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=uo,
    )
    return module, model


def train(module, model):
    """A step of both on the same data: the outputs and states are equal in every bit."""
    outputs = [m(X) for m in (module, model)]
    assert torch.equal(*outputs)
    for m, output in zip((module, model), outputs, strict=True):
        output.square().sum().backward()
        torch.optim.SGD(m.parameters(), lr=0.1).step()
        m.zero_grad()
    wanted, state = module.state_dict(), model.state_dict()
    assert wanted.keys() == state.keys()
    for name, value in wanted.items():
        assert torch.equal(value, state[name]), name


def addresses(model):
    return [flat_param.flat.data_ptr() for unit in FSDP.fsdp_modules(model) for flat_param in unit._unit.flat_params]


def exchange_data(strategy, uo):
    module, model = pair(strategy, uo)
    for ring in ((0, 1), (0, 1, 2)):
        train(module, model)
        for m in (module, model):
            weights = [m.layers[i].linear.weight for i in ring]
            data = [weight.data for weight in weights]
            for weight, new in zip(weights, data[1:] + data[:1], strict=True):
                weight.data = new
    train(module, model)
    for _ in range(2):  # the second time, too
        kept = [m.layers[0].linear.weight.data for m in (module, model)]
        for m in (module, model):
            m.layers[0].linear.weight.data = torch.ones(4, 4)
        train(module, model)
        for m, data in zip((module, model), kept, strict=True):
            m.layers[0].linear.weight.data = data
        train(module, model)
    kept, data, weights, new = [], [], [], None
    for value in (0.5, 0.25):
        places = addresses(model)
        for m in (module, model):
            m.layers[1].linear.weight.data = torch.full((4, 4), value)
        with torch.no_grad():
            assert torch.equal(module(X), model(X))
    assert addresses(model) == places
    train(module, model)
    for unit in FSDP.fsdp_modules(model):
        for flat_param in unit._unit.flat_params:
            assert flat_param.flat._local_shard.data_ptr() == flat_param.flat.data_ptr()


@pytest.mark.parametrize(("strategy", "uo"), [("NO_SHARD", False), ("NO_SHARD", True)])
def test_weights_exchange_their_data(strategy, uo):
    simulate_ranks(exchange_data, 2, strategy, uo)


def change_before_step(strategy, uo, indices):
    """``indices``: the layers that have the data of the others, in this order, after backward and before the step."""
    pairs, held = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in pair(strategy, uo)], []
    for step in range(4):
        for m, optimizer in pairs:
            m(X).square().sum().backward()
            weights = [m.layers[i].linear.weight for i in range(3)]
            held = [weight.data if indices else torch.full((4, 4), 0.5 + step) for weight in weights]
            for weight, i in zip(weights, indices or (2, 1, 0), strict=True):
                weight.data = held[i]
            optimizer.step()
            optimizer.zero_grad()
        (module, _), (model, _) = pairs
        assert torch.equal(module(X), model(X)), step
        wanted, state = module.state_dict(), model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in wanted.items()), step


@pytest.mark.parametrize(
    ("strategy", "uo", "indices"),
    [*(("NO_SHARD", uo, indices) for uo in (False, True) for indices in ((2, 1, 0), ())), ("ZERO_1", False, ())],
)
def test_data_are_stepped_that_come_between_backward_and_step(strategy, uo, indices):
    simulate_ranks(change_before_step, 2, strategy, uo, indices)


def test_data_of_a_sharded_weight():
    with fake_world(2):
        _, model = pair("FULL_SHARD", False)
        before = model.layers[1].linear.weight.shape
        model.layers[0].linear.weight.data = model.layers[1].linear.weight.data
        with pytest.raises(ValueError, match=r"`layers.0`: the new data of parameter `weight` of a .* are sharded"):
            model(X)
        assert model.layers[0].linear.weight.shape == before


def swap_in_forward(strategy, uo):
    module, model = pair(strategy, uo)
    train(module, model)

    def swap(linear, _):
        torch.utils.swap_tensors(linear.weight, nn.Parameter(linear.weight.detach() * 2))

    for recorded in (True, False):
        hook = model.layers[1].linear.register_forward_pre_hook(swap)
        with (
            torch.set_grad_enabled(recorded),
            pytest.raises(ValueError, match=r"`layers.1`: the new data of parameter `weight` of a .*swap_tensors"),
        ):
            model(X)
        hook.remove()
        train(module, model)  # nothing has changed


@every_setting
def test_a_weight_is_swapped_in_a_forward(strategy, uo):
    simulate_ranks(swap_in_forward, 2, strategy, uo)


def move_modules(strategy, uo):
    module, model = pair(strategy, uo)
    first, second = (model.layers[i].module for i in range(2))
    moves = [
        ("`linear.weight` of the unit of Layer", lambda: setattr(first, "linear", second.linear)),
        ("`head.weight` of the unit of Net", lambda: first.add_module("more", nn.Sequential(nn.Tanh(), model.head))),
        ("`linear.weight` of the unit of Layer", lambda: model.layers.insert(0, first)),
    ]
    for text, move in moves:
        with pytest.raises(ValueError, match=f"{text}.* cannot be moved into the unit of"):
            move()
    train(module, model)  # nothing has changed
    for m in (module, model):  # a module of the same unit, and a whole unit
        m.layers[0].linear, m.layers[1] = m.layers[0].linear, m.layers[2]
    with torch.no_grad():
        assert torch.equal(module(X), model(X))


@every_setting
def test_modules_stay_in_their_unit(strategy, uo):
    simulate_ranks(move_modules, 2, strategy, uo)


def set_on_wrapper(strategy, uo, within):
    module, model = pair(strategy, uo, within)
    train(module, model)
    for m in (module, model):
        m.shift = torch.full((4,), 0.5)
        m.mask = torch.tensor([1.0, 0.0, 1.0, 2.0])
        m.bias = torch.full((4,), 0.25)
    train(module, model)
    for m in (module, model):
        m.layers = nn.Sequential(*reversed(m.layers))  # the same units in another order
    train(module, model)
    assert torch.equal(*(functional_call(m, {"shift": torch.ones(4)}, (X,)) for m in (module, model)))
    train(module, model)
    with pytest.raises((TypeError, ValueError), match="scale"):
        functional_call(model, {"scale": torch.ones(4)}, (X,))
    train(module, model)
    with torch.no_grad():
        for m in (module, model):
            m.scale = nn.Parameter(torch.full((4,), 2.0))
            m.head = nn.Identity()
            m.note = nn.Identity()  # the wrapped module has none: the wrapper's own
    assert torch.equal(module(X), model(X))
    assert "note" in model._modules
    assert "note" not in getattr(model.module, "_checkpoint_wrapped_module", model.module)._modules
    with pytest.raises(ValueError, match=r"`head.weight` was added"):
        model.head = nn.Linear(4, 2)
    for name in ("mask", "bias", "note"):
        delattr(model, name)
        assert not hasattr(model, name)


@pytest.mark.parametrize("within", [alone, checkpoint_wrapper])
@every_setting
def test_what_is_set_on_the_wrapper_is_set_in_the_module(strategy, uo, within):
    simulate_ranks(set_on_wrapper, 2, strategy, uo, within)


def test_a_wrapper_around_a_unit_passes_it_on():
    with fake_world(2):
        unit = FSDP(Net())
        model = FSDP(checkpoint_wrapper(unit))
        model.mask = torch.tensor([1.0, 0.0, 1.0, 2.0])
        assert unit.module.mask is model.mask
        del model.mask
        assert not hasattr(unit.module, "mask")


class Dressed(FSDP):
    """A subclass with a part of its own, which has a name of the wrapped module's, too."""

    def __init__(self, module):
        super().__init__(module)
        self.head = nn.Identity()


class Lazy(Net):
    @property
    def loss(self):
        raise RuntimeError("there is none yet")


def test_what_others_mean_by_a_name_stays_theirs():
    with fake_world(2):
        model = Dressed(Net())
        assert isinstance(model.head, nn.Identity)
        assert isinstance(model.module.head, nn.Linear)
        model = FSDP(Lazy())
        model.loss = None
        assert model.loss is None
