"""The drop-in takes over parameters and gradients that are given other places in their present memory.

``p.data = p.data.t()`` and two parameters that exchange their data leave the storage as it was, which is all that
torch's handle compares: it loses both. Oracle: the unsharded module.
"""

import copy
import functools

import pytest
import torch
from gloo import fake_world, handle_of
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

pytestmark = pytest.mark.filterwarnings(
    r"ignore:(The `NO_SHARD`|FSDP is switching|When using ``NO_SHARD|grad and param)"
)
# A transposed weight is multiplied in another order unsharded, where it keeps its strides
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def transpose(a, b):
    a.data = a.data.t()


def exchange(a, b):
    a.data, b.data = b.data, a.data


def exchange_and_transpose(a, b):
    a.data, b.data = b.data.t(), a.data


def exchange_gradients(a, b):
    a.grad, b.grad = b.grad, a.grad


def transpose_gradient(a, b):
    a.grad = a.grad.t()


CHANGES = (transpose, exchange, exchange_and_transpose, exchange_gradients, transpose_gradient)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)).double()


def wrap(module, strategy):
    return FullyShardedDataParallel(
        module, sharding_strategy=ShardingStrategy[strategy], use_orig_params=True, device_id=torch.device("cpu")
    )


def assert_same(model, plain):
    for name, parameter in plain.named_parameters():
        assert_close(model.get_parameter(name), parameter)


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_lie_elsewhere_in_their_own_memory(change):
    x = torch.randn(2, 4, dtype=torch.double)
    with fake_world(), handle_of("flatparam"):
        plain, model = make(), wrap(make(), "NO_SHARD")
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (plain, model)]
        for _ in range(3):
            for module in (plain, model):
                module(x).square().sum().backward()
                weights = [module.get_parameter(name) for name in ("0.weight", "2.weight")]
                change(*weights)
                if "gradient" in change.__name__:
                    module(x).square().sum().backward()  # adds to them
            copied, stated = copy.deepcopy(model), model.state_dict()
            assert_same(copied, plain)
            for name, value in plain.state_dict().items():
                assert_close(stated[name], value)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_close(model(x), plain(x))
            assert_same(model, plain)


def test_a_place_that_changes_between_forward_and_backward_is_refused():
    with fake_world(2), handle_of("flatparam"):
        model = wrap(make(), "SHARD_GRAD_OP")
        loss = model(torch.randn(2, 4, dtype=torch.double)).sum()
        transpose(model.module[0].weight, None)
        with pytest.raises(AssertionError, match=r"changing the parameters between forward and backward.*0\.weight"):
            loss.backward()
