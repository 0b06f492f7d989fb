"""LayerZeRO's handle, with the names and signatures of MindSpeed's, for who drives units without a wrapper.

A LayerZero model that is wrapped: ``flatparam.FullyShardedDataParallel`` with ``ShardingStrategy.LAYER_ZERO``.
"""

from ..common.torch_private import FlatParameter, FlatParamShardMetadata, ParamInfo, SharedParamInfo
from ._freshness import agree
from .handle import FlatParamHandle
from .metadata import ShardParamInfo
from .metadata import ShardParamInfo as _ShardParamInfo
from .states import HandleTrainingState

__all__ = [
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "HandleTrainingState",
    "ParamInfo",
    "ShardParamInfo",
    "SharedParamInfo",
    "_ShardParamInfo",
    "agree",
]
