"""The path of parameters through the handle: from the master or the zero3 shard to the unsharded one, and back.

| tensor | shape | dtype | memory |
|---|---|---|---|
| ``_zero1_shard``, the master | ``[N / ranks of zero1]`` | ``full_prec_dtype`` | always |
| ``_zero3_shard`` | ``[N / ranks of zero3]`` | ``param_dtype`` | from a gather of masters until these change |
| ``_full_param_padded`` | ``[N]`` | ``param_dtype`` | while unsharded |
| ``_full_prec_full_param_padded`` | ``[N]`` | ``full_prec_dtype`` | in SUMMON_FULL_PARAMS |
"""

from typing import Any

import torch
from torch import Tensor

from ..common.tensors import allocate, pinned
from ..dropin.handle import FlatParamHandle as FlatParam
from ..fsdp.desync import checked_collectives
from ._freshness import Freshness
from .metadata import with_places
from .states import BACKWARD_PRE, FORWARD, SUMMON_FULL_PARAMS


class Parameters(Freshness):
    """The part of the handle that shards, unshards and reshards."""

    _ag_group: Any = None

    @torch.no_grad()
    def shard(self) -> None:
        """Copy this rank's zero1 shard as the master, in ``full_prec_dtype``, and free the unsharded storage."""
        flat_param = self.flat_param
        if flat_param.storage_offset() != 0:
            raise AssertionError(self._about("the flat parameter is not the sole occupant of its storage"))
        shard, padding = FlatParam._get_shard(flat_param, self.zero1_group_rank, self.zero1_world_size)
        unsharded = flat_param.data
        flat_param._zero1_shard = shard.to(self.full_prec_dtype)
        flat_param._zero3_shard = None
        flat_param.data = flat_param._zero1_shard
        self._free(unsharded)
        start = shard.numel() * self.zero1_group_rank
        self._flat._init_shard_metadata(padding, start, start + shard.numel() - 1)
        flat_param._shard_param_infos = with_places(
            flat_param._shard_param_infos, self._flat._get_flat_param_offsets(), flat_param._is_padding_mask
        )
        self._flat._use_sharded_views()

    @staticmethod
    def _get_shard_from_padded_unshard_tensor(tensor: Tensor, rank: int, world_size: int) -> Tensor:
        """Return a copy of ``rank``'s part of ``tensor``, whose numel must be a multiple of ``world_size``."""
        if tensor.numel() % world_size:
            raise AssertionError(f"expected a multiple of {world_size} elements, got {tensor.numel()}")
        return FlatParam._get_shard(tensor, rank, world_size)[0]

    @torch.no_grad()
    @torch.inference_mode(False)
    def init_flat_param_attributes(self) -> None:
        """Make the tensors of a step, without memory. Called once, when ``flat_param`` is sharded and on its device."""
        flat_param = self.flat_param
        if not hasattr(flat_param, "_zero1_shard"):
            raise AssertionError(self._about("expects to be sharded: call shard() first"))
        self._check_on_compute_device(flat_param)
        size = torch.Size([flat_param.numel() * self.zero1_world_size])
        low, full = self._fwd_bwd_param_dtype, self.full_prec_dtype
        flat_param._padded_unsharded_size = size
        for name, dtype in (
            ("_full_param_padded", low),
            ("_full_grad_padded", low),
            ("_full_prec_grad_padded", full),
            *([("_full_prec_full_param_padded", full)] if low != full else []),
        ):
            tensor = torch.empty(size, device=self.device, dtype=dtype)
            self._free(tensor)
            setattr(flat_param, name, tensor)
        if self._offload_grads:
            flat_param._cpu_grad = pinned(torch.zeros(size, dtype=full, device="cpu"))
        self._bind_buffers()

    # The unsharded tensors

    def _get_padded_unsharded_flat_tensor(self, param: bool = True, free: bool = True) -> Tensor:
        """Return the unsharded parameter, or with ``param=False`` the gradient. ``free``: free its memory first."""
        tensor: Tensor = self.flat_param._full_param_padded if param else self.flat_param._full_grad_padded
        if free:
            self._free_unsharded_flat_tensor(param)
        return tensor

    def _allocate_by_ops(self, tensor: Tensor) -> None:
        allocate(tensor, self.flat_param._padded_unsharded_size)

    def _alloc_padded_unsharded_flat_tensor(self, param: bool = True) -> Tensor:
        tensor = self._get_padded_unsharded_flat_tensor(param, free=False)
        self._flat._check_storage_freed(tensor)
        allocate(tensor, self.flat_param._padded_unsharded_size)
        return tensor

    def _free_unsharded_flat_tensor(self, param: bool = True) -> None:
        if param:
            self._gathered = self._confirmed = False
        self._free(self._get_padded_unsharded_flat_tensor(param, free=False))

    def _get_padded_to_gather_into(self) -> Tensor:
        """Return the tensor to gather into: in SUMMON_FULL_PARAMS the full-precision one, if there is one.

        The low-precision one is freed then: the user may change the parameters, and it would be outdated.
        """
        flat_param = self.flat_param
        padded: Tensor = flat_param._full_param_padded
        if self._state is SUMMON_FULL_PARAMS and hasattr(flat_param, "_full_prec_full_param_padded"):
            self._free(padded)
            padded = flat_param._full_prec_full_param_padded
        return padded

    # Unsharding

    def _write_back_by_ops(self) -> bool:
        flat_param = self.flat_param
        if self._flat._skip_writeback_check or not self._flat.is_sharded(flat_param):
            return False
        if self._is_shown:
            self._notice_cleared_grads()
        elif flat_param.grad is not None and not self._in_backward:
            self._drop_cleared_grad()
        return self._flat._writeback_orig_params()

    def _refuse_unshard(self) -> None:
        raise AssertionError(self._about("call pre_unshard() before unshard()"))

    def _gather_masters(self, padded: Tensor) -> None:
        """Gather the masters into ``padded``: in full precision in SUMMON_FULL_PARAMS, else in ``param_dtype``."""
        shard = self.flat_param._zero1_shard
        if self._state is SUMMON_FULL_PARAMS:
            self._gathered = self._is_from_masters = False
            self._gather(padded, shard, from_masters=True)
            return
        if self._seen_values != -1 and self._is_changed_here:  # autograd then refuses graphs of the old weights
            torch.autograd.graph.increment_version(self.flat_param)
        self._gather(padded, shard.to(self._fwd_bwd_param_dtype), from_masters=True)
        self._note_fresh()
        self._is_from_masters = True

    def _gather(self, padded: Tensor, shard: Tensor, from_masters: bool = False) -> None:
        if from_masters:
            group, ranks, native = self.zero1_process_group, self.zero1_world_size, self._zero1_gather
        else:
            group, ranks, native = self.zero3_process_group, self.zero3_group_size, self._zero3_gather
        expected = shard.numel() * ranks
        if padded.numel() != expected:
            raise AssertionError(self._about(f"expects {expected} elements to gather into, got {padded.numel()}"))
        self.wait_unshard()
        if ranks == 1:
            with torch.no_grad():
                padded.copy_(shard)
            return
        self._gather_source, self._ag_group = shard, group
        self._ag_handle = checked_collectives.begin_gather(native, padded, shard, group)

    def _wait_for_gather(self, error: Exception | None) -> None:
        """Wait for the gather, or raise. ``error``: an exception that a wait in C has raised already.

        Raises: RuntimeError if the gather failed: the unit is then not gathered. After another exception the gather
        may go on, and its memory is kept.
        """
        self._was_given_up = True
        group = self.zero3_process_group if self._ag_handle is self._zero3_gather else self._ag_group
        try:
            checked_collectives.wait(self._ag_handle, group, self.device, error=error)
        except RuntimeError:
            if self._ag_handle.is_completed():  # it has failed
                self._ag_handle = self._gather_source = None
                self._gathered = self._confirmed = self._is_from_masters = False
                self._forget_what_was_gathered()
            raise
        self._was_given_up = False
        self._ag_handle = self._gather_source = None

    def _use_unsharded_by_ops(self, padded: Tensor) -> None:
        flat_param, state = self.flat_param, self._state
        again = state is BACKWARD_PRE and flat_param._tensors[0] is not None
        flat_param.data = padded[: flat_param._unpadded_unsharded_size.numel()]
        if state is BACKWARD_PRE and not again:
            with torch.enable_grad():
                flat_param._tensors[:] = self._flat._get_unflat_views()
        self._flat._use_unsharded_views(as_params=state is not FORWARD and state is not BACKWARD_PRE)

    # Resharding

    def _free_summoned(self) -> None:
        self._free(self._get_padded_to_gather_into())
        if self._stays_unsharded:
            self.flat_param._zero3_shard = None  # it may be freed or written to

    @torch.no_grad()
    def _take_zero3_shard(self) -> None:
        flat_param = self.flat_param
        self._is_from_masters = False
        if self._has_zero3_copy:
            with torch.inference_mode(False):  # it outlives a forward in inference mode
                flat_param._zero3_shard = self._get_shard_from_padded_unshard_tensor(
                    flat_param._full_param_padded, self.zero3_group_rank, self.zero3_group_size
                )
        elif self._stays_unsharded:
            flat_param._zero3_shard = flat_param._full_param_padded.detach()
        self._param_synced = True

    def post_reshard(self) -> None:
        """Do nothing. The method exists for symmetry with ``post_unshard()``."""

    def _use_sharded_by_ops(self) -> None:
        self.flat_param.data = self.flat_param._zero1_shard
        self._flat._use_sharded_views()

    def _forget_what_was_gathered(self) -> None:
        """Drop the zero3 shard, as the masters are about to change: the next unshard gathers from them."""
        self._param_synced = False
        self.flat_param._zero3_shard = None
