"""FlatParamHandle: the life cycle of one flat parameter: construct, shard, unshard, reshard."""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .. import _C
from ..common import dlpack, optimizers
from ..common.collectives import all_gather_chunks, all_gather_single, fake_group
from ..common.storage import allocate, free, has_memory, is_allocated, pinned, same_storage
from ..common.tensors import in_storage_order
from ..common.torch_private import (
    NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES,
    FlatParamShardMetadata,
    FSDPExtensions,
    HandleShardingStrategy,
    HandleTrainingState,
    _FSDPDeviceHandle,
    _get_aligned_numel,
    _no_dispatch_record_stream,
    _ShardParamInfo,
    _warn_skip_writeback_check,
    _warn_use_fake_all_gather,
    _warn_use_fake_reduce,
    logger,
    temporarily_clear_interpreter_stack,
)
from . import copying
from .base import environment_is_on
from .fast_path import Fused
from .flatten import Flattening
from .streaming import is_runtime_s
from .writeback import Writeback


class FlatParamHandle(Flattening, Writeback, Fused):
    """Owns one flat parameter: flattens the original parameters into it, shards it, and keeps their views.

    Args:
        params: the parameters to flatten; at least one, all in ``fully_sharded_module``'s tree, of one floating-point
            dtype and one device; of one ``requires_grad`` unless ``use_orig_params``.
        fully_sharded_module: the module whose forward needs them.
        device: where it computes and communicates.
        sharding_strategy: a ``HandleShardingStrategy``.
        offload_params: keep the shard and its gradient on the CPU.
        mp_param_dtype: dtype of the unsharded parameter in forward and backward; None for its own.
        mp_reduce_dtype: dtype of the gradient reduction; None for ``mp_param_dtype``, else the parameter's own.
        keep_low_precision_grads: leave gradients in the low precision for the optimizer.
        process_group: the ranks that share the parameter.
        use_orig_params: keep the original ``nn.Parameter`` objects visible; else one flat one is.
        fsdp_extension: transforms of tensors before flattening and after unflattening (tensor parallelism).

    Shapes: ``flat_param`` is 1-D: ``_unpadded_unsharded_size`` when unsharded (alignment padding included),
    ``_sharded_size`` = padded size / world size when sharded.
    Raises: ValueError for parameters that do not fit together, naming them.
    Source: ``torch.distributed.fsdp._flat_param.FlatParamHandle`` (torch 2.13): same attributes, methods and results.
    """

    _chunks: tuple[Tensor | None, tuple[Tensor, ...]] = (None, ())

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
        super().__init__()
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
        self._training_state = HandleTrainingState.IDLE
        self._debug_level = dist.get_debug_level()
        self._fully_sharded_module = fully_sharded_module
        # The strategies that stay unsharded after forward leave the unsharded views in place; the tensor that those are
        # views of, or None while the views are what the flat parameter says
        self._unsharded_flat_param_for_skipped_views: Tensor | None = None
        # Kept for the runtime: places in its orders of handles, and what prefetching did
        self._handle_index: int | None = None
        self._pre_forward_order_index: int | None = None
        self._post_forward_index: int | None = None
        self._needs_pre_forward_unshard = False
        self._needs_pre_backward_unshard = False
        self._prefetched = False
        self._orig_param_dtype = params[0].dtype
        self._init_param_reduce_dtypes(mp_param_dtype, mp_reduce_dtype)
        self._aligned_numel = _get_aligned_numel(unsharded_dtype=self._fwd_bwd_param_dtype) if align_addresses else 0
        self._fsdp_extension = fsdp_extension
        self._shards_next = is_runtime_s(sys._getframe(1))
        self._init_flat_param_and_metadata(params, fully_sharded_module, self._aligned_numel, use_orig_params)
        self._take_over_attributes()
        optimizers.watch()
        dlpack.watch()
        del self._shards_next

    def __del__(self) -> None:
        """Let the flat parameter go with the model, at once.

        What it refers to leads back to it through autograd's nodes, which Python's collector cannot see
        (pytorch PR 183211): views in the modules and in ``_tensors``, and the node that the post-backward hook is on.
        """
        flat_param = getattr(self, "flat_param", None)
        for name in ("_param_infos", "_shared_param_infos", "_modules", "_tensors", "_post_backward_hook_state"):
            if hasattr(flat_param, name):
                delattr(flat_param, name)

    def __copy__(self) -> "FlatParamHandle":
        raise TypeError(f"{self._names()} has one handle only: use copy.deepcopy(), which copies its modules too")

    def __deepcopy__(self, memo: dict[int, Any]) -> "FlatParamHandle":
        return copying.deepcopy_handle(self, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copying.reduce_handle(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        copying.restore_handle(self, state)

    def __repr__(self) -> str:
        return f"FlatParamHandle(flat_param.fqns={self.flat_param._fqns})"

    def _read_environment(self) -> None:
        self._skip_writeback_check = environment_is_on("FSDP_SKIP_WRITEBACK_CHECK")
        self._use_full_prec_in_eval = environment_is_on("FSDP_USE_FULL_PREC_IN_EVAL")
        self._use_fake_all_gather = environment_is_on("FSDP_USE_FAKE_ALL_GATHER")
        self._use_fake_reduce = environment_is_on("FSDP_USE_FAKE_REDUCE")
        if self._skip_writeback_check:
            _warn_skip_writeback_check(
                logger,
                "FSDP_SKIP_WRITEBACK_CHECK=1: parameters and gradients whose storage is changed from outside are not "
                "noticed; that may give silently wrong results.",
            )
        if self._use_fake_all_gather:
            _warn_use_fake_all_gather(
                logger, "FSDP_USE_FAKE_ALL_GATHER=1: nothing is all-gathered; training is wrong, only its time counts."
            )
        if self._use_fake_reduce:
            _warn_use_fake_reduce(
                logger, "FSDP_USE_FAKE_REDUCE=1: nothing is reduced; training is wrong, only its time counts."
            )

    def _init_param_reduce_dtypes(
        self, mp_param_dtype: torch.dtype | None, mp_reduce_dtype: torch.dtype | None
    ) -> None:
        """Set the dtypes of computation and of reduction; without a reduce dtype, a param dtype counts for both."""
        self._low_prec_param_dtype_specified = mp_param_dtype is not None
        self._low_prec_reduce_dtype_specified = mp_reduce_dtype is not None
        self._fwd_bwd_param_dtype = mp_param_dtype or self._orig_param_dtype
        self._reduce_dtype = mp_reduce_dtype or self._fwd_bwd_param_dtype

    def _take_over_attributes(self) -> None:
        """Put views in the parameters' places, each through delattr and setattr once.

        That settles the order of ``_parameters``: what is switched later in C writes the dictionaries in place.
        """
        if self._loops_in_c(self.flat_param) and not self._is_replaced("_use_unsharded_views"):
            self._check_unsharded(self.flat_param)
            with torch.enable_grad():
                self._use_unsharded_views_by_ops(as_params=False)
            return
        unit, self._unit = self._unit, None
        try:
            self._use_unsharded_views(as_params=False)
        finally:
            self._unit = unit

    # Sharding and its metadata

    @torch.no_grad()
    def shard(self) -> None:
        """Keep this rank's shard in ``flat_param`` and free the unsharded storage. NO_SHARD: metadata only.

        Source: torch 2.13 ``FlatParamHandle.shard``.
        """
        flat_param = self.flat_param
        if not self.uses_sharded_strategy:
            self._init_shard_metadata(0, 0, flat_param.numel() - 1)
        else:
            if flat_param.storage_offset() != 0:
                raise AssertionError(
                    self._about(
                        "the flat parameter is not the sole occupant of its storage: expected offset 0, got "
                        f"offset {flat_param.storage_offset()}"
                    )
                )
            if self._unflattened is not None:
                shard, numel_padded = self._shard_of(self._unflattened)
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
        """Record which elements ``[start, end]`` (inclusive) of the unsharded flat parameter this rank has."""
        flat_param = self.flat_param
        if not 0 <= unsharded_start_idx <= unsharded_end_idx:
            raise AssertionError(self._about(f"an invalid shard [{unsharded_start_idx}, {unsharded_end_idx}]"))
        if numel_padded > flat_param.numel():
            raise AssertionError(
                self._about(f"a shard of {flat_param.numel()} elements cannot have {numel_padded} of padding")
            )
        infos = self._get_shard_metadata(unsharded_start_idx, unsharded_end_idx)
        if len(infos) != flat_param._num_params:
            raise AssertionError(self._about(f"Expects {flat_param._num_params} shard infos but got {len(infos)}"))
        flat_param._sharded_size = flat_param.size()
        flat_param._shard_param_infos = infos
        flat_param._shard_numel_padded = numel_padded

    def _get_shard_metadata(self, unsharded_start_idx: int, unsharded_end_idx: int) -> tuple[_ShardParamInfo, ...]:
        """The part of each original parameter in elements ``[start, end]`` (inclusive) of the unsharded flat parameter.

        Source: torch 2.13 ``FlatParamHandle._get_shard_metadata``.
        """
        offsets, mask = self._get_flat_param_offsets(), self.flat_param._is_padding_mask
        if len(offsets) != len(mask):
            raise AssertionError(self._about(f"Expects {len(mask)} offsets but got {len(offsets)}"))
        infos = []
        for (start, end), is_padding in zip(offsets, mask, strict=True):
            if is_padding:
                continue
            if unsharded_start_idx > end or unsharded_end_idx < start:
                infos.append(_NOT_IN_SHARD)
                continue
            first, last = max(start, unsharded_start_idx), min(end, unsharded_end_idx)
            infos.append(
                _ShardParamInfo(True, first - unsharded_start_idx, last - first + 1, first - start, last - start)
            )
        return tuple(infos)

    @staticmethod
    def _get_unpadded_shard(tensor: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
        """``rank``'s chunk of ``tensor``, a view, and the elements it lacks to be as long as the first one."""
        chunks = in_storage_order(tensor).chunk(world_size)
        chunk = chunks[rank] if rank < len(chunks) else chunks[0].new_empty(0)
        return chunk, chunks[0].numel() - chunk.numel()

    @staticmethod
    def _get_shard(tensor: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
        """``rank``'s chunk of ``tensor``, copied and padded with zeros, and how many elements are padding."""
        chunk, numel_to_pad = FlatParamHandle._get_unpadded_shard(tensor, rank, world_size)
        shard = chunk.clone()
        return (F.pad(shard, [0, numel_to_pad]) if numel_to_pad > 0 else shard), numel_to_pad

    @staticmethod
    def _get_sharded_size(tensor: Tensor, rank: int, world_size: int) -> torch.Size:
        """The size of the padded shard of a 1-D ``tensor``."""
        if tensor.dim() != 1:
            raise AssertionError(f"Expected 1D tensor shape, got {tensor.shape}")
        chunk, numel_to_pad = FlatParamHandle._get_unpadded_shard(tensor, rank, world_size)
        return torch.Size([chunk.numel() + numel_to_pad])

    def _get_flat_param_offsets(self) -> list[tuple[int, int]]:
        """First and last element (inclusive) in the unsharded flat parameter of each original one, and of padding."""
        numels = self.flat_param._numels_with_padding
        ends = list(accumulate(numels))
        return [(end - numel, end - 1) for numel, end in zip(numels, ends, strict=True)]

    def shard_metadata(self) -> FlatParamShardMetadata:
        """What this rank's shard holds of each original parameter; those that it does not hold are left out."""
        flat_param = self.flat_param
        held = [
            (fqn, shape, stride, contiguous, numel, (piece.intra_param_start_idx, piece.intra_param_end_idx))
            for fqn, shape, stride, contiguous, numel, piece in zip(
                flat_param._fqns,
                flat_param._shapes,
                flat_param._strides,
                flat_param._contiguities,
                flat_param._numels,
                flat_param._shard_param_infos,
                strict=True,
            )
            if piece.in_shard
        ]
        return FlatParamShardMetadata(*(tuple(field) for field in zip(*held, strict=True))) if held else _NOTHING_HELD

    @torch.no_grad()
    @torch.inference_mode(False)
    @temporarily_clear_interpreter_stack()
    def init_flat_param_attributes(self) -> None:
        """Make the tensors that unsharding needs, their storages freed. Run once, at the runtime's lazy initialization.

        Made outside of inference mode and torch.func's transforms, whatever the caller's: they outlive a first forward.
        Source: torch 2.13 ``FlatParamHandle.init_flat_param_attributes``.
        """
        flat_param = self.flat_param
        if flat_param.dtype != self._orig_param_dtype:  # the user changed it since; explicit settings win
            if not self._low_prec_param_dtype_specified:
                self._fwd_bwd_param_dtype = flat_param.dtype
            if not self._low_prec_reduce_dtype_specified and not self._low_prec_param_dtype_specified:
                self._reduce_dtype = flat_param.dtype
            self._orig_param_dtype = flat_param.dtype
        if self._offload_params:
            if flat_param.device.type != "cpu":
                raise AssertionError(
                    self._about(
                        "Expects the `FlatParameter` to be on CPU when parameter CPU offloading is enabled, not "
                        f"{flat_param.device}"
                    )
                )
        else:
            self._check_on_compute_device(flat_param)
        flat_param._local_shard = flat_param.data
        if self._offload_params:
            flat_param._local_shard = pinned(flat_param._local_shard)
            flat_param._cpu_grad = pinned(torch.zeros_like(flat_param._local_shard, device="cpu"))
        if self._uses_param_mixed_precision:
            flat_param._mp_shard = torch.empty_like(
                flat_param._local_shard, device=self.device, dtype=self._fwd_bwd_param_dtype
            )
            free(flat_param._mp_shard)
        if self.uses_sharded_strategy:
            mixed = self._uses_param_mixed_precision
            numel = flat_param.numel() * self.world_size
            flat_param._full_param_padded = torch.empty(
                numel, device=self.device, dtype=self._fwd_bwd_param_dtype if mixed else flat_param.dtype
            )
            flat_param._padded_unsharded_size = flat_param._full_param_padded.size()
            free(flat_param._full_param_padded)
            if mixed:
                flat_param._full_prec_full_param_padded = torch.empty(numel, device=self.device, dtype=flat_param.dtype)
                free(flat_param._full_prec_full_param_padded)

    # Unsharding

    def pre_unshard(self) -> bool:
        """Bring what is to be gathered into ``flat_param``: written back, on the device, in the dtype of computation.

        Returns whether anything was done. Source: torch 2.13 ``FlatParamHandle.pre_unshard``.
        """
        try:
            state = self._training_state
            if state is not HandleTrainingState.BACKWARD_PRE:
                self._keep_moved_shard()
            if state is HandleTrainingState.SUMMON_FULL_PARAMS and self._skipped_use_sharded_views:
                self._use_sharded_views()
            ran = False
            if self._use_orig_params and not self._skip_writeback_check:
                ran = self._writeback_orig_params()
            if self.uses_sharded_strategy and not self._offload_params and not self.needs_unshard():
                pass
            elif self._uses_param_mixed_precision and not self._force_full_precision:
                self._use_low_precision_shard()
                ran = True
            elif self._offload_params and self.flat_param.device != self.device:
                self.flat_param_to(self.device, non_blocking=True)
                ran = True
            self._check_on_compute_device(self.flat_param)
            return ran
        except BaseException:
            self._leave_summon()
            raise

    def _use_low_precision_shard(self) -> None:
        """Cast the shard into ``_mp_shard`` on the compute device, and let ``flat_param`` be that."""
        self._check_low_precision_shard()
        flat_param = self.flat_param
        allocate(flat_param._mp_shard, flat_param._local_shard.size())
        flat_param._mp_shard.copy_(flat_param._local_shard.to(self.device, non_blocking=True))
        flat_param.data = flat_param._mp_shard

    def unshard(self) -> None:
        """All-gather the flat parameter if it is not unsharded yet, and switch to the unsharded one.

        In ``SUMMON_FULL_PARAMS`` (and in eval with FSDP_USE_FULL_PREC_IN_EVAL=1) always in full precision.
        Source: torch 2.13 ``FlatParamHandle.unshard``.
        """
        if self._unshard_fused():
            return
        try:
            if self.needs_unshard():
                if self._freed_reason is None:
                    free(self._get_padded_unsharded_flat_param())  # take an earlier reason back
                unsharded = self._alloc_padded_unsharded_flat_param()
                unsharded = self._all_gather_flat_param(unsharded)
            elif self.uses_sharded_strategy:
                unsharded = self._get_padded_unsharded_flat_param()
            else:
                unsharded = self.flat_param
            self._use_unsharded_flat_param(unsharded)
        except BaseException:
            self._leave_summon()
            raise

    def needs_unshard(self) -> bool:
        """Whether the unsharded flat parameter has no memory now."""
        if not self.uses_sharded_strategy:
            return False
        unsharded = self._get_padded_unsharded_flat_param()
        return not is_allocated(unsharded)

    def _alloc_padded_unsharded_flat_param(self) -> Tensor:
        self._check_sharded_strategy()
        unsharded = self._get_padded_unsharded_flat_param()
        try:
            self._check_storage_freed(unsharded)
        except AssertionError as error:
            raise AssertionError(self._about(str(error))) from None
        allocate(unsharded, self.flat_param._padded_unsharded_size)
        return unsharded

    def _get_padded_unsharded_flat_param(self) -> Tensor:
        """The tensor to gather into: ``_full_param_padded``, or the full-precision one where that is forced.

        Forcing full precision frees the low-precision one: it may be modified meanwhile, and must be gathered again.
        """
        self._check_sharded_strategy()
        flat_param = self.flat_param
        if not (self._force_full_precision and self._uses_param_mixed_precision):
            return flat_param._full_param_padded
        unsharded = flat_param._full_prec_full_param_padded
        if unsharded.dtype == self._fwd_bwd_param_dtype:
            raise AssertionError(self._about(f"Expects full precision but got {self._fwd_bwd_param_dtype}"))
        self._free(flat_param._full_param_padded)
        return unsharded

    def _all_gather_flat_param(self, padded_unsharded_flat_param: Tensor) -> Tensor:
        """All-gather ``flat_param.data`` of every rank into ``padded_unsharded_flat_param``, which is returned."""
        if not (hasattr(self, "process_group") and hasattr(self, "world_size")):
            raise AssertionError(self._about("Expects a process group and world size, which this handle has no more"))
        shard = self.flat_param.data
        numel = shard.numel()
        if _C.is_plain(shard) and _C.storage_numel(shard) < shard.storage_offset() + numel:
            raise ValueError(
                self._about(
                    f"the storage of its shard has room for {_C.storage_numel(shard)} elements of {numel}: it was "
                    "freed or resized outside of flatparam, and its values are lost. Leave storages as they are"
                )
            )
        expected = numel * self.world_size
        if padded_unsharded_flat_param.numel() != expected:
            raise AssertionError(self._about(f"Expects {expected} numel but got {padded_unsharded_flat_param.numel()}"))
        group: Any = self._fake_process_group if self._use_fake_all_gather else self.process_group
        try:
            if shard.is_cpu:
                all_gather_chunks(self._chunks_of(padded_unsharded_flat_param), shard, group)
            else:
                all_gather_single(padded_unsharded_flat_param, shard, group)
        except BaseException:
            self._leave_memory(padded_unsharded_flat_param, shard)
            raise
        if self._offload_params:  # the shard was copied to the device on another stream
            _no_dispatch_record_stream(shard, self._device_handle.current_stream())
        return padded_unsharded_flat_param

    def _chunks_of(self, padded: Tensor) -> list[Tensor]:
        """Its equal chunks, one a rank; those of the tensor that was gathered last are kept."""
        kept, chunks = self._chunks
        if kept is not padded or not self._are_chunks(chunks, padded):
            chunks = padded.detach().chunk(self.world_size)  # not views of what refers to them: a cycle
            self._chunks = (padded, chunks) if _C.is_plain(padded, *chunks) else (None, ())
        return list(chunks)

    def _are_chunks(self, chunks: tuple[Tensor, ...], padded: Tensor) -> bool:
        """Whether ``padded`` still is what these are chunks of: a user may have set its data."""
        first = chunks[0]
        return (
            len(chunks) == self.world_size
            and first.numel() * self.world_size == padded.numel()
            and (first.dtype, first.storage_offset(), first.stride())
            == (padded.dtype, padded.storage_offset(), padded.stride())
            and same_storage(first, padded)
        )

    def _use_unsharded_flat_param(self, padded_unsharded_flat_param: Tensor) -> None:
        """Let ``flat_param`` be the unpadded part of the unsharded one, and the original parameters views of it."""
        flat_param = self.flat_param
        flat_param.data = padded_unsharded_flat_param[: flat_param._unpadded_unsharded_size.numel()]
        in_forward = self._training_state == HandleTrainingState.FORWARD
        in_pre_backward = self._training_state == HandleTrainingState.BACKWARD_PRE
        if in_forward and self._uses_param_mixed_precision:
            self._note_accumulator()
        if self._use_orig_params:
            if self._skipped_use_sharded_views and in_pre_backward:
                return  # forward's views are still in place
            self._use_unsharded_views(as_params=not in_forward and not in_pre_backward)
        elif in_forward:
            self._use_unsharded_views(as_params=False)

    def post_unshard(self) -> None:
        """Free the low-precision shard, which has been gathered."""
        if self._uses_param_mixed_precision and self.uses_sharded_strategy:
            self._free_low_precision_sharded_param()
        self._check_on_compute_device(self.flat_param)

    def _free_low_precision_sharded_param(self) -> None:
        self._check_low_precision_shard()
        self._free_after_use(self.flat_param._mp_shard)

    @contextlib.contextmanager
    def to_cpu(self) -> Generator[None, None, None]:
        """In the context the unsharded flat parameter lies on the CPU; its memory on the device is freed meanwhile.

        Where it lies there already it stays as it is (torch before 2.15 reads freed memory then: pytorch#188989).
        Source: torch 2.15 ``FlatParamHandle.to_cpu``.
        """
        self._check_sharded_strategy()
        self._check_unsharded(self.flat_param)
        self._check_on_compute_device(self.flat_param)
        if not same_storage(self.flat_param, self._get_padded_unsharded_flat_param()):
            raise AssertionError(self._about("expects the unpadded parameter to be a view into the padded one"))
        with contextlib.nullcontext() if self.flat_param.is_cpu else self._offload_to_cpu():
            yield

    @contextlib.contextmanager
    def _offload_to_cpu(self) -> Generator[None, None, None]:
        self.flat_param_to(torch.device("cpu"), copy=True)
        self._free_unsharded_flat_param()
        try:
            yield
        finally:
            self._restore_unsharded_flat_param_from_cpu()

    def _restore_unsharded_flat_param_from_cpu(self) -> None:
        self._check_unsharded(self.flat_param)
        unsharded = self._alloc_padded_unsharded_flat_param()
        unsharded[: self.flat_param.numel()].copy_(self.flat_param.detach())
        self._use_unsharded_flat_param(unsharded)

    # Resharding

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Switch to the sharded flat parameter; then free the unsharded one if asked.

        In that order: at no time do the original parameters point to freed memory.
        """
        if not self._reshard_fused(free_unsharded_flat_param):
            try:
                self._use_sharded_flat_param()
                if free_unsharded_flat_param:
                    self._free_unsharded_flat_param()
            except BaseException:
                self._leave_summon()
                raise
        if not free_unsharded_flat_param and self._training_state is HandleTrainingState.FORWARD:
            self._note_left_gathered()

    def post_reshard(self) -> None:
        """NO_SHARD: free the low-precision copy, which was the unsharded parameter of the computation."""
        if self._uses_param_mixed_precision and not self.uses_sharded_strategy and not self._force_full_precision:
            self._free_low_precision_sharded_param()

    def _free_unsharded_flat_param(self) -> None:
        """Free the unsharded flat parameter's memory, if it has any."""
        self._check_sharded_strategy()
        unsharded = self._get_padded_unsharded_flat_param()
        self._check_on_compute_device(unsharded)
        self._free_after_use(unsharded)

    def _free_after_use(self, tensor: Tensor) -> None:
        """Free the memory of ``tensor``, if it has any, once the current stream has come so far."""
        if has_memory(tensor):
            _no_dispatch_record_stream(tensor, self._device_handle.current_stream())
            self._free(tensor)

    def _use_sharded_flat_param(self) -> None:
        """Let ``flat_param`` be the local shard, and the original parameters and gradients pieces of it.

        Source: torch 2.13 ``FlatParamHandle._use_sharded_flat_param``.
        """
        flat_param = self.flat_param
        in_forward = self._training_state == HandleTrainingState.FORWARD
        skip_views = (
            self._use_orig_params
            and in_forward
            and torch.is_grad_enabled()
            and self._sharding_strategy in NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES
        )
        unsharded = flat_param.data if skip_views else None
        if self._offload_params and flat_param._local_shard.device.type != "cpu":
            raise AssertionError(
                self._about(f"Expects the local shard to be on CPU but got {flat_param._local_shard.device}")
            )
        if self._offload_params and not self.uses_sharded_strategy:  # nothing else has noted who reads the copy
            _no_dispatch_record_stream(flat_param.data, self._device_handle.current_stream())
        flat_param.data = flat_param._local_shard
        if in_forward:
            self._let_model_go_without_backward()
        elif not self._use_orig_params:
            self._note_grads_left_by_backward()
        if not self._use_orig_params:
            return
        if skip_views:
            self._unsharded_flat_param_for_skipped_views = unsharded
            return  # gradients stay as they are too: sharded ones beside unsharded parameters would confuse
        self._use_sharded_views()
        if in_forward:  # after backward the runtime does this when the gradient has been reduced
            self._show_grads_after_forward()

    def _let_model_go_without_backward(self) -> None:
        """Make the runtime's post-backward hook refer weakly to the model.

        It hangs on the node that accumulates the flat gradient, which forward's views keep, which the flat parameter
        keeps: a model deleted after a forward that no backward follows would stay for good (pytorch PR 183211).
        """
        state = getattr(self.flat_param, "_post_backward_hook_state", None)
        hook_handle: Any = state[-1] if isinstance(state, tuple) and state else None
        hooks_of = getattr(hook_handle, "hooks_dict_ref", None)
        if hooks_of is None:
            return  # of a frozen unit the hooks are on the inputs, which are not kept
        hooks: Any = hooks_of()
        hook = hooks.get(hook_handle.id) if hooks else None
        if isinstance(hook, functools.partial) and hook.func is not _call_if_alive:
            hooks[hook_handle.id] = functools.partial(_call_if_alive, hook.func, *map(weakref.ref, hook.args))

    # Helpers

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """``flat_param.data = flat_param.to(...)``, and the original parameters with it.

        With NO_SHARD ``_local_shard`` is the same tensor and moves too, so that the old memory is freed.
        """
        flat_param = self.flat_param
        local_shard = getattr(flat_param, "_local_shard", None)
        is_local_shard = (
            local_shard is not None and not self.uses_sharded_strategy and same_storage(local_shard, flat_param)
        )
        flat_param.data = flat_param.to(*args, **kwargs)
        if is_local_shard:
            flat_param._local_shard = flat_param.data
        if not self._use_orig_params:
            return
        if self.is_sharded(flat_param):
            self._use_sharded_views()
        else:
            self._use_unsharded_views(as_params=True)

    def _deregister_orig_params(self) -> None:
        """Take the original parameters off their modules, as ``module.to()`` does for as long as it moves the flat one.

        The runtime then shows those of the flat parameter again, and its gradient. What the user has put in place of
        them (a gradient of None, by ``zero_grad()``) is therefore taken in before; torch brings back what was there.
        """
        flat_param = self.flat_param
        infos = (*flat_param._param_infos, *flat_param._shared_param_infos)
        if hasattr(flat_param, "_shard_param_infos") and all(hasattr(info.module, info.param_name) for info in infos):
            self._reset_flat_param_grad_info_if_needed()
            if not self._skip_writeback_check:
                self._writeback_orig_params()
        super()._deregister_orig_params()

    def _get_modules(self) -> set[nn.Module]:
        infos = (*self.flat_param._param_infos, *self.flat_param._shared_param_infos)
        return {info.module for info in infos}

    def param_module_names(self) -> Iterator[tuple[str, str]]:
        """``(parameter name, module name)`` of every original parameter, shared ones under each name."""
        infos: chain[Any] = chain(self.flat_param._param_infos, self.flat_param._shared_param_infos)
        return ((info.param_name, info.module_name) for info in infos)

    def shared_param_module_names(self) -> Iterator[tuple[str, str]]:
        """The same for the further names of shared parameters only."""
        return ((info.param_name, info.module_name) for info in self.flat_param._shared_param_infos)

    @property
    def _fqns_in_shard(self) -> list[str]:
        flat_param = self.flat_param
        pieces = zip(flat_param._fqns, flat_param._shard_param_infos, strict=True)
        return [fqn for fqn, piece in pieces if piece.in_shard]


def _call_if_alive(hook: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``hook``, of whose arguments the first ones are weak references; nothing once one of them is gone."""
    strong = [argument() if isinstance(argument, weakref.ref) else argument for argument in arguments]
    if not any(argument is None and given is not None for argument, given in zip(strong, arguments, strict=True)):
        return hook(*strong)
    return None


_NOT_IN_SHARD = _ShardParamInfo(False, None, None, None, None)
_NOTHING_HELD = FlatParamShardMetadata((), (), (), (), (), ())
FlatParamHandle._own_attributes = {
    name: getattr(FlatParamHandle, name) for name in dir(FlatParamHandle) if not name.startswith("__")
}
FlatParamHandle._own_methods = {
    name: value
    for name, value in FlatParamHandle._own_attributes.items()
    if callable(value) or isinstance(value, property)
} | {"__getattribute__": FlatParamHandle.__getattribute__}
