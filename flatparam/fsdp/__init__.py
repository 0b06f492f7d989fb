"""The runtime of its own: torch's FullyShardedDataParallel API on the C core, without torch's runtime."""

from .api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    HandleTrainingState,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedGradScaler,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    TrainingState,
    TrainingState_,
)
from .deferral import defer_init
from .errors import OrderError
from .fully_sharded import FullyShardedDataParallel
from .loading import load_safetensors
from .memory import MemoryPlan, UnitPlan
from .names import FLAT_PARAM, FSDP_PREFIX, FSDP_WRAPPED_MODULE, clean_tensor_name, p_assert
from .placement import Placement
from .plan import Piece

__all__ = [
    "FLAT_PARAM",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "HandleTrainingState",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MemoryPlan",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "OrderError",
    "Piece",
    "Placement",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TrainingState",
    "TrainingState_",
    "UnitPlan",
    "clean_tensor_name",
    "defer_init",
    "load_safetensors",
    "p_assert",
]
