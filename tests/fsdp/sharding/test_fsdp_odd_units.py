"""Units of uncommon parameters: of 64 bits, complex, frozen under autograd.grad. On two ranks.

Promises:
- norms of 64-bit and complex gradients; `autograd.grad` by inputs through frozen units
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import STRATEGIES, full_grads, have_memory
from gloo import note
from simulated_ranks import simulate_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy


def layers(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3, dtype=dtype), nn.Linear(3, 4, dtype=dtype))


def wrapped(module, strategy, uo):
    arguments = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
    module[1] = FSDP(module[1], **arguments)
    return FSDP(module, **arguments)


def inputs(dtype, rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 5, dtype=dtype, generator=generator)


def clipped():
    """The norm is that of the unsharded module in its dtype and as exact; so are the gradients afterwards."""
    dtypes = (torch.float64, torch.complex64, torch.complex128)
    for dtype, strategy, uo in itertools.product(dtypes, STRATEGIES, (False, True)):
        for norm in (2.0, 3.0, float("inf")):
            note(f"{dtype} {strategy} uo={uo} norm={norm}")
            module, model = layers(dtype), wrapped(layers(dtype), strategy, uo)
            model(inputs(dtype, dist.get_rank())).abs().square().sum().backward()
            (sum(module(inputs(dtype, rank)).abs().square().sum() for rank in range(2)) / 2).backward()
            wanted = nn.utils.clip_grad_norm_(module.parameters(), 0.1, norm)
            torch.testing.assert_close(model.clip_grad_norm_(0.1, norm), wanted)  # the dtype too
            found = full_grads(model)
            for name, param in module.named_parameters():
                torch.testing.assert_close(found[name], param.grad)


def differentiated_by_inputs():
    """autograd.grad over an input that is a leaf, through units of which all, some or no parameters are frozen."""
    for strategy, uo, frozen in itertools.product(STRATEGIES, (False, True), ((0, 1), (0,), (1,))):
        note(f"{strategy} uo={uo} frozen={frozen}")
        module, inner = layers(torch.float32), layers(torch.float32)
        for part in (module, inner):
            for i in frozen:
                part[i].requires_grad_(False)
        arguments = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
        model = FSDP(nn.Sequential(*(FSDP(layer, **arguments) for layer in inner)), **arguments)
        x = inputs(torch.float32, dist.get_rank()).requires_grad_()
        (wanted,) = torch.autograd.grad(module(x).square().sum(), x)
        for _ in range(2):
            (found,) = torch.autograd.grad(model(x).square().sum(), x)
            torch.testing.assert_close(found, wanted)
            if strategy == "FULL_SHARD":
                assert not any(any(have_memory(unit._unit.core)) for unit in model.fsdp_modules(model))
            assert model.training_state.name == "IDLE"
        x.grad = None
        model(x).square().sum().backward()
        torch.testing.assert_close(x.grad, wanted)


def odd_units():
    clipped()
    differentiated_by_inputs()


@pytest.mark.multiprocess
def test_odd_units():
    simulate_ranks(odd_units, 2)
