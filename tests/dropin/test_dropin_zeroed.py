"""Zeroed gradients stay zeroed, whatever passes with and without communication came before.

Oracle: the unsharded module. A plan is a word: s is a pass, n a pass in no_sync(), t and m are the same without the
layers of the outer unit, z is zero_grad(), u an update; p zeroes gradients of some layers of two units, as an optimizer
of a part of the model would (with original parameters only).
"""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from dropin_behaviours import Setting
from dropin_models import Block
from gloo import handle_of, note, run_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

pytestmark = pytest.mark.multiprocess


class Net(nn.Module):
    """Does without the layers of the outer unit, if asked to: no gradient comes for that unit then."""

    def __init__(self):
        super().__init__()
        self.block = Block(5)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x, whole):
        x = self.block(x)
        return self.last(torch.tanh(self.first(x))) if whole else x


PLANS = (
    "snzsusnzsu",
    "snnznsu",
    "nszsnsu",
    "snnsuznsu",
    "npsu",
    "snpsusnpnsu",
    "spnsu",
    "npnpsu",
    "smzsuzstu",
    "smmnsu",
    "suztu",
)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def differences():
    """Return for each plan and setting the largest difference to the unsharded module's parameters."""
    found = {}
    with handle_of("flatparam"):
        flags = itertools.product((True, False), repeat=3)
        for strategy, (orig, to_none, offload), plan in itertools.product(STRATEGIES, flags, PLANS):
            if "p" in plan and not orig:
                continue
            name = f"{plan} {strategy} orig={orig} to_none={to_none} offload={offload}"
            note(name)
            found[name] = difference(Setting("flatparam", strategy, orig), plan, to_none, offload)
    return found


def difference(setting, plan, to_none, offload):
    torch.manual_seed(0)
    plain = Net().double()
    model = setting.wrap(copy.deepcopy(plain), cpu_offload=CPUOffload(offload_params=offload))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for number, move in enumerate(plan):
        if move == "z":
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=to_none)
        elif move == "p":
            for layer in (plain.first, plain.block.up, model.first, model.block.up) if setting.orig else ():
                layer.zero_grad(set_to_none=to_none)
        elif move == "u":
            for optimizer in optimizers:
                optimizer.step()
        else:
            x = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
            whole = move in "sn"
            sum(plain(x[rank], whole).square().sum() / 2 for rank in range(2)).backward()
            with model.no_sync() if move in "nm" else contextlib.nullcontext():
                model(x[dist.get_rank()], whole).square().sum().backward()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.thorough
def test_zeroed_gradients_do_not_come_back():
    for found in run_ranks(differences, 2):
        assert len(found) == len(STRATEGIES) * 4 * (len(PLANS) + sum("p" not in plan for plan in PLANS))
        wrong = {name: value for name, value in found.items() if not value < 1e-9}
        assert not wrong, wrong
