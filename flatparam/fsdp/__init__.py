"""flatparam's runtime: torch's FullyShardedDataParallel API on the C core, without torch's runtime."""

from . import api
from .api import *  # noqa: F403
from .errors import OrderError, StateError
from .names import FLAT_PARAM, FSDP_PREFIX, FSDP_WRAPPED_MODULE, clean_tensor_name, p_assert
from .sharding.deferred import defer_init
from .sharding.placement import Placement
from .sharding.pytrees import DeviceError
from .unit.memory_plan import MemoryPlan, UnitPlan
from .unit.shard_map import Piece, ShardMap
from .wrapper.fully_sharded import FullyShardedDataParallel
from .wrapper.wrap import ModuleWrapPolicy

__all__ = ["FullyShardedDataParallel", "MemoryPlan", "OrderError", "Piece", "Placement", "ShardMap", "UnitPlan"]
__all__ += ["DeviceError", "ModuleWrapPolicy", "StateError", "defer_init"]
__all__ += ["FLAT_PARAM", "FSDP_PREFIX", "FSDP_WRAPPED_MODULE", "clean_tensor_name", "p_assert"]
__all__ += api.__all__
