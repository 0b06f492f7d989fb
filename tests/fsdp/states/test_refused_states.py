"""A state that is refused changes nothing, and no rank waits for one that has failed."""

import pytest
import torch
import torch.distributed as dist
from simulated_ranks import simulate_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP

pytestmark = pytest.mark.multiprocess


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.ones(2)), 1

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


def state_of_modules():
    module = FSDP(nn.Sequential(Kept(), nn.Linear(2, 2)))
    state = module.state_dict()
    state["0._extra_state"], state["1.weight"] = 9, torch.ones(5, 5)
    with pytest.raises(RuntimeError, match=r"1\.weight"):
        module.load_state_dict(state)
    assert module.module[0].count == 1


def what_cannot_be_told():
    module = FSDP(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for of_weight in ({"step": lambda: 0}, None):
        state = {"state": {"weight": of_weight}, "param_groups": []}
        with pytest.raises(ValueError, match="cannot be sent to other ranks"):
            FSDP.scatter_full_optim_state_dict(state if dist.get_rank() == 0 else None, module, optim=optimizer)


@pytest.mark.parametrize("fn", [state_of_modules, what_cannot_be_told])
def test_ranks(fn):
    simulate_ranks(fn, 2, timeout=60)
