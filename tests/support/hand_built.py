"""_C.Root and _C.Unit that no model made, with one argument or another changed."""

import torch
from torch import nn

from flatparam import _C
from flatparam.fsdp.desync import torch_collectives
from flatparam.fsdp.sharding.flat_param import FlatParamSpec
from flatparam.fsdp.sharding.pytrees import find_tensors


def run_of(**changes):
    arguments = {
        "backward_prefetch": 1,
        "forward_prefetch": False,
        "collectives": torch_collectives,
        "watched": torch_collectives.WATCHED,
        "find_tensors": find_tensors,
    }
    return _C.Root(**{**arguments, **changes})


def part_of(module, **changes):
    flat = nn.Parameter(torch.arange(8.0))
    fields = {
        "entries": ((module, "weight", (2, 3), None, 0), (module, "bias", (2,), None, 6)),
        "shared": (),
        "shard": flat,
        "params": None,
        "pieces": ((0, 8, False),),
        "numel": 8,
        "shard_numel": 8,
        "rank": 0,
        "shards": 1,
        "shard_group": None,
        "replicate_group": None,
        "predivide": 1.0,
        "postdivide": 1.0,
        "compute_dtype": None,
        "reduce_dtype": None,
        "keep_reduce_dtype": False,
        "stays_full": False,
        "param_rank": 0,
        "param_shards": 1,
        "param_group": None,
        "outer_group": None,
        "offloads": False,
        "in_order": False,
        "full_precision": False,
        "device": None,
        "extension": None,
        "dress": None,
    }
    return FlatParamSpec(**{**fields, **changes})


def step_of(*parts, **changes):
    arguments = {
        "name": "unit",
        "flat_params": parts,
        "reshard_after_forward": True,
        "on_param_replaced": print,
        "reason": "freed",
    }
    return _C.Unit(**{**arguments, **changes})


def module_with(weight=None):
    module = nn.Linear(3, 2)
    if weight is not None:
        module.weight = weight
    return module
