"""Modules on the meta device get other objects when they are filled: ties and ignored parameters stay.

Promises:
- a model on the meta device keeps its ties, and its ignored parameters with their values, in each way of filling it
"""

import pytest
import torch
from gloo import fake_world
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp import defer_init


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.embed.register_buffer("scale", torch.ones(3))
        self.head.register_buffer("scale", self.embed.scale)

    def forward(self, x):
        return self.head(self.embed(x)) * self.head.scale.sum()


def by_hand(module):
    module.to_empty(device="cpu", recurse=False)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    if "scale" in module._buffers:
        module.scale.fill_(2.0)


@pytest.mark.parametrize("fill", [None, by_hand, defer_init])
@pytest.mark.parametrize("uo", [False, True])
def test_ties_stay(fill, uo):
    with fake_world(2):
        with torch.device("meta"):
            net = Tied()
        model = FSDP(net, param_init_fn=fill, use_orig_params=uo)
        assert len(list(model.parameters())) == 1
        assert sum(param.numel() for param in model.parameters()) == 10  # half of one
        assert net.head.scale is net.embed.scale
        assert not net.head.scale.is_meta
        with FSDP.summon_full_params(model):
            assert net.head.weight.data_ptr() == net.embed.weight.data_ptr()
        if fill is not defer_init:
            model(torch.tensor([1, 2])).sum().backward()
            assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("fill", [None, by_hand, defer_init])
@pytest.mark.parametrize("uo", [False, True])
def test_ignored_parameters_with_values_keep_them(fill, uo):
    with fake_world(2):
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(4, 4))
        net[0].bias = bias = nn.Parameter(torch.arange(4.0))
        model = FSDP(net, ignored_states=[bias], param_init_fn=fill, use_orig_params=uo)
        assert net[0].bias is bias
        assert torch.equal(bias, torch.arange(4.0))
        assert sum(param.numel() for param in model.parameters() if param is not bias) == 8
        if fill is not defer_init:
            model(torch.ones(2, 4)).sum().backward()
            assert torch.equal(bias.grad, torch.full((4,), 2.0))


@pytest.mark.parametrize("fill", [None, by_hand])
def test_ignored_parameters_on_the_meta_device_stay_ignored(fill):
    with fake_world(2):
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(4, 4))
        model = FSDP(net, ignored_states=[net[0].bias], param_init_fn=fill)
        names = {name: param.shape.numel() for name, param in model.named_parameters()}
        assert names == {"_fsdp_wrapped_module._flat_param": 8, "_fsdp_wrapped_module.0.bias": 4}
        model(torch.ones(2, 4)).sum().backward()
        assert torch.equal(net[0].bias.grad, torch.full((4,), 2.0))
