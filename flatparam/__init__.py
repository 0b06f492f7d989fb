"""flatparam: the flat-parameter engine under sharded PyTorch training, in C."""

from . import _build_check

_build_check.check()

from torch.distributed.fsdp._flat_param import (  # noqa: E402
    FlatParameter,
    FlatParamShardMetadata,
    HandleShardingStrategy,
    ParamInfo,
    SharedParamInfo,
)

from ._C import ShardError  # noqa: E402
from .handle import FlatParamHandle  # noqa: E402
from .install import install, is_installed, uninstall  # noqa: E402
from .layout import FlatLayout  # noqa: E402

__all__ = [
    "FlatLayout",
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "HandleShardingStrategy",
    "ParamInfo",
    "ShardError",
    "SharedParamInfo",
    "install",
    "is_installed",
    "uninstall",
]
