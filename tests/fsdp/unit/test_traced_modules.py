"""flatparam.traced: modules that keep their parameters elsewhere too.

The oracle is the plain module, with the mean over the ranks of its losses.

Promises:
- `flatparam.traced`: recurrent layers, and graph breaks in a unit, train as the plain module; nothing is left of whole
  parameters after `shard()` or a forward, even one that raises, so the model can be copied
- `flatparam.traced` refuses by name a module that keeps a parameter in another attribute; a parameter that is kept
  where it is not found is empty
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
