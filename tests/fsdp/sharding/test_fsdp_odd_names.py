"""A name that UTF-8 cannot encode, as module names may be, is trained, saved and named as any other.

Oracle: the unsharded module. What is shown has such characters escaped.

Promises:
- names that UTF-8 cannot encode train as unsharded, in the drop-in too, and are shown escaped
"""

import re

import pytest
import torch
from fsdp_models import Averaged, assert_same, data, loss_of, make
from gloo import fake_world, handle_of
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam import _C
from flatparam import FullyShardedDataParallel as FSDP

ODD, INNER = "\ud800w", "\udc80"
SHOWN, SHOWN_INNER = r"\ud800w", r"\udc80"


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter(ODD, nn.Parameter(torch.full((3,), 1.5)))
        self.add_module(INNER, nn.Linear(3, 3))

    def forward(self, x):
        return self._modules[INNER](x * getattr(self, ODD))


def trained(orig):
    plain = make(cls=Odd)
    oracle, wrap = Averaged(plain, 2), ModuleWrapPolicy({nn.Linear})
    models = [FSDP(make(cls=Odd), use_orig_params=orig, auto_wrap_policy=wrap)]
    with handle_of("flatparam"):
        device = torch.device("cpu")
        models.append(TorchsFSDP(make(cls=Odd), use_orig_params=orig, auto_wrap_policy=wrap, device_id=device))
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, *models)]
        for step in range(3):
            oracle.backward(lambda rank: [data(step, rank)])  # noqa: B023
            for model in models:
                loss_of(model, data(step)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with TorchsFSDP.summon_full_params(models[1]):
            for name, value in plain.named_parameters():
                assert torch.equal(models[1].get_parameter(name), value)
    assert_same(models[0], plain)
    state = models[0].state_dict()
    assert list(state) == list(plain.state_dict()) == [ODD, f"{INNER}.weight", f"{INNER}.bias"]
    models[0].load_state_dict(state)
    assert_same(models[0], plain)


@pytest.mark.multiprocess
@pytest.mark.parametrize("orig", [True, False])
def test_it_trains_as_unsharded(orig):
    simulate_ranks(trained, 2, orig)


@pytest.mark.parametrize("orig", [True, False])
def test_who_uses_it_while_it_is_sharded_is_told_its_name_escaped(orig):
    with fake_world(2):
        model = FSDP(Odd(), use_orig_params=orig)
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=rf"while it is sharded.*{re.escape(SHOWN_INNER)}"):
            model.module._modules[INNER](torch.ones(2, 3))
        named = model._unit.core
        named.name = named.reason = ODD
        assert (named.name, named.reason) == (SHOWN, SHOWN)
        with pytest.raises(TypeError, match="expected the name to be a str, got int"):
            named.name = 1


def test_memory_is_freed_with_such_a_reason():
    freed = torch.ones(3)
    assert _C.free(freed, f"gone: {INNER}")
    with pytest.raises(RuntimeError, match=re.escape(f"gone: {SHOWN_INNER}")):
        freed.add_(1)
    with pytest.raises(TypeError, match="expected a str, got int"):
        _C.free(torch.ones(3), 1)
