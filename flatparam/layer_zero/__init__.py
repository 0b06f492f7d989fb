"""LayerZero's handle, with the names and signatures of MindSpeed's LayerZeRO, for code that drives units itself.

To wrap a model use ``flatparam.FullyShardedDataParallel`` with ``ShardingStrategy.LAYER_ZERO`` instead. The handle is
one class in parts, each a base of the next: `_base.py`, `_sums.py`, `_parameters.py`, `_gradients.py`, `handle.py`. It
drives the runtime's unit without hooks: `csrc/runtime/fp_unit_by_hand.c`.
"""

# ruff: noqa: F401  # all names of the reference's module, private ones too

import torch.distributed as dist

from ..common.torch_private import (
    _FLAT_PARAM_PADDING_VALUE,
    _FSDP_USE_UNSAFE_SETATTR,
    FlatParameter,
    HandleShardingStrategy,
    ParamInfo,
    SharedParamInfo,
    _construct_padding_tensor,
    _convert_to_params,
    _detach_if_needed,
    _FlatParameterMeta,
    _get_aligned_numel,
    _get_dtype_size,
    _safe_setattr_tensor_or_param,
    _unsafe_setattr_param,
    _unsafe_setattr_tensor,
    logger,
)
from ._parameters import agree
from .handle import FlatParamHandle
from .metadata import FlatParamShardMetadata, ShardParamInfo
from .metadata import ShardParamInfo as _ShardParamInfo
from .states import HandleTrainingState

__all__ = [
    *("FlatParamHandle", "FlatParamShardMetadata", "FlatParameter", "HandleShardingStrategy", "HandleTrainingState"),
    *("ParamInfo", "ShardParamInfo", "SharedParamInfo", "_ShardParamInfo", "agree"),
]


def log0(message: str) -> None:
    """Log ``message`` on rank 0."""
    if dist.get_rank() == 0:
        logger.info(message)
