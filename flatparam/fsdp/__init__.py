"""flatparam's runtime: torch's FullyShardedDataParallel API on the C core, without torch's runtime."""

from . import api
from .api import *  # noqa: F403
from .errors import (
    CheckpointError,
    DeviceError,
    FileError,
    ModelTypeError,
    OrderError,
    ShardError,
    StateError,
    StoreGoneError,
    WritebackError,
)
from .names import FLAT_PARAM, FSDP_PREFIX, FSDP_WRAPPED_MODULE, clean_tensor_name, p_assert
from .sharding.deferred import defer_init
from .sharding.placement import Placement
from .unit.memory_plan import MemoryPlan, UnitPlan
from .unit.shard_map import Piece, ShardMap
from .wrapper.fully_sharded import FullyShardedDataParallel
from .wrapper.wrap import ModuleWrapPolicy

__all__ = ["FullyShardedDataParallel", "MemoryPlan", "OrderError", "Piece", "Placement", "ShardMap", "UnitPlan"]
__all__ += ["CheckpointError", "DeviceError", "FileError", "ShardError", "StateError", "StoreGoneError"]
__all__ += ["ModelTypeError", "ModuleWrapPolicy", "WritebackError", "defer_init"]
__all__ += ["FLAT_PARAM", "FSDP_PREFIX", "FSDP_WRAPPED_MODULE", "clean_tensor_name", "p_assert"]
__all__ += api.__all__
