# ruff: noqa: F401
"""What the package gives: imported with the first of its names that is asked for."""

from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from .checkpoint.safetensors import load_safetensors
from .common.layout import FlatLayout
from .common.torch_private import (
    FlatParameter,
    FlatParamShardMetadata,
    HandleShardingStrategy,
    ParamInfo,
    SharedParamInfo,
)
from .dropin.handle import FlatParamHandle
from .dropin.resetting import reset_state
from .fsdp import *  # noqa: F403
from .installing import install, is_installed, uninstall
