"""LayerZero's handle: wrong arguments on one rank raise on all; its shard's metadata; no late conversion."""

import time

import pytest
import torch
import torch.distributed as dist
from gloo import fake_world, run_ranks
from torch import nn

from flatparam.layer_zero import FlatParamHandle, FlatParamShardMetadata

WRONG = {
    "dtype": ({"mp_param_dtype": "float"}, "mp_param_dtype"),
    "parameter": ({"params": [3]}, r"params\[0\]"),
    "device": ({"device": "nowhere"}, "nowhere"),
}


def make(module, **given):
    group = dist.group.WORLD
    arguments = {"params": list(module.parameters()), "device": torch.device("cpu"), "mp_param_dtype": None, **given}
    params, device, dtype = arguments["params"], arguments["device"], arguments["mp_param_dtype"]
    return FlatParamHandle(params, module, device, dtype, None, group, group)


def wrong_on_the_second_rank():
    found = {}
    for name, (given, said) in WRONG.items():
        begin = time.monotonic()
        with pytest.raises((ValueError, TypeError, RuntimeError), match=said):
            make(nn.Linear(2, 2), **(given if dist.get_rank() == 1 else {}))
        found[name] = time.monotonic() - begin < 10.0
    return found


@pytest.mark.multiprocess
def test_what_one_rank_is_given_wrong_is_told_to_all_at_once():
    for found in run_ranks(wrong_on_the_second_rank, 2):
        assert found == dict.fromkeys(WRONG, True)


@pytest.mark.parametrize("rank", [0, 1])
def test_metadata_say_what_the_shard_holds_in_four_fields(rank):
    with fake_world(2, rank):
        module = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))  # 12 and 8 elements
        handle = make(module)
        handle.shard()
        names, sizes = ("0.weight", "1.weight"), (torch.Size([4, 3]), torch.Size([2, 4]))
        first = FlatParamShardMetadata(names[:1], sizes[:1], (12,), ((0, 9),))
        second = FlatParamShardMetadata(names, sizes, (12, 8), ((10, 11), (0, 7)))
        assert handle.shard_metadata() == (first, second)[rank]


def test_a_shard_is_not_converted_apart_from_its_master():
    with fake_world(2):
        module = nn.Linear(4, 4)
        handle = make(module)
        handle.shard()
        with pytest.raises(RuntimeError, match="sharded already: move or convert the module before"):
            handle.flat_param_to(torch.float64)
        assert module.weight.dtype == handle.flat_param.dtype == torch.float32
