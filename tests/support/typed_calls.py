"""Calls that type checkers see and nothing runs: `make lint` checks this file with mypy and pyright.

An ignored error that they do not find is an error itself, so an argument of type Any fails the checks.
"""

import functools

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy as TorchsStrategy

from flatparam import (
    CustomPolicy,
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    ShardingStrategy,
    size_based_auto_wrap_policy,
)


def taken(module: nn.Module, group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
    """What the documentation tells users to pass."""
    FullyShardedDataParallel(module, group, ShardingStrategy.ZERO_1, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    FullyShardedDataParallel(module, (group, group), "LAYER_ZERO", auto_wrap_policy={nn.Linear})
    FullyShardedDataParallel(module, (group, group, group), TorchsStrategy.FULL_SHARD, auto_wrap_policy=[nn.Linear])
    FullyShardedDataParallel(module, auto_wrap_policy=CustomPolicy(lambda inner: isinstance(inner, nn.Linear)))
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    FullyShardedDataParallel(module, auto_wrap_policy=by_size, device_mesh=mesh)


def refused(module: nn.Module, group: dist.ProcessGroup) -> None:
    """What the constructor refuses with a TypeError."""
    FullyShardedDataParallel(module, "inner")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    FullyShardedDataParallel(module, group, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    FullyShardedDataParallel(module, auto_wrap_policy=1000)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    FullyShardedDataParallel(module, device_mesh=(2, 2))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
