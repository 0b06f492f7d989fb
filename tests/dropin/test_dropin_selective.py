"""Selective activation checkpoints around units of torch's FSDP: a gather that they keep is gathered again."""

import pytest
import torch
from dropin_models import Block
from gloo import note, run_ranks
from selective import KEPT, kept
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import flatparam

pytestmark = pytest.mark.multiprocess
WIDTH = 6
PRECISIONS = {"fp32": None, "bf16": MixedPrecision(torch.bfloat16, torch.bfloat16)}


class Net(nn.Module):
    """``part``: of the names of operations that are kept; None: there is no checkpoint."""

    def __init__(self, part):
        super().__init__()
        self.part = part
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.blocks(x) if self.part is None else kept(self.blocks, x, self.part))


def losses(part, **arguments):
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Net(part), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **arguments
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(4):
        loss = model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def with_and_without():
    flatparam.install()
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for uo in (False, True):
            for precision, mixed in PRECISIONS.items():
                for offload in (False, True):
                    note(f"{strategy} {uo} {precision} {offload}")
                    arguments = {
                        "sharding_strategy": ShardingStrategy[strategy],
                        "use_orig_params": uo,
                        "mixed_precision": mixed,
                        "cpu_offload": CPUOffload(offload),
                    }
                    wanted = losses(None, **arguments)
                    for part in KEPT.values():
                        assert losses(part, **arguments) == wanted, (strategy, uo, precision, offload, part)


def test_what_is_kept_trains_as_without():
    run_ranks(with_and_without, 2)
