# ruff: noqa: F401
"""What the package gives: imported with the first of its names that is asked for."""

from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from ._C import ShardError
from .common.layout import FlatLayout
from .common.torch_private import (
    FlatParameter,
    FlatParamShardMetadata,
    HandleShardingStrategy,
    ParamInfo,
    SharedParamInfo,
)
from .dropin.handle import FlatParamHandle
from .dropin.install import install, is_installed, uninstall
from .fsdp import (
    FLAT_PARAM,
    FSDP_PREFIX,
    FSDP_WRAPPED_MODULE,
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    HandleTrainingState,
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
    TrainingState_,
    clean_tensor_name,
    defer_init,
    load_safetensors,
    p_assert,
)
