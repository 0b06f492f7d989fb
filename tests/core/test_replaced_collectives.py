"""A user's replacement of a torch.distributed function is called, also if it was there before the import."""

import json

import forked_scripts
import pytest

pytestmark = pytest.mark.multiprocess

SCRIPT = """
import functools, json, sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

[when] = sys.argv[1:]
calls = []

def replace():
    gathers = ("all_gather_single", "all_gather_into_tensor")
    reduces = ("reduce_scatter_single", "reduce_scatter_tensor")
    for names in (gathers, ("all_gather",), reduces):
        name = next(name for name in names if hasattr(dist, name))
        def counted(*args, function=getattr(dist, name), name=name, **kwargs):
            calls.append(name.split("_")[0])
            return function(*args, **kwargs)
        setattr(dist, name, functools.wraps(getattr(dist, name))(counted))

if when == "before":
    replace()
import flatparam, flatparam._api
if when == "after":
    replace()
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

def of_the_runtime(module):
    flatparam.FullyShardedDataParallel(module)(torch.ones(2, 4)).sum().backward()

def of_the_dropin(module):
    flatparam.install()
    wrap = torch.distributed.fsdp.FullyShardedDataParallel
    wrap(module, device_id=torch.device("cpu"))(torch.ones(2, 4)).sum().backward()

def of_layer_zero(module):
    from flatparam.layer_zero import FlatParamHandle, HandleTrainingState
    group = dist.group.WORLD
    handle = FlatParamHandle(list(module.parameters()), module, torch.device("cpu"), None, None, group, group)
    handle.shard()
    handle.init_flat_param_attributes()
    handle._training_state = HandleTrainingState.FORWARD
    handle.pre_unshard()
    handle.unshard()
    handle.post_unshard()

found = {}
for use in (of_the_runtime, of_the_dropin, of_layer_zero):
    calls.clear()
    use(torch.nn.Linear(4, 4))
    found[use.__name__] = sorted(set(calls))
print(json.dumps(found))
"""


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.thorough)])
def test_a_replaced_collective_is_called(when, tmp_path):
    [done] = forked_scripts.run([(SCRIPT, [when])], tmp_path)
    assert done.status == 0, done.err
    both = ["all", "reduce"]
    assert json.loads(done.out) == {"of_the_runtime": both, "of_the_dropin": both, "of_layer_zero": ["all"]}
