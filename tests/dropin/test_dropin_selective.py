"""Selective activation checkpoints around units of torch's FSDP: a gather that they keep is gathered again."""

import itertools

import pytest
import torch
from dropin_models import Block
from gloo import handle_of, note
from pairs import cover
from selective import KEPT, kept
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

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


CASES = list(
    itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), (False, True), PRECISIONS, (False, True), KEPT)
)


def with_and_without(cases):
    wanted = {}
    with handle_of("flatparam"):
        for case in cases:
            note(case)
            strategy, uo, precision, offload, part = case
            arguments = {
                "sharding_strategy": ShardingStrategy[strategy],
                "use_orig_params": uo,
                "mixed_precision": PRECISIONS[precision],
                "cpu_offload": CPUOffload(offload),
            }
            if case[:-1] not in wanted:
                wanted[case[:-1]] = losses(None, **arguments)
            assert losses(KEPT[part], **arguments) == wanted[case[:-1]], case


def test_what_is_kept_trains_as_without():
    cases = cover(CASES)
    assert len(cases) >= 9
    simulate_ranks(with_and_without, 2, cases)


@pytest.mark.thorough
def test_what_is_kept_trains_as_without_in_all_settings():
    simulate_ranks(with_and_without, 2, CASES)
