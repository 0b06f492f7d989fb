"""Putting flatparam's handle under torch's FullyShardedDataParallel, and taking it away again."""

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from ..common.compiling import leave_out_of_graphs
from ..common.torch_private import torch_flat_param
from . import behaviour, compat, copying, flat_param, gathered_states, streaming
from .handle import FlatParamHandle

TORCH_HANDLE: Any = torch_flat_param.FlatParamHandle

# What the handle can deal with: a member or field that torch adds would be met in the middle of training.
KNOWN_NAMES = {
    "HandleShardingStrategy": {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"},
    "HandleTrainingState": {"IDLE", "FORWARD", "BACKWARD_PRE", "BACKWARD_POST", "SUMMON_FULL_PARAMS"},
    "ParamInfo": {"param_name", "module", "module_name"},
    "SharedParamInfo": {
        *("param_name", "module", "module_name"),
        *("prim_param_name", "prim_module", "prim_module_name"),
    },
    "_ShardParamInfo": {
        *("in_shard", "offset_in_shard", "numel_in_shard"),
        *("intra_param_start_idx", "intra_param_end_idx"),
    },
    "FlatParamShardMetadata": {
        *("param_names", "param_shapes", "param_strides"),
        *("param_contiguities", "param_numels", "param_offsets"),
    },
}


def install() -> None:
    """Let every FullyShardedDataParallel that is wrapped from now on use ``flatparam.FlatParamHandle``.

    Works before or after ``torch.distributed.fsdp`` was imported, and any number of times. Models that are wrapped
    already keep their handles.
    Raises: RuntimeError when torch's handle has a name that flatparam's lacks, does something else on a tiny module, or
    was changed: nothing is installed.
    """
    if is_installed():
        return
    replaced = replaced_methods(TORCH_HANDLE)
    if replaced:
        raise RuntimeError(
            f"flatparam is not installed: {', '.join(replaced)} of torch's FlatParamHandle was replaced or added, and "
            "would not be called. Call flatparam.install() before the code that does so"
        )
    missing = missing_names(torch_flat_param, flat_param)
    if missing:
        raise RuntimeError(
            f"flatparam is not installed: torch {torch.__version__} has in {torch_flat_param.__name__} what flatparam "
            f"does not know: {', '.join(missing)}. A newer flatparam may. If your own code added it, call "
            "flatparam.install() before that code"
        )
    differences = _differences()
    if differences:
        raise RuntimeError(
            f"flatparam is not installed: torch {torch.__version__}'s FlatParamHandle does not do what flatparam's "
            f"does. A newer flatparam may. On a tiny module: {differences[0]}"
        )
    _bind(FlatParamHandle)
    compat.add()
    copying.add()
    gathered_states.add()
    streaming.add()
    _complete_cpu_streams()
    leave_out_of_graphs()


def uninstall() -> None:
    """Undo ``install()``: models wrapped from now on use torch's handle again."""
    _bind(TORCH_HANDLE)
    compat.remove()
    copying.remove()
    gathered_states.remove()
    streaming.remove()


def is_installed() -> bool:
    """Whether models wrapped now use ``flatparam.FlatParamHandle``."""
    current: Any = torch_flat_param.FlatParamHandle
    return current is FlatParamHandle


def missing_names(theirs: ModuleType, ours: ModuleType) -> list[str]:
    """Return what the module ``theirs`` has and ``ours`` has not, in order.

    Compared are functions and classes that it defines, attributes of its FlatParamHandle and the parameters of its
    methods, enum members and tuple fields. A method whose own has ``**kwargs`` takes every parameter.
    """
    missing = [name for name in _defined_in(theirs) if not hasattr(ours, name)]
    for name, known in KNOWN_NAMES.items():
        names = _members(getattr(theirs, name, None))
        missing += [f"{name}.{member}" for member in names if member not in known]
    handle = ours.FlatParamHandle
    for name in dir(theirs.FlatParamHandle):
        if not hasattr(handle, name) and name != "__slotnames__":  # copyreg notes it on a class that it has copied
            missing.append(f"FlatParamHandle.{name}")
        elif not name.startswith("__") or name == "__init__":
            value, own = (_function(inspect.getattr_static(cls, name)) for cls in (theirs.FlatParamHandle, handle))
            missing += [f"FlatParamHandle.{name}({parameter})" for parameter in _missing_parameters(value, own)]
    return missing


def replaced_methods(handle: type) -> list[str]:
    """Return the methods of torch's ``handle`` that are not torch's own: found by the files that their code is in."""
    return [name for name, value in vars(handle).items() if not all(_is_torchs(part) for part in _layers(value))]


@functools.cache
def _differences() -> list[str]:
    return behaviour.differences(FlatParamHandle, TORCH_HANDLE)


def _defined_in(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]


def _members(kind: Any) -> list[str]:
    """The fields of a named tuple, or the members of an enum."""
    return list(getattr(kind, "_fields", ()) or getattr(kind, "__members__", ()))


def _function(value: Any) -> Any:
    """The function in a property, a static or a class method; else ``value``."""
    if isinstance(value, property):
        return value.fget
    return getattr(value, "__func__", value)


def _missing_parameters(theirs: Callable[..., Any], ours: Callable[..., Any]) -> list[str]:
    if not (callable(theirs) and callable(ours)):
        return []
    have = inspect.signature(ours).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in have.values()):
        return []
    return [name for name in inspect.signature(theirs).parameters if name not in have]


def _layers(value: Any) -> Iterator[Any]:
    """A method and the functions that decorators wrapped in it; nothing for what is no method."""
    value = _function(value)
    while callable(value):
        yield value
        value = getattr(value, "__wrapped__", None)


def _is_torchs(function: Any) -> bool:
    """Whether the code is in torch's folder, or is what ``contextlib.contextmanager`` puts around it."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return file.startswith(os.path.join(os.path.dirname(torch.__file__), "")) or file == contextlib.__file__


def _complete_cpu_streams() -> None:
    """Give the CPU's streams what torch's runtime calls at the end of an offloaded backward, where torch lacks it.

    It stays after ``uninstall()``: models that are wrapped already go on.
    """
    stream: Any = torch.cpu.Stream
    if not hasattr(stream, "synchronize"):
        stream.synchronize = _nothing_to_wait_for


def _nothing_to_wait_for(stream: Any) -> None:
    pass


def _bind(handle: type) -> None:
    """Make every module of torch's that has one of the two handles by name have this one.

    Modules that are imported later take it from ``_flat_param``.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.") and isinstance(module, ModuleType):
            for attribute, value in list(vars(module).items()):
                if value is FlatParamHandle or value is TORCH_HANDLE:
                    setattr(module, attribute, handle)
