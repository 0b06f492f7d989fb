"""What every part of FlatParamHandle builds on: its attributes, what follows from them, and its checks and messages."""

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from .. import _C
from ..common.tensors import free, has_memory, same_storage
from ..common.torch_private import HandleShardingStrategy, is_torchdynamo_compiling, torch_flat_param
from .recovery import Interruptible

Method = TypeVar("Method", bound=Callable[..., Any])
TORCH_HANDLE: Any = torch_flat_param.FlatParamHandle  # before install() replaces it

# Fast paths: each does the work of several methods without calling them. Those name it by step_of(), and the handle
# takes it only while none of them was replaced, on the class or on the handle.
FLATTEN = "flatten"  # parameters into a flat one, in C
RESHARD = "reshard"  # in one call
STREAM = "stream"  # the shard filled straight from the originals, with no flat parameter before it
UNSHARD = "unshard"  # in one call
VIEWS = "views"  # made and shown by C's loops


def step_of(*paths: str) -> Callable[[Method], Method]:
    """Mark a method that these fast paths pass by."""

    def mark(method: Method) -> Method:
        method.__dict__["passed_by"] = paths
        return method

    return mark


def unseen(method: Method) -> Method:
    """Have selective activation checkpoints keep nothing of what ``method`` does, so that it is done again."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _C.unseen_by_checkpoints(method, *args, **kwargs)

    return cast(Method, call)


def steps_by_path(methods: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the names of the marked ``methods``, by the fast path that passes them by."""
    steps: dict[str, tuple[str, ...]] = {}
    for name, method in methods.items():
        for path in getattr(method, "passed_by", ()):
            steps[path] = (*steps.get(path, ()), name)
    return steps


_FREED_FOR_GRAPH = (
    ". If this is a backward through the graph of one with create_graph=True (gradients of gradients): that needs the "
    "parameters between the two, which only sharding_strategy=NO_SHARD without mixed precision of parameters has"
)


# What else the flat parameter's data is at times
_OTHER_MEMORY = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")


class HandleBase(Interruptible):
    """Attributes as torch's handle has them (state that users may write is read anew each time, never cached)."""

    flat_param: Any  # a FlatParameter, with the attributes that its docstring lists
    device: torch.device
    process_group: dist.ProcessGroup
    rank: int
    world_size: int
    _aligned_numel: int
    _debug_level: dist.DebugLevel
    _device_handle: Any  # a _FSDPDeviceHandle
    _fake_process_group: Any  # where environment variables ask for one
    _fsdp_extension: Any
    _fully_sharded_module: nn.Module
    _fwd_bwd_param_dtype: torch.dtype
    _keep_low_precision_grads: bool
    _low_prec_param_dtype_specified: bool
    _low_prec_reduce_dtype_specified: bool
    _offload_params: bool
    _orig_param_dtype: torch.dtype
    _reduce_dtype: torch.dtype
    _setattr_param: Callable[[nn.Module, str, nn.Parameter], None]
    _setattr_tensor: Callable[[nn.Module, str, Tensor], None]
    _sharding_strategy: HandleShardingStrategy
    _skip_writeback_check: bool
    _unit: Any = None  # a _C.ModuleParams, the loops in C; None where each tensor needs torch's own operations
    # The strategies that stay unsharded after forward leave the unsharded views in place: what those are views of; None
    # while the views are what the flat parameter says
    _unsharded_flat_param_for_skipped_views: Any = None
    _use_fake_all_gather: bool
    _use_fake_reduce: bool
    _use_full_prec_in_eval: bool
    _use_orig_params: bool

    _shard_seen: Tensor | None = None  # `_local_shard` when it was looked at last
    _padded_to: int | None = None  # elements that padding aligns parameters to; None: a user's own layout
    _backward_made_graph = False  # a backward with create_graph=True has used the unsharded flat parameter

    # Filled when the class is complete
    _own_methods: ClassVar[dict[str, Any]] = {}  # and properties, by name, as defined here
    _steps: ClassVar[dict[str, tuple[str, ...]]] = {}  # that a fast path passes by; see step_of()

    # What follows from them, as in torch's handle

    uses_sharded_strategy: bool = TORCH_HANDLE.uses_sharded_strategy
    is_sharded = TORCH_HANDLE.is_sharded  # False before ``shard()`` and for NO_SHARD
    _init_setattr_fns = TORCH_HANDLE._init_setattr_fns
    _uses_param_mixed_precision: bool = TORCH_HANDLE._uses_param_mixed_precision
    _uses_reduce_mixed_precision: bool = TORCH_HANDLE._uses_reduce_mixed_precision
    _force_full_precision: bool = TORCH_HANDLE._force_full_precision
    # Whether the modules still have forward's unsharded views although `flat_param` is sharded
    _skipped_use_sharded_views: bool = TORCH_HANDLE._skipped_use_sharded_views
    _fqns_in_shard: list[str] = TORCH_HANDLE._fqns_in_shard
    _get_modules = TORCH_HANDLE._get_modules
    param_module_names = TORCH_HANDLE.param_module_names  # pairs of every original parameter's names
    shared_param_module_names = TORCH_HANDLE.shared_param_module_names  # of the further places of shared ones
    _init_param_reduce_dtypes = TORCH_HANDLE._init_param_reduce_dtypes
    __repr__ = TORCH_HANDLE.__repr__

    def _layout_of(self, numels: Sequence[int], aligned_numel: int) -> _C.Layout:
        """Where parameters of these sizes lie, padded if ``aligned_numel`` > 0. They have at least one element."""
        try:
            return _C.Layout(numels, self.world_size, 1, aligned_numel)
        except _C.ShardError:
            raise _C.ShardError(
                f"the flat parameter would have {sum(numels)} elements, more than 64 bits count; wrap it in more units"
            ) from None

    @property
    def _layout(self) -> _C.Layout:
        """Where the original parameters lie, if that is ours."""
        return self._layout_of(self.flat_param._numels, self._padded_to or 0)

    @property
    def _all_infos(self) -> tuple[Any, ...]:
        """The places of original parameters, then their further ones."""
        return (*self.flat_param._param_infos, *self.flat_param._shared_param_infos)

    def _is_replaced(self, *names: str) -> bool:
        """Whether a user replaced one of these methods, on the class or on this handle."""
        found = ((getattr(self, name), self._own_methods[name]) for name in names)
        return any(getattr(method, "__func__", method) is not own for method, own in found)

    def _keep_moved_shard(self: Any) -> None:
        """Let ``_local_shard`` be the memory that the user has moved the sharded flat parameter to, as ``.to()`` does.

        It may be of another dtype. torch keeps the one from before: what is written to the other one is lost in the
        next forward. Who sets ``_local_shard`` himself gets that.
        """
        flat_param = self.flat_param
        shard = getattr(flat_param, "_local_shard", None)
        if shard is None:
            return
        seen, self._shard_seen = self._shard_seen, shard
        if seen is None or shard is not seen or same_storage(seen, flat_param):
            return
        ours = (getattr(flat_param, name, None) for name in _OTHER_MEMORY)
        if shard.shape != flat_param.shape or any(
            tensor is not None and same_storage(tensor, flat_param) for tensor in ours
        ):
            return
        if shard.dtype != flat_param.dtype:  # as `.double()` does
            self.init_flat_param_attributes()
            self._shard_seen = flat_param._local_shard
        elif not self._offload_params:
            flat_param._local_shard = self._shard_seen = flat_param.data
        elif flat_param.is_cpu:
            shard.copy_(flat_param.detach())  # it stays in pinned memory
            flat_param.data = shard

    # Messages and checks

    def _names(self, most: int = 3) -> str:
        """The unit for a message: its module and its first parameters' names."""
        fqns = self.flat_param._fqns
        more = f", ... ({len(fqns)} in all)" if len(fqns) > most else ""
        return f"the flat parameter of {type(self._fully_sharded_module).__name__} ({', '.join(fqns[:most])}{more})"

    @property
    def _freed_reason(self) -> str | None:
        """What a user is told who reads or writes a parameter of this unit while it is freed.

        None where a user's own method allocates: torch's way to resize a storage reads it first.
        """
        if self._is_replaced("_alloc_padded_unsharded_flat_param", "_use_low_precision_shard"):
            return None
        return self._freed_message + (_FREED_FOR_GRAPH if self._backward_made_graph else "")

    def _free(self, tensor: Tensor) -> None:
        """Free ``tensor``'s memory; who reads it then is told of this unit.

        A second backward, through the graph of the first one, would begin with views of what it finds: so that it is
        told too, the storage keeps its size.
        """
        free(tensor, self._freed_reason, self._backward_made_graph)

    @cached_property
    def _freed_message(self) -> str:
        return (
            f"the memory of {self._names(20)} is freed: it is sharded outside of its module's forward and backward. "
            "Read or change full parameters inside FullyShardedDataParallel.summon_full_params(model), or run them "
            "through the wrapped module"
        )

    def _about(self, message: str, index: int | None = None) -> str:
        """``message`` with the parameter, or the unit, that it is about."""
        return f"{message} [{self._names() if index is None else self.flat_param._fqns[index]}]"

    def _wrong(self, message: str, index: int | None = None) -> AssertionError:
        """What a check raises."""
        return AssertionError(self._about(message, index))

    @step_of(UNSHARD, RESHARD)
    def _check_sharded_strategy(self) -> None:
        if not self.uses_sharded_strategy:
            raise self._wrong("Expects sharded strategy, not NO_SHARD")

    def _check_memory_of_shard(self, shard: Tensor) -> None:
        """Raises: ValueError, where others would read or write what is not its memory."""
        numel = shard.numel()
        if _C.is_plain_tensor(shard) and _C.storage_numel(shard) < shard.storage_offset() + numel:
            raise ValueError(
                self._about(
                    f"the storage of its shard has room for {_C.storage_numel(shard)} elements of {numel}: it was "
                    "freed or resized outside of flatparam, and its values are lost. Leave storages as they are"
                )
            )

    @step_of(RESHARD)
    def _check_on_compute_device(self, tensor: Tensor) -> None:
        if tensor.device != self.device:
            raise self._wrong(f"Expects tensor to be on the compute device {self.device}, was on {tensor.device}")

    def _check_on_cpu(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            raise self._wrong(f"Expects tensor to be on CPU but got {tensor.device}")

    @staticmethod
    @step_of(UNSHARD)
    def _check_storage_freed(tensor: Tensor) -> None:
        if not is_torchdynamo_compiling() and has_memory(tensor):
            raise AssertionError("Expects storage to be freed but got storage with size > 0")

    @staticmethod
    def _check_storage_allocated(tensor: Tensor) -> None:
        if not has_memory(tensor):
            raise AssertionError("Expects storage to be allocated but it is freed")

    def _check_low_precision_shard(self) -> None:
        if not self._uses_param_mixed_precision:
            raise self._wrong("Not using low precision for parameters")
        shard = getattr(self.flat_param, "_mp_shard", None)
        if shard is None:
            raise self._wrong("Expects `_mp_shard` to exist")
        if shard.device != self.device:
            raise self._wrong(f"Expects the low precision shard to be on {self.device} but got {shard.device}")

    def _check_size(self, tensor: Tensor, what: str, size: torch.Size) -> None:
        if tensor is None or tensor.size() != size:
            came = "`None`" if tensor is None else f"size {tensor.size()}"
            raise self._wrong(f"Expects tensor to be {what} with size {size} but got {came}")

    @step_of(UNSHARD, RESHARD)
    def _check_unsharded(self, tensor: Tensor) -> None:
        self._check_size(tensor, "unsharded", self.flat_param._unpadded_unsharded_size)

    @step_of(RESHARD)
    def _check_sharded(self, tensor: Tensor) -> None:
        self._check_size(tensor, "sharded", self.flat_param._sharded_size)
