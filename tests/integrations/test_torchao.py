"""torchao's optimizers of 8, 4 and fp8 bits: over shards that cut none of their blocks, beside the unsharded module.

And over flat parameters, which torch's class shards alike, beside that.
"""

import io
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from fsdp_models import Averaged, assert_same, data, loss_of, make
from gloo import note, run_ranks
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from trainers import KINDS, needs, same, under

from flatparam import FullyShardedDataParallel as FSDP

needs("torchao")
optim = pytest.importorskip("torchao.optim")

BLOCKS = {"AdamW8bit": 256, "Adam8bit": 256, "AdamW4bit": 128, "AdamWFp8": 256}


class Model(nn.Module):
    """Matrices of whole blocks, and parameters whose states stay fp32: less than 4096 elements, or no whole blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 64), nn.Linear(128, 1)
        self.middle = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Tanh(), nn.Linear(128, 128, bias=False))

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def in_whole_blocks(block):
    return lambda param: block


def step(model, optimizer, i, module=None):
    """With ``module``, its gradients are the mean of the ranks'."""
    if module is None:
        loss_of(model, data(i)).backward()
    else:
        Averaged(module, 2).backward(lambda rank: [data(i, rank)])
    optimizer.step()
    optimizer.zero_grad()


def plain(value):
    """A state as torchao reads it."""
    return value if type(value) is torch.Tensor else value.dequantize()


def as_unsharded():
    """Trained, looked at, and resumed by each rank, every optimizer is as over the unsharded module, bit for bit."""
    torch.compile = lambda function, **settings: function  # torchao compiles each step, for most of a minute
    for (name, block), whole in itertools.product(BLOCKS.items(), (False, True)):
        note(f"{name} whole={whole}")
        cls = getattr(optim, name)
        arguments = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "use_orig_params": True}
        arguments["atomic"] = torch.Tensor.numel if whole else in_whole_blocks(block)
        module, model = make(cls=Model), FSDP(make(cls=Model), **arguments)
        optimizers = [cls(m.parameters(), lr=0.01) for m in (module, model)]
        for i in range(3):
            step(module, optimizers[0], i, module)
            step(model, optimizers[1], i)
        assert_same(model, module, name)
        kinds = {type(value) for state in optimizers[1].state.values() for value in state.values()}
        assert kinds - {torch.Tensor} or (whole and dist.get_rank() == 1), "no state is of few bits"
        found = FSDP.full_optim_state_dict(model, optimizers[1], rank0_only=False)["state"]
        for key, param in module.named_parameters():
            same(found[key], {at: plain(value) for at, value in optimizers[0].state[param].items()}, key)
        saved = io.BytesIO()
        torch.save(optimizers[1].state_dict(), saved)
        saved.seek(0)
        again = FSDP(make(seed=1, cls=Model), **arguments)
        again.load_state_dict(model.state_dict())
        optimizer = cls(again.parameters(), lr=0.01)
        optimizer.load_state_dict(torch.load(saved, weights_only=True))
        for i in range(3, 6):
            step(module, optimizers[0], i, module)
            step(again, optimizer, i)
        assert_same(again, module, name)


@pytest.mark.multiprocess
def test_states_of_few_bits_are_as_unsharded():
    run_ranks(as_unsharded, 2)


def as_on_torchs_class():
    """Of flat parameters the losses of steps are those on torch's class, and on that with flatparam's handle."""
    torch.compile = lambda function, **settings: function
    for name in BLOCKS:
        runs = []
        for kind in KINDS:
            note(f"{name} {kind}")
            with under(kind):
                model = fsdp.FullyShardedDataParallel(make(cls=Model), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
            optimizer = getattr(optim, name)(model.parameters(), lr=0.01)
            losses = []
            for i in range(4):
                losses.append(loss_of(model, data(i)).item())
                step(model, optimizer, i)
            runs.append(losses)
            states = [value for state in optimizer.state.values() for value in state.values()]
            assert any(type(value) is not torch.Tensor for value in states), "no state is of few bits"
        assert runs[0] == runs[1] == runs[2]


@pytest.mark.multiprocess
def test_states_of_few_bits_are_as_on_torchs_class():
    run_ranks(as_on_torchs_class, 2)
