"""Python code fails in the middle of C: its exception is raised, no code runs with it set, nothing is half done."""

from unittest import mock

import pytest
import torch
from fsdp_models import data, loss_of, make
from gloo import fake_world, run_ranks
from hand_built import part_of, run_of, step_of
from torch import nn

from flatparam import _C, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp.unit import registry


class Interrupted(nn.Linear):
    """Its class has rules of its own for attributes, in which Ctrl-C may come."""

    interrupts = False

    def __getattr__(self, name):
        if Interrupted.interrupts and name == "weight":
            Interrupted.interrupts = False
            raise KeyboardInterrupt
        return super().__getattr__(name)


@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_an_interruption_while_it_looks_what_modules_have_is_not_lost():
    with fake_world():
        model = FSDP(Interrupted(3, 2), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
        with model.no_sync():
            model(torch.ones(1, 3)).sum().backward()
            Interrupted.interrupts = True
            with pytest.raises(KeyboardInterrupt):
                model(torch.ones(1, 3))
            model(torch.ones(1, 3)).sum().backward()


def shards_are_used():
    model = FSDP(nn.Linear(6, 4), use_orig_params=True)
    model(torch.ones(2, 6)).sum().backward()
    _C.explain_shards(mock.Mock(side_effect=KeyboardInterrupt))
    try:
        with pytest.raises(KeyboardInterrupt):
            torch.nn.functional.linear(torch.ones(1, 6), model.module.weight)
    finally:
        _C.explain_shards(registry._why_sharded)
    with pytest.raises(RuntimeError, match="weight"):
        torch.nn.functional.linear(torch.ones(1, 6), model.module.weight)


@pytest.mark.multiprocess
def test_an_interruption_while_a_shard_is_explained_is_not_lost():
    run_ranks(shards_are_used, 2)


def test_a_group_that_cannot_tell_its_rank_is_asked_for_no_more():
    group = mock.Mock()
    group.rank.side_effect = OSError("no rank")
    pieces = ((0, 4, False),)
    changes = {"shards": 2, "shard_group": (group, None, None), "stays_full": True, "pieces": pieces, "shard_numel": 4}
    part = part_of(nn.Linear(3, 2), shard=nn.Parameter(torch.arange(4.0)), **changes)
    unit = step_of(part)
    unit.join(run_of())
    with pytest.raises(OSError, match="no rank"):
        unit.pre_forward()
    assert not group.size.called


class Key(str):
    """A name that a class has, and that fails where it is looked up in a dict, once that is asked for."""

    fails = False

    def __hash__(self):
        if self.fails:
            raise OSError("no hash")
        return str.__hash__(self)


def test_a_name_that_cannot_be_looked_up():
    key = Key("name")

    class Owner:
        name = property(lambda self: None)

    class Watched(type):
        def __getattribute__(cls, name):
            key.fails = name == "name"
            return super().__getattribute__(str(name))

    own = {key: Owner.name}
    with pytest.raises(OSError, match="no hash"):
        _C.is_as_defined(Watched("Watched", (), {"name": Owner.name})(), own, ())


def test_pieces_of_which_one_does_not_fit_move_no_parameter():
    module = nn.Module()
    module.weight, module.bias = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2))
    before = [param.data_ptr() for param in module.parameters()]
    pieces = ((0, 6, False), (-1, 0, False))  # the second is outside of the shard
    unit = step_of(part_of(module, params=tuple(module.parameters()), pieces=pieces))
    with pytest.raises(ValueError, match="piece 1 is outside of the shard"):
        unit.alias_params()
    assert [param.data_ptr() for param in module.parameters()] == before


def gradients_of_other_shapes(strategy):
    model = FSDP(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True)
    loss_of(model, data(0)).backward()
    params = [param for param in model.parameters() if param.grad is not None and param.numel()]
    wrong = params[-1]
    wrong.grad = wrong.grad.clone()
    wrong.grad.resize_(wrong.numel() + 1)
    before = [(param.grad, param.grad.clone()) for param in params]
    with pytest.raises(ValueError, match=r"expected the gradient of parameter .* to have shape"):
        loss_of(model, data(1)).backward()
    for param, (grad, values) in zip(params, before, strict=True):
        assert param.grad is grad
        assert torch.equal(grad, values)


@pytest.mark.multiprocess
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_gradient_of_another_shape_changes_no_other_gradient(strategy):
    run_ranks(gradients_of_other_shapes, 2, strategy)
