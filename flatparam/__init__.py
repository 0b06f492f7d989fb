# ruff: noqa: F405
"""flatparam: the flat-parameter engine under sharded PyTorch training, in C."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _build_check

__path__ += _build_check.check()

from . import _C  # noqa: E402, F401  (a broken extension is an error of the import)
from ._version import __version__ as __version__  # noqa: E402

if TYPE_CHECKING:
    from ._api import *  # noqa: F403

__all__ = ["FlatLayout", "FlatParamHandle", "ShardError", "install", "is_installed", "reset_state", "uninstall"]
__all__ += ["FullyShardedDataParallel", "MemoryPlan", "Placement", "ShardingStrategy", "defer_init", "load_safetensors"]
__all__ += ["CheckpointError", "DeviceError", "FileError", "ModelTypeError", "OrderError"]
__all__ += ["StateError", "StoreGoneError", "WritebackError"]
__all__ += ["FlatParamShardMetadata", "FlatParameter", "ParamInfo", "SharedParamInfo"]
__all__ += ["HandleShardingStrategy", "HandleTrainingState", "TrainingState", "TrainingState_"]
__all__ += ["BackwardPrefetch", "CPUOffload", "MixedPrecision", "ShardedGradScaler"]
__all__ += ["FullStateDictConfig", "LocalStateDictConfig", "ShardedStateDictConfig", "StateDictConfig"]
__all__ += ["FullOptimStateDictConfig", "LocalOptimStateDictConfig", "OptimStateDictConfig"]
__all__ += ["OptimStateKeyType", "ShardedOptimStateDictConfig", "StateDictSettings", "StateDictType"]
__all__ += ["CustomPolicy", "ModuleWrapPolicy", "always_wrap_policy", "enable_wrap", "lambda_auto_wrap_policy", "wrap"]
__all__ += ["size_based_auto_wrap_policy", "transformer_auto_wrap_policy"]
__all__ += ["FLAT_PARAM", "FSDP_PREFIX", "FSDP_WRAPPED_MODULE", "clean_tensor_name", "p_assert"]

_WITH_THEM = ("checkpoint", "elastic", "fsdp", "optim", "traced")  # which need no import


def __getattr__(name: str) -> Any:
    """Import the whole package at the first use of one of its names.

    The import takes half as long as that of torch, most of it in torch.distributed.fsdp. Some programs never need it.
    """
    if name in __all__:
        api = import_module("._api", __name__)
        globals().update({public: getattr(api, public) for public in __all__})
        return globals()[name]
    if name in _WITH_THEM:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_WITH_THEM})
