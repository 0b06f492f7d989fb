"""A model whose process group was destroyed: calls that need no group work, others say what to do, and change nothing.

Promises:
- after `destroy_process_group()`, also with a new world after it: `test_calls_after_the_process_group`
"""

import copy
import os
import pickle
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
from gloo import ends_of_ranks, leave_world, note
from torch import nn
from torch.distributed.fsdp import StateDictType

import flatparam
from flatparam import FullyShardedDataParallel as FSDP

pytestmark = pytest.mark.multiprocess


def calls_after_the_process_group(has_new_world):
    model = FSDP(nn.Sequential(FSDP(nn.Linear(4, 4)), nn.Linear(4, 2)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    leave_world()
    if has_new_world:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = [p.detach().clone() for p in model.parameters()]

    def shards():
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            model.state_dict()

    with tempfile.TemporaryDirectory() as folder:
        for call in (
            lambda: FSDP.optim_state_dict(model, optimizer),
            lambda: flatparam.checkpoint.save(f"{folder}/saved", model, optimizer),
            lambda: model.load_state_dict({name: value + 1 for name, value in state.items()}),
            lambda: pickle.dumps(model),
            shards,
        ):
            time.sleep(0.7 * rank)  # no rank begins a collective, and leaves it when it looks after one that is late
            with pytest.raises(RuntimeError, match=r"the process group was destroyed .* wrap and load the model"):
                call()
        assert os.listdir(folder) == []
    assert all(map(torch.equal, model.parameters(), before))
    with FSDP.summon_full_params(model):
        assert torch.equal(model.module[1].weight, state["1.weight"])
    copy.deepcopy(model).double()
    model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    note("done")
    store.add("done", 1)
    while store.add("done", 0) < 2:  # what a rank has sent is lost if it ends before the other has read it
        time.sleep(0.01)
    os._exit(3)  # without the process group the rank does not end as others do


def test_calls_after_the_process_group():
    for has_new_world in (False, True):
        ends = ends_of_ranks(calls_after_the_process_group, 2, has_new_world)
        assert [(code, said) for code, _, said in ends] == [(3, "done")] * 2, ends
