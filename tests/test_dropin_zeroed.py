"""Zeroed gradients stay zeroed, whatever passes with and without communication came before.

Oracle: the unsharded module. A plan is a word: s is a pass, n a pass in no_sync(), z zero_grad(), u an update.
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

PLANS = ("snzsusnzsu", "snnznsu", "nszsnsu", "snnsuznsu")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def differences():
    """Return for each plan and setting the largest difference to the unsharded module's parameters."""
    torch.cpu.Stream.synchronize = lambda self: None  # torch's runtime calls it when offloading, and lacks it
    found = {}
    with handle_of("flatparam"):
        flags = itertools.product((True, False), repeat=3)
        for strategy, (orig, to_none, offload), plan in itertools.product(STRATEGIES, flags, PLANS):
            name = f"{plan} {strategy} orig={orig} to_none={to_none} offload={offload}"
            note(name)
            found[name] = difference(Setting("flatparam", strategy, orig), plan, to_none, offload)
    return found


def difference(setting, plan, to_none, offload):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), Block(7), nn.Tanh(), nn.Linear(7, 3)).double()
    model = setting.wrap(copy.deepcopy(plain), cpu_offload=CPUOffload(offload_params=offload))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for number, move in enumerate(plan):
        if move == "z":
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=to_none)
        elif move == "u":
            for optimizer in optimizers:
                optimizer.step()
        else:
            x = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
            sum(plain(x[rank]).square().sum() / 2 for rank in range(2)).backward()
            with model.no_sync() if move == "n" else contextlib.nullcontext():
                model(x[dist.get_rank()]).square().sum().backward()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        return max(float((a - b).detach().abs().max()) for a, b in pairs)


def test_zeroed_gradients_do_not_come_back():
    for found in run_ranks(differences, 2):
        assert len(found) == len(PLANS) * len(STRATEGIES) * 8
        wrong = {name: value for name, value in found.items() if not value < 1e-9}
        assert not wrong, wrong
