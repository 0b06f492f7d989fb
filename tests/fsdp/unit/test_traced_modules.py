"""flatparam.traced: modules that keep their parameters elsewhere too, and whole states in which modules have a say.

The oracle is the plain module, with the mean over the ranks of its losses.

Promises:
- `flatparam.traced`: recurrent layers, and graph breaks in a unit, train as the plain module; nothing is left of whole
  parameters after `shard()` or a forward, even one that raises, so the model can be copied
- `flatparam.traced` refuses by name a module that keeps a parameter in another attribute; a parameter that is kept
  where it is not found is empty
- whole states of `flatparam.traced` are those of the plain module, with extra states, hooks, overrides and versions,
  and load into it; a load that fails changes nothing
"""

import copy
import functools
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from fsdp_models import Block, Model, data, make
from gloo import fake_world, run_ranks
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam import traced

pytestmark = pytest.mark.multiprocess
POLICY = ModuleWrapPolicy({Block})


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.out = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        found = self.rnn(x.unsqueeze(1))[0].squeeze(1)
        if x.isnan().any():
            raise ArithmeticError("not a number")
        return self.out(found)


class Broken(Model):
    """torch.compile cannot trace its forward as one graph."""

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(self.blocks[0](x))


def train(model, ranks):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        sum(model(data(step, rank)).square().mean() / len(ranks) for rank in ranks).backward()
        optimizer.step()


def assert_same(model, plain):
    state, wanted = traced.full_state_dict(model), plain.state_dict()
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, msg=name)


MADE = {kind.__name__: functools.partial(make, cls=Recurrent, kind=kind) for kind in (nn.LSTM, nn.GRU, nn.RNN)}
MADE["broken"] = functools.partial(make, cls=Broken)


def train_eager_and_compiled():
    for name, made in MADE.items():
        plain = made()
        train(plain, range(2))
        for compiled in (False, True) if name in ("LSTM", "broken") else (False,):  # the compiler treats RNNs alike
            model = traced.shard(made(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
            train(torch.compile(model, backend="aot_eager") if compiled else model, [torch.distributed.get_rank()])
            assert_same(model, plain)
            assert torch.equal(copy.deepcopy(model)(data(0)), model(data(0)))
            if name != "broken":
                assert set(model.rnn._flat_weights) == {None}


def test_recurrent_layers_and_graph_breaks_in_a_unit_train_as_the_plain_module():
    run_ranks(train_eager_and_compiled, 2)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_nothing_is_left_of_whole_parameters_of_recurrent_layers(kind):
    with fake_world():
        module = make(cls=Recurrent, kind=kind)
        params = [weakref.ref(param) for param in module.parameters()]
        model = traced.shard(module)
        gc.collect()
        assert [param() for param in params] == [None] * len(params)
        with torch.no_grad():
            model(data(0))
        with pytest.raises(ArithmeticError):
            model(data(0) * torch.nan)
        traced.load_full_state_dict(model, traced.full_state_dict(model))
        assert set(module.rnn._flat_weights) == {None}
        assert "(rnn): " + repr(module.rnn) in repr(model)
        copy.deepcopy(model).double()(data(0).double())


def in_a_list(module):
    module.blocks[1].kept = [module.first.weight]
    return "`blocks.1.kept` keeps the parameter `first.weight`"


def in_a_dict(module):
    module.kept = {"of": [None, {"it": module.blocks[0].scale}]}
    return "`kept` keeps the parameter `blocks.0.scale`"


def in_an_attribute(module):
    vars(module.last)["kept"] = module.last.weight
    return "`last.kept` keeps the parameter `last.weight`"


def in_an_optimizer(module):
    module.optimizer = torch.optim.SGD(module.blocks[2].parameters(), lr=0.1)
    return "`optimizer` keeps the parameter `blocks.2.scale`"


def in_an_object(module):
    module.kept = SimpleNamespace(call=functools.partial(torch.add, module.first.bias))
    return "`kept` keeps the parameter `first.bias`"


@pytest.mark.parametrize("keep", [in_a_list, in_a_dict, in_an_attribute, in_an_optimizer, in_an_object])
def test_a_parameter_that_another_attribute_keeps_is_named_before_anything_is_changed(keep):
    with fake_world():
        module = make()
        message = keep(module)
        before = dict(module.named_parameters())
        with pytest.raises(ValueError, match=message):
            traced.shard(module, auto_wrap_policy=POLICY)
        assert dict(module.named_parameters()) == before


def test_a_parameter_that_is_kept_where_it_is_not_found_is_empty():
    with fake_world():
        module = make()
        weight = module.first.weight
        values = weight.detach().clone()
        state = module.state_dict()
        model = traced.shard(module)
        assert weight.shape == (0,)
        assert torch.equal(state["first.weight"], values)
        assert torch.equal(traced.full_state_dict(model)["first.weight"], values)


class Told(Block):
    """With an extra state that is no tensor, and that reads a parameter, and another version."""

    _version = 3

    def __init__(self, width):
        super().__init__(width)
        self.told, self.found = {"by": torch.zeros(2)}, None
        self.register_buffer("seen", torch.zeros(2))

    def get_extra_state(self):
        return {**self.told, "scale": self.scale.detach()}

    def set_extra_state(self, state):
        if state is None:
            raise ArithmeticError("no state")
        self.told = {"by": state["by"]}
        assert torch.equal(self.scale, state["scale"])


class Renamed(Told):
    """Its state dict has other names, values and one entry more; without that, a load leaves the scale as it is."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "doubled"] = 2 * destination.pop(prefix + "scale")

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        self.found = metadata.get("version")
        doubled = state.pop(prefix + "doubled", None)
        state[prefix + "scale"] = self.scale.detach() if doubled is None else doubled / 2
        super()._load_from_state_dict(state, prefix, metadata, *args)
        del state[prefix + "scale"]


class Hooked(Model):
    """Its hooks give the parameters of its blocks another prefix; ``last`` shares its weight with ``again``."""

    def __init__(self, block):
        super().__init__()
        self.blocks[1] = block(5)
        self.again = nn.Linear(5, 1)
        self.again.weight = self.last.weight
        if block is Renamed:
            self.register_state_dict_post_hook(self.rename)
            self.register_load_state_dict_pre_hook(self.rename_back)

    @staticmethod
    def rename(module, state, prefix, metadata):
        for name in [name for name in state if name.startswith(prefix + "blocks.")]:
            state[name.replace("blocks.", "layers.")] = state.pop(name)

    @staticmethod
    def rename_back(module, state, prefix, *args):
        for name in [name for name in state if name.startswith(prefix + "layers.")]:
            state[name.replace("layers.", "blocks.")] = state.pop(name)


def everything(module):
    state = {**module.state_dict(), "found": module.blocks[1].found}
    return repr({name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in state.items()})


def save_and_load(block):
    module = make(cls=Hooked, block=block)
    module.blocks[1].told["by"] += 1
    plain = copy.deepcopy(module)
    model = traced.shard(module, auto_wrap_policy=POLICY)
    state, wanted = traced.full_state_dict(model), plain.state_dict()
    assert list(state) == list(wanted)
    assert state._metadata == wanted._metadata
    kept = everything(plain)

    module.blocks[1].told["by"] += 1  # values are clones
    other = make(cls=Hooked, block=block, seed=1)
    other.load_state_dict(state)
    for back in (traced.full_state_dict(model), plain.state_dict()):
        traced.load_full_state_dict(model, back)
    assert everything(other).replace("'found': 3", "'found': None") == kept
    sharded = traced.shard(make(cls=Hooked, block=block, seed=2), auto_wrap_policy=POLICY)
    traced.load_full_state_dict(sharded, state)
    assert torch.equal(sharded(data(0)), plain(data(0)))
    assert sharded.blocks[1].found == (3 if block is Renamed else None)
    last = make(cls=Hooked, block=block, seed=3)
    last.load_state_dict(traced.full_state_dict(sharded))
    assert everything(last).replace("'found': 3", "'found': None") == kept
    assert len({value.data_ptr() for value in state.values() if torch.is_tensor(value)}) == len(state) - 1

    prefix = "layers.1." if block is Renamed else "blocks.1."
    names = [name for name, _ in model.named_parameters()]
    for error, wrong in (
        (KeyError, {**state, "more": torch.ones(1)}),
        (KeyError, {name: value for name, value in state.items() if name != prefix + "_extra_state"}),
        (KeyError, {name: value for name, value in state.items() if name != "first.weight"}),
        (RuntimeError, {**state, "first.bias": torch.ones(6)}),
        (RuntimeError, {**state, prefix + "seen": torch.ones(6)}),
        (ArithmeticError, {**state, prefix + "_extra_state": None}),
    ):
        for name in ("first.weight", prefix + "seen", "last.weight"):
            if name in wrong:
                wrong[name] = wrong[name] + 1
        with pytest.raises(error):
            traced.load_full_state_dict(model, wrong)
        assert [name for name, _ in model.named_parameters()] == names
        assert repr(list(traced.full_state_dict(model).items())) == repr(list(wanted.items()))

    if block is Renamed:
        state = {name: value for name, value in state.items() if name != prefix + "doubled"}
        traced.load_full_state_dict(model, state)
        assert torch.equal(traced.full_state_dict(model)[prefix + "doubled"], wanted[prefix + "doubled"])


def save_and_load_both():
    for block in (Told, Renamed):
        save_and_load(block)


def test_whole_states_are_those_of_the_plain_module_with_all_that_modules_add():
    run_ranks(save_and_load_both, 2)


def test_a_load_that_fails_without_code_of_modules_changes_no_buffer():
    with fake_world():
        module = make()
        module.blocks[0].register_buffer("seen", torch.zeros(2))
        model = traced.shard(module, auto_wrap_policy=POLICY)
        state = traced.full_state_dict(model)
        before = repr(state)
        state["blocks.0.seen"] += 1
        for wrong in ({**state, "more": state["last.weight"]}, {**state, "blocks.0.seen": torch.ones(3)}):
            with pytest.raises((KeyError, RuntimeError), match=r"in no unit: \['more'\]|mismatch for blocks.0.seen"):
                traced.load_full_state_dict(model, wrong)
            assert repr(traced.full_state_dict(model)) == before
