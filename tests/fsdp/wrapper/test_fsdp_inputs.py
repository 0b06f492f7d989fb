"""Inputs and outputs of a wrapped module: containers and objects of any class, in any mode.

Promises:
- inputs in containers of any class; outputs that can be called; a first forward in inference mode
"""

import collections
import copy
import functools
import itertools

import pytest
import torch
from fsdp_models import assert_same
from gloo import fake_world, note, run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.fsdp.sharding.pytrees import find_tensors, map_tensors, move_tensors


class Named(dict):
    """As of a tokenizer: items are attributes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Tagged(dict):
    tag = "none"


class Batch(collections.UserDict):
    pass


class Rows(list):
    pass


class Pair(tuple):
    __slots__ = ()

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


class Weighted(tuple):
    weight = 1.0


def tagged(value):
    made = Tagged(x=value, y=[value])
    made.tag = "mine"
    return made


def weighted(value):
    made = Weighted((value, 1))
    made.weight = 2.0
    return made


INPUTS = {
    "attributes": lambda value: Named(x=value),
    "dict": tagged,
    "UserDict": lambda value: Batch(x={"y": value}),
    "list": lambda value: Rows([value, "text"]),
    "tuple": lambda value: Pair(value, 2),
    "tuple with state": weighted,
    "nested": lambda value: [Tagged(x=Rows([Pair(value, Batch(z=value))]))],
    "set": lambda value: {value},
    "deque": lambda value: collections.deque([value]),
    "OrderedDict": lambda value: collections.OrderedDict(x=value),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_containers_of_any_class_are_cast_and_moved(kind):
    value = torch.ones(2, 4)
    made = INPUTS[kind](value)
    cast = map_tensors(lambda tensor: tensor.to(torch.bfloat16), made)
    assert type(cast) is type(made)
    assert [tensor.dtype for tensor in find_tensors(cast)] == [torch.bfloat16] * (
        1 + (kind == "dict") + (kind == "nested")
    )
    assert find_tensors(made)[0] is value, "the caller's is changed"
    if kind == "dict":
        assert cast.tag == "mine"
    elif kind == "tuple with state":
        assert cast.weight == 2.0
    elif kind == "attributes":
        assert cast.x is cast["x"]
        assert made.x is value
    moved = move_tensors(torch.device("meta"), made, "a unit")
    assert all(tensor.is_meta for tensor in find_tensors(moved))
    assert type(moved) is type(made)
    assert move_tensors(value.device, made, "a unit") is made


class Reads(nn.Module):
    """Computes from an input of any of these classes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch):
        tensor = find_tensors(batch)[0]
        assert tensor.dtype == self.layer.weight.dtype
        return self.layer(tensor)


class Called:
    """An output that can be called too."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __call__(self):
        return self.tensor


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, tensor):
        self.inner = {"x": Called(tensor)}

    def __call__(self):
        return self.inner["x"]()


@pytest.mark.parametrize("kind", INPUTS)
def test_a_wrapped_module_is_given_its_dtype_in_any_container(kind):
    with fake_world(2):
        model = FSDP(Reads(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        model(INPUTS[kind](torch.ones(2, 4))).sum().backward()


@pytest.mark.parametrize("holder", [Called, Slotted, lambda tensor: functools.partial(print, tensor, end="")])
def test_tensors_in_outputs_that_can_be_called_are_found(holder):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return holder(self.layer(x))

    with fake_world(2):
        model = FSDP(nn.Sequential(FSDP(Outer(), use_orig_params=True)), use_orig_params=True)
        (tensor,) = find_tensors(model(torch.ones(2, 4)))
        tensor.sum().backward()
        assert any(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("orig", [True, False])
def test_a_first_forward_in_inference_mode_leaves_nothing_behind(orig):
    with fake_world(2):
        precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), mixed_precision=precision, use_orig_params=orig)
        with torch.inference_mode():
            model.eval()(torch.ones(2, 4))
            model.state_dict()
            with FSDP.summon_full_params(model):
                model(torch.ones(2, 4))
        assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
        for _ in range(2):
            model.train()(torch.ones(2, 4)).sum().backward()
        assert model.module[1].num_batches_tracked == 2


def transforms():
    for strategy, orig in itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1"), (True, False)):
        note(f"{strategy} {orig}")
        torch.manual_seed(0)
        bare = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        model = FSDP(copy.deepcopy(bare), sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig)
        x = torch.randn(5, 3)
        for _ in range(2):
            for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
                wanted, found = (transform(lambda x, one=one: one(x).square().sum())(x) for one in (bare, model))
                assert torch.equal(found, wanted), transform
            for one in (bare, model):
                one(x).sum().backward()
                torch.optim.SGD(one.parameters(), 0.1).step()
        assert_same(model, bare)


@pytest.mark.multiprocess
def test_transforms_of_inputs():
    run_ranks(transforms, 2)
