"""Put flatparam's handle under torch's FullyShardedDataParallel, and remove it again.

A release of torch may keep all names and change their behaviour. So ``install()`` first calls both handles on a tiny
module, in this process alone, and compares the results. It runs no backward: after a backward torch refuses backwards
in forked processes. Models that are wrapped already keep their handles.
"""

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..common.patches import flat_params_live, names_of
from ..common.tensors import row_major
from ..common.torch_private import HandleShardingStrategy, HandleTrainingState, leave_out_of_graphs, torch_flat_param
from . import flat_param
from .base import TORCH_HANDLE, installed
from .handle import FlatParamHandle

# The members and fields that the handle supports. A new one is refused here, and not in the middle of training.
KNOWN_NAMES = {
    "HandleShardingStrategy": "FULL_SHARD SHARD_GRAD_OP NO_SHARD HYBRID_SHARD _HYBRID_SHARD_ZERO2",
    "HandleTrainingState": "IDLE FORWARD BACKWARD_PRE BACKWARD_POST SUMMON_FULL_PARAMS",
    "ParamInfo": "param_name module module_name",
    "SharedParamInfo": "param_name module module_name prim_param_name prim_module prim_module_name",
    "_ShardParamInfo": "in_shard offset_in_shard numel_in_shard intra_param_start_idx intra_param_end_idx",
    "FlatParamShardMetadata": "param_names param_shapes param_strides param_contiguities param_numels param_offsets",
}


def install() -> None:
    """Implement ``flatparam.install()``. Raises: RuntimeError; nothing is installed then."""
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
            f"flatparam is not installed: torch {torch.__version__} has names in {torch_flat_param.__name__} that "
            f"flatparam lacks: {', '.join(missing)}. A newer flatparam may. If your own code added it, call "
            "flatparam.install() before that code"
        )
    otherwise = _differences()
    if otherwise:
        raise RuntimeError(
            f"flatparam is not installed: torch {torch.__version__}'s FlatParamHandle does not do what flatparam's "
            f"does. A newer flatparam may. On a tiny module: {otherwise[0]}"
        )
    installed.end()  # a user may have put torch's class back
    installed.begin()
    leave_out_of_graphs()


def is_installed() -> bool:
    """Whether models wrapped now use ``flatparam.FlatParamHandle``."""
    current: Any = torch_flat_param.FlatParamHandle
    return current is FlatParamHandle


def missing_names(theirs: ModuleType, ours: ModuleType) -> list[str]:
    """Return the names that the module ``theirs`` has and ``ours`` lacks, in order.

    It compares the functions and classes that ``theirs`` defines, the attributes of its FlatParamHandle, the parameters
    of its methods, enum members and tuple fields. A method of ours with ``**kwargs`` accepts all parameters.
    """
    defined = (name for name, value in vars(theirs).items() if getattr(value, "__module__", None) == theirs.__name__)
    missing = [name for name in defined if not hasattr(ours, name)]
    for name, known in KNOWN_NAMES.items():
        kind = getattr(theirs, name, None)  # a named tuple or an enum
        names = getattr(kind, "_fields", ()) or getattr(kind, "__members__", ())
        missing += [f"{name}.{member}" for member in names if member not in known.split()]
    handle = ours.FlatParamHandle
    for name in dir(theirs.FlatParamHandle):
        if not hasattr(handle, name) and name != "__slotnames__":  # copyreg sets it on classes
            missing.append(f"FlatParamHandle.{name}")
        elif not name.startswith("__") or name == "__init__":
            value, own = (_function(inspect.getattr_static(cls, name)) for cls in (theirs.FlatParamHandle, handle))
            missing += [f"FlatParamHandle.{name}({parameter})" for parameter in _missing_parameters(value, own)]
    return missing


def replaced_methods(handle: type) -> list[str]:
    """Return the methods of torch's ``handle`` whose code is not in torch's folder: a user has replaced them."""
    return [name for name, value in vars(handle).items() if not all(_is_torchs(part) for part in _layers(value))]


@functools.cache
def _differences() -> list[str]:
    return differences(FlatParamHandle, TORCH_HANDLE)


def _function(value: Any) -> Any:
    """Return the function inside a property, a static method or a class method; else ``value``."""
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def _missing_parameters(theirs: Callable[..., Any], ours: Callable[..., Any]) -> list[str]:
    if not (callable(theirs) and callable(ours)):
        return []
    have = inspect.signature(ours).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in have.values()):
        return []
    return [name for name in inspect.signature(theirs).parameters if name not in have and name != "self"]


def _layers(value: Any) -> Iterator[Any]:
    """Yield a method and the functions that its decorators wrap; nothing if ``value`` is no method."""
    value = _function(value)
    while callable(value):
        yield value
        value = getattr(value, "__wrapped__", None)


def _is_torchs(function: Any) -> bool:
    """Whether the code is in torch's folder, or is the wrapper of ``contextlib.contextmanager``."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return file.startswith(os.path.join(os.path.dirname(torch.__file__), "")) or file == contextlib.__file__


@installed.change("torch.distributed.fsdp._flat_param:FlatParamHandle", test="tests/dropin/test_install.py")
def _bind() -> Iterator[None]:
    """Put flatparam's handle in the place of torch's, in each module of torch.distributed.

    Modules that are imported later get it from ``_flat_param``.
    """
    _bind_to(FlatParamHandle)
    yield
    _bind_to(TORCH_HANDLE)


def _bind_to(handle: type) -> None:
    other = FlatParamHandle if handle is TORCH_HANDLE else TORCH_HANDLE
    for module, attribute in names_of(other, under="torch.distributed."):
        setattr(module, attribute, handle)


if not hasattr(torch.cpu.Stream, "synchronize"):

    @flat_params_live.add("torch.cpu:Stream.synchronize", "tests/dropin/test_dropin_offload.py")
    def _synchronize(stream: Any) -> None:
        """Let the CPU's streams have ``synchronize``: torch's runtime calls it after an offloaded backward."""


_LISTS = ("_fqns", "_shapes", "_strides", "_contiguities", "_numels", "_numels_with_padding", "_is_padding_mask")


class _Tiny(nn.Module):
    """A module with a parameter that is cut between shards, a shared one, and one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = _param(2, 3), _param(3)
        self.inner = nn.Module()
        self.inner.tied, self.inner.scale = self.weight, _param(1)


def _param(*shape: int) -> nn.Parameter:
    numel = torch.Size(shape).numel()
    return nn.Parameter(torch.arange(1.0, numel + 1, dtype=torch.float32, device="cpu").view(shape))


@torch.inference_mode(False)
@torch.enable_grad()
def differences(ours: Any, theirs: Any) -> list[str]:
    """Return one line for each setting in which the classes ``ours`` and ``theirs`` behave differently."""
    found = []
    for use_orig_params in (True, False):
        for rank, size in ((0, 1), (0, 2), (1, 2)):
            setting = rank, size, use_orig_params
            answers = zip(_answers(ours, *setting), _answers(theirs, *setting), strict=False)
            for (what, answer), (_, expected) in answers:
                if answer != expected:
                    where = f"use_orig_params={use_orig_params}, rank {rank} of {size}"
                    found.append(f"{what} ({where}): torch's answers {expected}, flatparam's {answer}")
                    break  # later results follow from this one
    return found


def _answers(kind: Any, rank: int, size: int, use_orig_params: bool) -> Iterator[tuple[str, Any]]:
    try:
        yield from _steps(kind, rank, size, use_orig_params)
    except Exception as error:
        yield "a step", f"{type(error).__name__}: {error}"


def _steps(kind: Any, rank: int, size: int, use_orig_params: bool) -> Iterator[tuple[str, Any]]:
    module, cpu = _Tiny(), torch.device("cpu")
    strategy = HandleShardingStrategy.FULL_SHARD if size > 1 else HandleShardingStrategy.NO_SHARD
    params = list(module.parameters())
    group = SimpleNamespace(rank=lambda: rank, size=lambda: size)  # enough for a handle that does not communicate
    settings = (strategy, False, None, None, False, group, use_orig_params)
    handle = kind(params, module, cpu, *settings)
    flat_param = handle.flat_param
    for name in _LISTS:
        yield name, [tuple(item) if isinstance(item, tuple) else item for item in getattr(flat_param, name)]
    yield "the flat parameter", flat_param.tolist()
    yield "param_module_names()", list(handle.param_module_names())
    handle.shard()
    yield "the shard", flat_param.tolist()
    yield "_shard_param_infos", [tuple(info) for info in flat_param._shard_param_infos]
    yield "shard_metadata()", tuple(handle.shard_metadata())
    yield "parameters after shard()", _shown(module)
    handle.init_flat_param_attributes()
    handle._training_state = HandleTrainingState.FORWARD
    yield "needs_unshard()", handle.needs_unshard()
    padded = flat_param
    if size > 1:
        padded = handle._alloc_padded_unsharded_flat_param()
        padded.copy_(torch.arange(float(padded.numel()), dtype=padded.dtype, device=cpu))
    handle._use_unsharded_flat_param(padded)
    yield "parameters in forward", _shown(module)
    handle._training_state = HandleTrainingState.BACKWARD_POST
    handle.reshard(size > 1)
    yield "the shard after backward", flat_param.tolist()
    yield "parameters after backward", _shown(module)
    handle._training_state = HandleTrainingState.IDLE
    if use_orig_params:
        flat_param.grad = torch.arange(float(flat_param.numel()), dtype=torch.float32, device=cpu)
        handle._use_sharded_grad_views()
        grads = [param.grad for param in module.parameters()]
        yield "gradients", [None if grad is None else grad.tolist() for grad in grads]


def _shown(module: nn.Module) -> list[tuple[str, str, Any]]:
    """Return ``(name, class, values, or the shape without memory)`` of each parameter that modules have now."""
    found = []
    for name, inner in module.named_modules():
        for attribute in ("weight", "bias", "tied", "scale"):
            value = getattr(inner, attribute, None)
            if isinstance(value, Tensor):
                has_memory = value.untyped_storage().size() > 0
                shown = value.tolist() if has_memory else value.shape
                found.append((f"{name}.{attribute}", type(value).__name__, shown))
    return found


OLD_NAME = "flat_param"
OLD_PATH = f"torch.distributed.fsdp.{OLD_NAME}"
_TEST = "tests/dropin/test_older_versions.py"


@installed.change("torch.distributed.fsdp:flat_param", test=_TEST)
def _old_path() -> Iterator[None]:
    """Let ``torch.distributed.fsdp.flat_param`` exist: the module's name up to torch 2.1, in scripts and pickles."""
    package = sys.modules["torch.distributed.fsdp"]
    if OLD_PATH not in sys.modules:  # else this torch has the module
        sys.modules[OLD_PATH] = torch_flat_param
        setattr(package, OLD_NAME, torch_flat_param)
    yield
    if sys.modules.get(OLD_PATH) is torch_flat_param:
        del sys.modules[OLD_PATH]
    if vars(package).get(OLD_NAME) is torch_flat_param:
        delattr(package, OLD_NAME)


_METADATA = "torch.distributed.fsdp._flat_param:FlatParamShardMetadata"
_OLD_FIELDS = ("param_names", "param_shapes", "param_numels", "param_offsets")


@installed.around(f"{_METADATA}.__new__", test=_TEST)
def _new_metadata(new: Any, cls: type, *fields: Any, **named: Any) -> Any:
    """Let ``FlatParamShardMetadata`` accept four fields, as torch up to 2.5 made and pickled it.

    Parameters were row-major then, so the strides and contiguities of torch 2.6 follow from the shapes.
    """
    if len(fields) + len(named) == len(_OLD_FIELDS) and set(named) == set(_OLD_FIELDS[len(fields) :]):
        fields = _filled_in(*fields, *(named.pop(name) for name in _OLD_FIELDS[len(fields) :]))
    return new(cls, *fields, **named)


@installed.around(f"{_METADATA}._make", test=_TEST)
def _make_metadata(make: Any, cls: type, iterable: Any) -> Any:
    """Let ``FlatParamShardMetadata._make`` accept four fields."""
    fields = tuple(iterable)
    return make(cls, _filled_in(*fields) if len(fields) == len(_OLD_FIELDS) else fields)


def _filled_in(names: Any, shapes: Any, numels: Any, offsets: Any) -> tuple[Any, ...]:
    """Return all six fields, with strides and contiguities of row-major parameters."""
    return names, shapes, tuple(map(row_major, shapes)), (True,) * len(shapes), numels, offsets


@installed.around(
    "torch.distributed.fsdp._optim_utils:_unflatten_orig_param_states", test="tests/dropin/test_dropin_states.py"
)
def _unflatten_apart(
    unflatten: Any, info: Any, states: dict[str, dict[str, Any]], name: str, *settings: Any, **named: Any
) -> None:
    """Let gathered optimizer states keep their values.

    With ``use_orig_params=True`` torch gathers a unit's states (Adam's ``exp_avg``, then ``exp_avg_sq``) one after
    another into one buffer, and returns views of it. If nothing copies them (on the CPU, or ``offload_to_cpu=False``),
    all states of a saved optimizer have the values of the last one. So states of units with flatparam's handle are
    copied if they are views of the buffer.
    """
    gathered = {_address(state.get(name)) for state in states.values()} - {None}
    unflatten(info, states, name, *settings, **named)
    if isinstance(info.handle, FlatParamHandle):
        for state in states.values():
            if _address(state.get(name)) in gathered:
                state[name] = state[name].clone()


def _address(value: Any) -> int | None:
    """Return the address of a tensor's, or of a DTensor's local, storage; None for other values."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.untyped_storage().data_ptr() if type(local) is Tensor else None
