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
from .fsdp import (  # noqa: E402
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MemoryPlan,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    Placement,
    ShardedGradScaler,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    TrainingState,
    defer_init,
    load_safetensors,
)
from .handle import FlatParamHandle  # noqa: E402
from .install import install, is_installed, uninstall  # noqa: E402
from .layout import FlatLayout  # noqa: E402

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FlatLayout",
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "HandleShardingStrategy",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MemoryPlan",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ParamInfo",
    "Placement",
    "ShardError",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "SharedParamInfo",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TrainingState",
    "defer_init",
    "install",
    "is_installed",
    "load_safetensors",
    "uninstall",
]
