"""Pickled forms of process groups, device handles and the tensors of a unit, for which Python has no usable form.

They are in force only while a unit is copied or pickled: ``Pickling`` puts them into ``copyreg.dispatch_table``, which
is global, and restores it. ``dropin/copying.py`` and ``fsdp/wrapper/copying.py`` say which tensors get which form.
"""

import copyreg
import functools
import importlib
import threading
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

from .collectives import ranks_of
from .patches import note
from .torch_private import FakeProcessGroup, FlatParameter, _FSDPDeviceHandle, _override_module_mixed_precision

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
Forms = Iterable[tuple[Tensor, Callable[[], Reduced]]]  # a tensor, and a function that returns its pickled form


class Pickling:
    """Keeps pickled forms in force until ``end()`` is called or the object is garbage.

    A pickler does not tell when it is done, but until then it refers to each object that it has pickled. So let the
    pickled state refer to this object (``PickledState``). Several may be in force; the latest has precedence.
    """

    def __init__(self, tensors: Forms = ()) -> None:
        self.forms = {id(tensor): (tensor, form) for tensor, form in tensors}  # the tensor is kept with its id
        me = weakref.ref(self)
        _begin(me, {type(tensor) for tensor, _ in self.forms.values()})
        self.end = weakref.finalize(self, _end, me)
        self.end.atexit = False


class PickledState(dict[str, Any]):
    """A state dict that keeps its ``Pickling`` in force. It is pickled as a plain dict."""

    pickling: Pickling | None = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())


def pickled_state(state: dict[str, Any], forms: Forms, modules: Iterable[nn.Module]) -> PickledState:
    """Return a copy of ``state``; while it lives, tensors have these pickled ``forms``.

    ``modules``: their hooks become picklable, for good.
    """
    for module in modules:
        make_hooks_picklable(module)
    pickled = PickledState(state)
    pickled.pickling = Pickling(forms)
    return pickled


note(
    "while a unit is copied or pickled",
    ["copyreg:dispatch_table"],
    "Give process groups, device handles and tensors of units a pickled form. A pickler asks nothing else.",
    "tests/packaging/test_patches.py",
    "The earlier entries are put back.",
)
_in_force: list[weakref.ref[Pickling]] = []
_lock = threading.RLock()  # a Pickling may end, in a garbage collection, while another begins
_before: dict[type, Any] = {}


def _begin(pickling: weakref.ref[Pickling], tensor_types: set[type]) -> None:
    with _lock:
        _in_force.append(pickling)
        for kind, reduce in (_REDUCE | dict.fromkeys(tensor_types, _reduce_tensor)).items():
            if kind not in _before:
                _before[kind] = copyreg.dispatch_table.get(kind)
                copyreg.dispatch_table[kind] = reduce


def _end(pickling: weakref.ref[Pickling]) -> None:
    with _lock:
        _in_force.remove(pickling)
        while _before and not _in_force:
            kind, reduce = _before.popitem()
            del copyreg.dispatch_table[kind]
            if reduce is not None:
                copyreg.dispatch_table[kind] = reduce


def _reduce_tensor(tensor: Tensor) -> Any:
    for reference in reversed(tuple(_in_force)):  # the latest has the current form
        pickling = reference()
        if pickling is not None and id(tensor) in pickling.forms:
            return pickling.forms[id(tensor)][1]()
    own = _before.get(type(tensor))
    return tensor.__reduce_ex__(4) if own is None else own(tensor)


def as_parameter(param: nn.Parameter) -> Reduced:
    """Return the form of an original parameter: without data, since the shard has them."""
    return new_parameter, (param.dtype, param.requires_grad, torch._utils._get_obj_state(param))


def new_parameter(dtype: torch.dtype, requires_grad: bool, state: Any = None) -> nn.Parameter:
    param = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=requires_grad)
    return torch._utils._set_obj_state(param, state) if state else param


def as_view() -> Reduced:
    """Return the form of a view in an original parameter's place: an empty tensor; unpickling makes a new view."""
    return torch.empty, (0,)


def as_flat_parameter(shard: Tensor, requires_grad: bool) -> Reduced:
    """Return the form of a flat parameter: the shard alone; its handle or unit has the rest."""
    if shard.untyped_storage().nbytes() != shard.nbytes:
        shard = shard.clone()  # else the whole storage would be pickled
    return new_flat_parameter, (shard, requires_grad)


def new_flat_parameter(shard: Tensor, requires_grad: bool) -> Any:
    return FlatParameter(shard, requires_grad=requires_grad)


def _reduce_group(group: dist.ProcessGroup) -> Reduced:
    name, ranks = group.group_name, ranks_of(group)
    return find_group, (name, ranks, dist.get_backend(group), dist.get_rank(), dist.get_world_size())


def find_group(name: str, ranks: list[int], backend: str, rank: int, world_size: int) -> dist.ProcessGroup:
    """Return the group of ``ranks``; of several, the one with this backend, then the one with this name.

    Raises: RuntimeError if there is none, or if this process has another rank or world size than the pickle.
    """
    theirs = f"rank {rank} of {world_size}"
    if not dist.is_initialized():
        raise RuntimeError(
            f"this was pickled on {theirs}, and there is no process group here: call "
            "torch.distributed.init_process_group() before loading it"
        )
    if (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise RuntimeError(
            f"this was pickled on {theirs} and has that rank's shards, but this is rank {dist.get_rank()} of "
            f"{dist.get_world_size()}: load on every rank what it pickled itself; use state dicts to change ranks"
        )
    groups = [group for group in dist.distributed_c10d._world.pg_map if ranks_of(group) == ranks]
    if not groups:
        raise RuntimeError(
            f"this was pickled with the process group '{name}' of ranks {ranks}, and there is no group of these ranks "
            f"here: call torch.distributed.new_group({ranks}) before loading it"
        )
    return max(groups, key=lambda group: (dist.get_backend(group) == backend, group.group_name == name))


def _new_fake_group(rank: int, world_size: int) -> FakeProcessGroup:
    return FakeProcessGroup._create_internal(rank=rank, world_size=world_size)


class CastHook:
    """One of the two hooks with which torch keeps a BatchNorm in fp32 under mixed precision.

    It calls torch's hook, which is a local function and cannot be pickled.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._hook = _cast_hooks()[name]

    def __call__(self, *args: Any) -> Any:
        return self._hook(*args)

    def __reduce__(self) -> Reduced:
        return CastHook, (self._name,)


@functools.cache
def _cast_hooks() -> dict[str, Callable[..., Any]]:
    module = nn.Module()
    _override_module_mixed_precision(module, [nn.Module])
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return {hook.__qualname__: hook for hook in hooks}


def make_hooks_picklable(module: nn.Module) -> None:
    """Replace torch's local functions among the hooks of ``module`` by ``CastHook`` objects."""
    if hasattr(module, "_wrap_overrides"):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                if getattr(hook, "__qualname__", None) in _cast_hooks():
                    hooks[key] = CastHook(hook.__qualname__)


_REDUCE: dict[type, Callable[[Any], Any]] = {
    Tensor: _reduce_tensor,
    nn.Parameter: _reduce_tensor,
    dist.ProcessGroup: _reduce_group,
    FakeProcessGroup: lambda group: (_new_fake_group, (group.rank(), group.size())),
    _FSDPDeviceHandle: lambda handle: (_FSDPDeviceHandle.from_device, (vars(handle)["_FSDPDeviceHandle__device"],)),
    ModuleType: lambda module: (importlib.import_module, (module.__name__,)),  # torch.cuda is its own device handle
    DTensorExtensions: lambda extensions: (type(extensions), (extensions.device_handle,)),
}
