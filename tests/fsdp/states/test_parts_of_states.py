"""A state dict that lacks names: torch's helpers put the module's own parameters in the place of missing values.

The oracle: the unsharded module, which keeps what the state dict has not.

Promises:
- a state dict that lacks names, through those helpers: the module keeps its values; names that hooks return are
  compared over ranks, and fill
- hooks of a module around a unit that drop or rename rows of a sharded state dict, on all ranks or on one, which all
  ranks report: `test_hooks_around_a_unit_that_change_its_rows_on_one_rank_are_told_to_all`
- writes by `.data` of a module that loads by itself, which torch does not count: they are compared over ranks, and
  fill
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from gloo import note
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.fsdp import defer_init


class Tied(nn.Module):
    """Two names of one weight, and a bias that was called ``old`` in an earlier release."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)
        self.head.weight = self.embed.weight
        self.middle.register_load_state_dict_pre_hook(_rename)

    def forward(self, x):
        return self.head(self.middle(self.embed(x)))


def _rename(module, state, prefix, *args):
    if prefix + "old" in state:
        state[prefix + "bias"] = state.pop(prefix + "old")


SHAPES = {
    "middle.weight": (4, 4),
    "embed.weight": (5, 4),
    "head.weight": (5, 4),
    "middle.bias": (4,),
    "middle.old": (4,),
}
PARTS = (["middle.weight"], ["embed.weight"], ["head.weight"], ["middle.old"], ["middle.bias", "head.weight"])
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def wrapped(strategy, uo, nested):
    policy = ModuleWrapPolicy({nn.Linear}) if nested else None
    model = Tied()
    if nested:
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())  # not of two units
    return FSDP(model, sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo, auto_wrap_policy=policy)


def assert_equals(model, plain):
    found, expected = model.state_dict(), plain.state_dict()
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def parts(uo, nested):
    everything = itertools.product(STRATEGIES, (False, True), PARTS)
    for strategy, broadcast, names in everything:
        note(f"{strategy} broadcast={broadcast} {names}")
        model, plain = wrapped(strategy, uo, nested), Tied()
        if nested:
            plain.head.weight = nn.Parameter(plain.embed.weight.detach().clone())
        given = {name: torch.full(SHAPES[name], 3.0) for name in names}
        options = StateDictOptions(full_state_dict=True, strict=False, broadcast_from_rank0=broadcast)
        if broadcast and ("middle.old" in given or (not uo and "head.weight" in given)):
            continue  # the helper broadcasts names of the module alone, of flat parameters the first ones
        mine = {} if broadcast and dist.get_rank() else dict(given)
        set_model_state_dict(model, mine, options=options)
        plain.load_state_dict(given, strict=False)
        assert_equals(model, plain)
        model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.multiprocess
@pytest.mark.parametrize(("uo", "nested"), list(itertools.product([False, True], repeat=2)))
def test_parts_are_loaded_and_the_rest_is_kept(uo, nested):
    simulate_ranks(parts, 2, uo, nested)


def kept_values():
    """What counts as the module's own, and what does not."""
    for strategy, uo in itertools.product(STRATEGIES, (False, True)):
        note(f"{strategy} {uo}")
        model, plain = wrapped(strategy, uo, False), Tied()
        own = dict(model.named_parameters())
        if uo:
            assert not model.load_state_dict({name: param.detach() for name, param in own.items()}, strict=False)[1]
            assert_equals(model, plain)
            model.load_state_dict(
                {name: param for name, param in own.items() if "head.weight" not in name}, strict=False
            )
            assert_equals(model, plain)
        before = plain.state_dict()
        values = {name: value + 1.0 for name, value in before.items()}
        if dist.get_rank():  # a copy is a value, whatever it holds
            values["middle.bias"] = before["middle.bias"].clone()
        with pytest.raises(RuntimeError, match=r"`middle\.bias` differs"):
            model.load_state_dict(values)
        assert_equals(model, plain)
        values = {"middle.old": torch.full((4,), float(dist.get_rank()))}
        with pytest.raises(RuntimeError, match=r"`middle\.bias` differs"):
            model.load_state_dict(values, strict=False)
        assert_equals(model, plain)


@pytest.mark.multiprocess
def test_values_of_ones_own_are_no_change_and_others_are_compared():
    simulate_ranks(kept_values, 2)


def deferred():
    """A name that a hook gives counts as a value of a model that has none yet."""
    with torch.device("meta"):
        model = Tied()
        model.head.weight = nn.Parameter(torch.empty(5, 4))
    model = FSDP(model, use_orig_params=True, param_init_fn=defer_init)
    shapes = {**SHAPES, "head.bias": (5,)}
    model.load_state_dict({name: torch.ones(shape) for name, shape in shapes.items() if name != "middle.bias"})
    model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.multiprocess
def test_a_renamed_value_fills_a_deferred_parameter():
    simulate_ranks(deferred, 2)


class ByData(nn.Linear):
    """A module that loads by ``.data``, of whose writes torch counts none."""

    def _load_from_state_dict(self, state, prefix, *args):
        for name, param in self.named_parameters():
            param.data.copy_(state[prefix + name])


def uncounted():
    """Such writes are compared as others are, and count as loaded where ranks have begun apart."""
    rank = dist.get_rank()
    for uo in (False, True):
        torch.manual_seed(rank)
        model = FSDP(nn.Sequential(ByData(4, 4), nn.Linear(4, 2)), use_orig_params=uo)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        values = {name: torch.ones_like(value) for name, value in plain.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"`0\.weight` differs"):
            model.load_state_dict({**values, "0.weight": torch.full((4, 4), float(rank))})
        model.load_state_dict(values)
        plain.load_state_dict(values)
        assert_equals(model, plain)
        x = torch.ones(1, 4)
        assert torch.equal(model(x), plain(x))


@pytest.mark.multiprocess
def test_writes_that_torch_does_not_count_are_compared_and_fill():
    simulate_ranks(uncounted, 2)


class Around(nn.Module):
    """Its hook drops a parameter of an inner unit, or knows it by another name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_load_state_dict_pre_hook(self.change)

    @staticmethod
    def change(self, state, prefix, *args):
        if prefix + "flag" in state:
            del state[prefix + "flag"], state[prefix + "a.weight"]
        if prefix + "old" in state:
            state[prefix + "a.weight"] = state.pop(prefix + "old")

    def forward(self, x):
        return self.b(self.a(x))


def hooks_around():
    """Rows of an inner unit that a hook drops or renames on all ranks, or on one, which is told to both."""
    for uo, by_helper in itertools.product((False, True), (False, True)):
        model = Around()
        model.a = FSDP(model.a, use_orig_params=uo)
        model = FSDP(model, use_orig_params=uo)

        def load(state, model=model, by_helper=by_helper):
            if by_helper:
                set_model_state_dict(model, state, options=StateDictOptions(strict=False))
            else:
                with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                    model.load_state_dict(state, strict=False)

        saved = {name: value + 1.0 for name, value in model.state_dict().items()}
        before = model.state_dict()
        model.load_state_dict(saved)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            rows = model.state_dict()
        model.load_state_dict(before)
        old = {"old" if name == "a.weight" else name: value for name, value in rows.items()}
        none = {name: value for name, value in rows.items() if name != "a.weight"}
        flagged = {**rows, "flag": torch.ones(1)}
        for kind, (first, second) in {"dropped": (flagged, rows), "renamed": (old, none)}.items():
            note(f"{uo} {by_helper} {kind}")
            with pytest.raises(RuntimeError, match=r"`a\.weight` differs"):
                load(dict(second if dist.get_rank() else first))
            assert_state(model, before)
        load(dict(flagged))
        assert_state(model, {**saved, "a.weight": before["a.weight"]})
        load(dict(old))
        assert_state(model, saved)
        model(torch.ones(1, 3)).sum().backward()


def assert_state(model, expected):
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.multiprocess
def test_hooks_around_a_unit_that_change_its_rows_on_one_rank_are_told_to_all():
    simulate_ranks(hooks_around, 2)
