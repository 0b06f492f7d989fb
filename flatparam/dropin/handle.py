"""FlatParamHandle: torch's names for the functions of this package; construction, sharding, the metadata of shards.

torch's FullyShardedDataParallel makes one handle for each unit, and its runtime drives it. LayerZero's handle has
some of its functions, too.
"""

import contextlib
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _C
from ..common.collectives import fake_group
from ..common.layout import parts_of
from ..common.switches import environment_is_on, fakes
from ..common.tensors import free, in_storage_order, pinned, same_storage
from ..common.torch_private import (
    FlatParamShardMetadata,
    FSDPExtensions,
    HandleShardingStrategy,
    _FSDPDeviceHandle,
    _get_aligned_numel,
    _ShardParamInfo,
    _warn_skip_writeback_check,
    logger,
    outside_of_transforms,
)
from . import copying, flatten, gathering, gradients, recovery, views, writeback
from .base import TORCH_HANDLE, Handle


class FlatParamHandle(Handle):
    """Owns one flat parameter: flattens the original parameters into it, shards it, and keeps their views.

    Args:
        params: the parameters to flatten: at least one, all in ``fully_sharded_module``'s tree, of one floating-point
            dtype and one device, and of one ``requires_grad`` unless ``use_orig_params``.
        fully_sharded_module: the module whose forward needs them.
        device: the device of computation and communication.
        sharding_strategy: a ``HandleShardingStrategy``.
        offload_params: keep the shard and its gradient on the CPU.
        mp_param_dtype: dtype of the unsharded parameter in forward and backward; None: the parameters' dtype.
        mp_reduce_dtype: dtype of the gradient reduction; None: ``mp_param_dtype``, else the parameters' dtype.
        keep_low_precision_grads: leave gradients in the low precision for the optimizer.
        process_group: the ranks that share the parameter.
        use_orig_params: modules keep the original ``nn.Parameter`` objects; else users see the flat parameter.
        fsdp_extension: transforms of tensors before flattening and after unflattening (tensor parallelism).

    Shapes: ``flat_param`` is 1-D: ``_unpadded_unsharded_size`` when unsharded (alignment padding included),
    ``_sharded_size`` = padded size / world size when sharded.
    Raises: ValueError naming parameters that do not fit together. The modules are unchanged then.
    Source: ``torch.distributed.fsdp._flat_param.FlatParamHandle`` (torch 2.13): same attributes, methods and results.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter | Tensor],
        fully_sharded_module: nn.Module,
        device: torch.device,
        sharding_strategy: HandleShardingStrategy,
        offload_params: bool,
        mp_param_dtype: torch.dtype | None,
        mp_reduce_dtype: torch.dtype | None,
        keep_low_precision_grads: bool,
        process_group: dist.ProcessGroup,
        use_orig_params: bool,
        *,
        fsdp_extension: FSDPExtensions | None = None,
    ) -> None:
        params = list(params)
        if len(params) == 0:
            raise ValueError(f"Cannot construct a {type(self).__name__} with an empty parameter list")
        self._init_setattr_fns()
        self._read_environment()
        align_addresses = use_orig_params
        self._init_get_unflat_views_fn(align_addresses)
        self.device = device
        self._device_handle = _FSDPDeviceHandle.from_device(device)
        self.process_group = process_group
        self.rank = process_group.rank()
        self.world_size = process_group.size()
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise _C.ShardError(
                f"expected a process group of at least one rank that this process is in, got rank {self.rank} of "
                f"{self.world_size}"
            )
        if self._use_fake_all_gather or self._use_fake_reduce:
            self._fake_process_group = fake_group(self.rank, self.world_size)
        self._sharding_strategy = sharding_strategy
        self._offload_params = offload_params
        self._use_orig_params = use_orig_params
        self._keep_low_precision_grads = keep_low_precision_grads
        self._debug_level = dist.get_debug_level()
        self._fully_sharded_module = fully_sharded_module
        self._orig_param_dtype = params[0].dtype
        self._init_param_reduce_dtypes(mp_param_dtype, mp_reduce_dtype)
        self._aligned_numel = _get_aligned_numel(unsharded_dtype=self._fwd_bwd_param_dtype) if align_addresses else 0
        self._fsdp_extension = fsdp_extension
        self._shards_next = flatten.is_sharded_next(type(self), _constructor)
        self._init_flat_param_and_metadata(params, fully_sharded_module, self._aligned_numel, use_orig_params)
        self._take_over_attributes()
        copying.note_owner(self)
        del self._shards_next

    def __del__(self) -> None:
        """Break the flat parameter's reference cycles, so that its memory is freed with the model.

        It refers to views (in the modules and in ``_tensors``) and to the node of the post-backward hook. These refer
        back to it through autograd's nodes, which Python's collector cannot see (pytorch PR 183211).
        """
        flat_param = getattr(self, "flat_param", None)
        for name in ("_param_infos", "_shared_param_infos", "_modules", "_tensors", "_post_backward_hook_state"):
            if hasattr(flat_param, name):
                delattr(flat_param, name)

    def __copy__(self) -> "FlatParamHandle":
        raise TypeError(f"{self._names()} has one handle only: use copy.deepcopy(), which copies its modules too")

    __deepcopy__ = copying.deepcopy_handle
    __reduce_ex__ = copying.reduce_handle
    __setstate__ = copying.restore_handle

    def _read_environment(self) -> None:
        self._skip_writeback_check = environment_is_on("FSDP_SKIP_WRITEBACK_CHECK")
        self._use_full_prec_in_eval = environment_is_on("FSDP_USE_FULL_PREC_IN_EVAL")
        self._use_fake_all_gather, self._use_fake_reduce = fakes()
        if self._skip_writeback_check:
            _warn_skip_writeback_check(
                logger,
                "FSDP_SKIP_WRITEBACK_CHECK=1: parameters and gradients whose storage is changed from outside are not "
                "noticed; that may give silently wrong results.",
            )

    # Sharding and its metadata

    @torch.no_grad()
    def shard(self) -> None:
        """Copy this rank's shard into ``flat_param`` and free the unsharded storage. NO_SHARD: record metadata only."""
        flat_param = self.flat_param
        if not self.uses_sharded_strategy:
            self._init_shard_metadata(0, 0, flat_param.numel() - 1)
        else:
            if flat_param.storage_offset() != 0:
                raise self._wrong(
                    "the flat parameter is not the sole occupant of its storage: expected offset 0, got "
                    f"offset {flat_param.storage_offset()}"
                )
            if self._unflattened is not None:
                shard, numel_padded = flatten.shard_of(self, self._unflattened)
                del self._unflattened
            else:
                shard, numel_padded = FlatParamHandle._get_shard(flat_param, self.rank, self.world_size)
            unsharded = flat_param.data
            flat_param.set_(shard)
            self._free(unsharded)
            start = shard.numel() * self.rank
            self._init_shard_metadata(numel_padded, start, start + shard.numel() - 1)
        if self._use_orig_params:
            self._use_sharded_views()

    def _init_shard_metadata(self, numel_padded: int, unsharded_start_idx: int, unsharded_end_idx: int) -> None:
        """Record that this rank has elements ``[start, end]`` (inclusive) of the unsharded flat parameter."""
        flat_param = self.flat_param
        if not 0 <= unsharded_start_idx <= unsharded_end_idx:
            raise self._wrong(f"an invalid shard [{unsharded_start_idx}, {unsharded_end_idx}]")
        if numel_padded > flat_param.numel():
            raise self._wrong(f"a shard of {flat_param.numel()} elements cannot have {numel_padded} of padding")
        infos = self._get_shard_metadata(unsharded_start_idx, unsharded_end_idx)
        if len(infos) != flat_param._num_params:
            raise self._wrong(f"Expects {flat_param._num_params} shard infos but got {len(infos)}")
        flat_param._sharded_size = flat_param.size()
        flat_param._shard_param_infos = infos
        flat_param._shard_numel_padded = numel_padded

    def _get_shard_metadata(self, unsharded_start_idx: int, unsharded_end_idx: int) -> tuple[_ShardParamInfo, ...]:
        """Return the part of each original parameter in elements ``[start, end]`` (inclusive) of the unsharded one."""
        if self._padded_to is not None and not self._is_replaced("_get_flat_param_offsets"):
            return parts_of(self._layout, unsharded_start_idx, unsharded_end_idx + 1, _ShardParamInfo)
        try:
            infos: tuple[_ShardParamInfo, ...] = TORCH_HANDLE._get_shard_metadata(
                self, unsharded_start_idx, unsharded_end_idx
            )
        except AssertionError as error:
            raise self._wrong(str(error)) from None
        return infos

    @staticmethod
    def _get_unpadded_shard(tensor: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
        """Return ``(rank's chunk of tensor, a view; the number of elements by which it is shorter than the first)``."""
        shard = getattr(tensor, "_local_shard", None)
        if shard is not None and same_storage(shard, tensor):
            raise RuntimeError(
                "the parameters that summon_full_params() gathered were freed before its end: a forward inside of it "
                "has resharded them, or reset_state() has ended it. Nothing is written back"
            )
        chunks = in_storage_order(tensor).chunk(world_size)
        chunk = chunks[rank] if rank < len(chunks) else chunks[0].new_empty(0)
        return chunk, chunks[0].numel() - chunk.numel()

    @staticmethod
    def _get_shard(tensor: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
        """Return ``(a copy of rank's chunk of tensor, padded with zeros; the number of padding elements)``."""
        chunk, numel_to_pad = FlatParamHandle._get_unpadded_shard(tensor, rank, world_size)
        shard = chunk.clone()
        return (F.pad(shard, [0, numel_to_pad]) if numel_to_pad > 0 else shard), numel_to_pad

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Describe the elements of each original parameter in this rank's shard; leave out parameters without any."""
        flat = self.flat_param
        of_each = flat._fqns, flat._shapes, flat._strides, flat._contiguities, flat._numels
        return FlatParamShardMetadata(*_C.held(flat._shard_param_infos, *of_each))

    @torch.no_grad()
    @torch.inference_mode(False)
    @outside_of_transforms()
    def init_flat_param_attributes(self) -> None:
        """Make the tensors that unsharding needs, without memory. The runtime calls it once, at lazy initialization.

        They are made outside of inference mode and torch.func's transforms, even if the caller is inside: they outlive
        the first forward.
        """
        flat_param = self.flat_param
        if flat_param.dtype != self._orig_param_dtype:  # the user converted it; explicit settings win
            if not self._low_prec_param_dtype_specified:
                self._fwd_bwd_param_dtype = flat_param.dtype
            if not self._low_prec_reduce_dtype_specified and not self._low_prec_param_dtype_specified:
                self._reduce_dtype = flat_param.dtype
            self._orig_param_dtype = flat_param.dtype
        if self._offload_params:
            if flat_param.device.type != "cpu":
                raise self._wrong(
                    "Expects the `FlatParameter` to be on CPU when parameter CPU offloading is enabled, not "
                    f"{flat_param.device}"
                )
        else:
            self._check_on_compute_device(flat_param)
        flat_param._local_shard = flat_param.data
        if self._offload_params:
            flat_param._local_shard = pinned(flat_param._local_shard)
            flat_param._cpu_grad = pinned(torch.zeros_like(flat_param._local_shard, device="cpu"))
        mixed, numel = self._uses_param_mixed_precision, flat_param.numel()
        own_dtype, low_dtype = flat_param.dtype, self._fwd_bwd_param_dtype
        if mixed:
            flat_param._mp_shard = self._freed(numel, low_dtype)
        if self.uses_sharded_strategy:
            numel *= self.world_size
            flat_param._full_param_padded = self._freed(numel, low_dtype if mixed else own_dtype)
            flat_param._padded_unsharded_size = flat_param._full_param_padded.size()
            if mixed:
                flat_param._full_prec_full_param_padded = self._freed(numel, own_dtype)

    def _freed(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(numel, device=self.device, dtype=dtype)
        free(tensor)
        return tensor

    def to_cpu(self) -> Any:
        """Return a context in which the unsharded flat parameter lies on the CPU, and its device memory is freed.

        If it is on the CPU already, nothing changes (torch before 2.15 then reads freed memory: pytorch#188989).
        Source: torch 2.15 ``FlatParamHandle.to_cpu``.
        """
        self._check_sharded_strategy()
        self._check_unsharded(self.flat_param)
        self._check_on_compute_device(self.flat_param)
        if not same_storage(self.flat_param, self._get_padded_unsharded_flat_param()):
            raise self._wrong("expects the unpadded parameter to be a view into the padded one")
        if self.flat_param.is_cpu:
            return contextlib.nullcontext()
        return _C.Block(self._offload_to_cpu, self._restore_unsharded_flat_param_from_cpu)

    def _offload_to_cpu(self) -> None:
        self.flat_param_to(torch.device("cpu"), copy=True)
        self._free_unsharded_flat_param()

    def _restore_unsharded_flat_param_from_cpu(self) -> None:
        self._check_unsharded(self.flat_param)
        needs_memory = self.needs_unshard()  # False if a signal interrupted an earlier call
        padded = self._alloc_padded_unsharded_flat_param if needs_memory else self._get_padded_unsharded_flat_param
        unsharded = padded()
        unsharded[: self.flat_param.numel()].copy_(self.flat_param.detach())
        self._use_unsharded_flat_param(unsharded)

    def _deregister_orig_params(self) -> None:
        """Remove the original parameters from their modules, while ``module.to()`` moves the flat parameter.

        Afterwards the runtime shows the flat parameter's values and gradient again. So users' replacements, and a
        gradient set to None by ``zero_grad()``, are written back first; torch's handle loses them.
        """
        all_there = all(hasattr(info.module, info.param_name) for info in self._all_infos)
        if hasattr(self.flat_param, "_shard_param_infos") and all_there:
            self._reset_flat_param_grad_info_if_needed()
            if not self._skip_writeback_check:
                self._writeback_orig_params()
        TORCH_HANDLE._deregister_orig_params(self)

    _take_over_attributes = views.take_over_attributes  # our own, a step of the constructor
    _training_state = property(recovery.training_state, recovery.set_training_state)


for _module in (flatten, views, gathering, gradients, writeback):
    for _name, _value in vars(_module).items():
        is_own = isinstance(_value, FunctionType) and _value.__module__ == _module.__name__  # and not imported
        for _torchs in (_name, f"_{_name}"):  # a function with the name of a method of torch's takes the handle
            if is_own and (theirs := getattr(TORCH_HANDLE, _torchs, None)) is not None:
                setattr(FlatParamHandle, _torchs, property(_value) if isinstance(theirs, property) else _value)
for _name, _value in vars(FlatParamHandle).items():
    if isinstance(_value, FunctionType):  # tracebacks, and pickles of bound methods, name a function by torch's name
        _value.__name__ = _name
_constructor = FlatParamHandle.__init__
FlatParamHandle._own_methods = {
    name: value
    for name, value in ((name, getattr(FlatParamHandle, name)) for name in dir(FlatParamHandle))
    if (not name.startswith("__") or name == "__getattribute__") and (callable(value) or isinstance(value, property))
}
