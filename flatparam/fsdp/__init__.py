"""The runtime of its own: torch's FullyShardedDataParallel API on the C core, without torch's runtime."""

from .api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
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
)
from .deferral import defer_init
from .fully_sharded import FullyShardedDataParallel
from .loading import load_safetensors
from .order import OrderError
from .placement import Placement
from .plan import MemoryPlan, Piece, UnitPlan

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
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
    "UnitPlan",
    "defer_init",
    "load_safetensors",
]
