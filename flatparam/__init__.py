# ruff: noqa: F405
"""flatparam: the flat-parameter engine under sharded PyTorch training, in C."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _build_check

_build_check.check()

from . import _C, _moved  # noqa: E402, F401  (a broken extension is an error of the import)
from ._version import __version__ as __version__  # noqa: E402

_moved.add()

if TYPE_CHECKING:
    from ._api import *  # noqa: F403

__all__ = [
    "FLAT_PARAM",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "BackwardPrefetch",
    "CPUOffload",
    "CustomPolicy",
    "FlatLayout",
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "HandleShardingStrategy",
    "HandleTrainingState",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MemoryPlan",
    "MixedPrecision",
    "ModuleWrapPolicy",
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
    "TrainingState_",
    "always_wrap_policy",
    "clean_tensor_name",
    "defer_init",
    "enable_wrap",
    "install",
    "is_installed",
    "lambda_auto_wrap_policy",
    "load_safetensors",
    "p_assert",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "uninstall",
    "wrap",
]

_WITH_THEM = ("copying", "fsdp", "handle", "layout")  # submodules that need no import of their own


def __getattr__(name: str) -> Any:
    """Import what the package gives with the first of its names that is asked for.

    It takes half as long as torch itself, most of it in torch.distributed.fsdp, which some programs do without.
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
