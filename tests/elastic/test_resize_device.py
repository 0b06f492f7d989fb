"""``elastic.resize`` of models on the simulated device. tests/gpu has more, which a real GPU runs, too.

Promises:
- a moved model trains as one that is saved and loaded, whichever streams of the device are late, and with memory that
  is registered with the new groups: `test_whichever_streams_are_late`
- a world without collectives for the device, and ranks with other devices, are refused by name:
  `test_other_devices_are_refused_by_name`
"""

import pathlib

import accelerator
import pytest
import torch.distributed as dist
from gloo import run_ranks

from flatparam import CPUOffload, ShardingStrategy, elastic
from flatparam.checkpoint import CheckpointError
from flatparam.fsdp.errors import StateError
from tests.gpu import bodies

pytestmark = pytest.mark.multiprocess

WAYS = ({}, {"cpu_offload": CPUOffload(True)}, {"sharding_strategy": ShardingStrategy.ZERO_1})


def late(library, folder):
    here = accelerator.use(library)
    here.module.late("computing")
    here.module.registers(2)
    accelerator.new_world(here, on_host=True)
    for number, way in enumerate(WAYS):
        here.module.operations()
        bodies.moved(here.device, pathlib.Path(folder, str(number)), **way)
        assert here.module.operations()["simulated::registered"]


def test_whichever_streams_are_late(tmp_path):
    run_ranks(late, 3, accelerator.build(), str(tmp_path), environment={"FLATPARAM_REGISTERED": "1"})


def refused(library):
    here = accelerator.use(library)
    model, optimizer = bodies.adam_of(here.device, here.new_group())
    with pytest.raises(StateError, match=r"is on sim:0, and the world has no collectives for it: give .* not cpu:gloo"):
        elastic.resize(model, optimizer, [0])
    bodies.steps_of(model, optimizer, here.device, 0)
    accelerator.new_world(here, on_host=True)
    both = [bodies.adam_of(device, None) for device in (here.device, bodies.CPU)]
    model, optimizer = both[dist.get_rank()]
    with pytest.raises(CheckpointError, match=r"rank 1 has units of the strategies .*_SHARD on cpu', .* on sim'"):
        elastic.resize(model, optimizer, [0])


def test_other_devices_are_refused_by_name():
    run_ranks(refused, 2, accelerator.build())
