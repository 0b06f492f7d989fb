"""The path of the parameters: master, zero3 shard, unsharded, and back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..common.collectives import gathering
from ..common.storage import allocate, is_allocated
from ..fsdp import order
from ._freshness import Freshness
from .metadata import with_places
from .states import BACKWARD_PRE, FORWARD, IDLE, IN_BACKWARD, SUMMON_FULL_PARAMS, SYNC_PARAMS


class Parameters(Freshness):
    """The part of the handle that shards, unshards and reshards."""

    _ag_handle: Any = None
    _ag_group: Any = None
    _was_given_up = False  # a wait for it, by Ctrl-C say
    _gather_source: Tensor | None = None  # kept while it is read
    _is_from_masters = False  # what was gathered, and no reshard has taken a zero3 shard of it yet
    _is_unsharded = False  # whether flat_param is the unsharded one

    @torch.no_grad()
    def shard(self) -> None:
        """Keep this rank's zero1 shard as the master, in ``full_prec_dtype``, and free the unsharded storage."""
        flat_param = self.flat_param
        if flat_param.storage_offset() != 0:
            raise AssertionError(self._about("the flat parameter is not the sole occupant of its storage"))
        shard, padding = self._get_shard(flat_param, self.zero1_group_rank, self.zero1_world_size)
        unsharded = flat_param.data
        flat_param._zero1_shard = shard.to(self.full_prec_dtype)
        flat_param._zero3_shard = None
        flat_param.data = flat_param._zero1_shard
        self._free(unsharded)
        start = shard.numel() * self.zero1_group_rank
        self._init_shard_metadata(padding, start, start + shard.numel() - 1)
        self._use_sharded_views()

    def _get_shard_metadata(self, unsharded_start_idx: int, unsharded_end_idx: int) -> tuple[Any, ...]:
        infos = super()._get_shard_metadata(unsharded_start_idx, unsharded_end_idx)
        return with_places(infos, self._get_flat_param_offsets(), self.flat_param._is_padding_mask)

    @staticmethod
    def _get_shard_from_padded_unshard_tensor(tensor: Tensor, rank: int, world_size: int) -> Tensor:
        """A copy of ``rank``'s part of ``tensor``, whose elements must be a multiple of ``world_size``."""
        if tensor.numel() % world_size:
            raise AssertionError(f"expected a multiple of {world_size} elements, got {tensor.numel()}")
        return Freshness._get_shard(tensor, rank, world_size)[0]

    @torch.no_grad()
    @torch.inference_mode(False)
    def init_flat_param_attributes(self) -> None:
        """Make the tensors of a step, without memory. Once, when ``flat_param`` is sharded and on its device."""
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
            *([("_full_prec_full_param_padded", full)] if self._uses_param_mixed_precision else []),
        ):
            tensor = torch.empty(size, device=self.device, dtype=dtype)
            self._free(tensor)
            setattr(flat_param, name, tensor)

    # The unsharded tensors

    def _get_padded_unsharded_flat_tensor(self, param: bool = True, free: bool = True) -> Tensor:
        """The unsharded parameter, or gradient; its memory is given back if ``free``."""
        tensor: Tensor = self.flat_param._full_param_padded if param else self.flat_param._full_grad_padded
        if free:
            self._free_unsharded_flat_tensor(param)
        return tensor

    def _alloc_padded_unsharded_flat_tensor(self, param: bool = True) -> Tensor:
        tensor = self._get_padded_unsharded_flat_tensor(param, free=False)
        self._check_storage_freed(tensor)
        allocate(tensor, self.flat_param._padded_unsharded_size)
        return tensor

    def _free_unsharded_flat_tensor(self, param: bool = True) -> None:
        if param:
            self._gathered = self._confirmed = False
        self._free(self._get_padded_unsharded_flat_tensor(param, free=False))

    # Unsharding

    def needs_unshard(self) -> bool:
        """Whether ``unshard()`` has anything to do: to gather, to ask if what was kept is fresh, or to switch to it."""
        if not self._is_unsharded or self._was_given_up or self._training_state is SUMMON_FULL_PARAMS:
            return True
        return not self._gathered or not (self._confirmed or self._training_state in IN_BACKWARD)

    def pre_unshard(self) -> bool:
        """Write back what was put in place of parameters, and allocate. Returns whether anything was done."""
        if not hasattr(self.flat_param, "_full_param_padded"):
            self.init_flat_param_attributes()
        wrote = self._write_back()
        self._check_on_compute_device(self.flat_param)
        return self._allocate_to_gather() or wrote

    def _write_back(self) -> bool:
        """Copy into the master what the user has put in place of parameters; whether there was any."""
        return not self._skip_writeback_check and not self._is_unsharded and self._writeback_orig_params()

    def _allocate_to_gather(self) -> bool:
        tensor = self._get_padded_unsharded_flat_param()
        if is_allocated(tensor):
            return False
        allocate(tensor, self.flat_param._padded_unsharded_size)
        return True

    def unshard(self) -> None:
        """Gather what is not gathered yet, or is no longer fresh, and switch to it.

        From the masters over the zero1 group where they have changed, else from the zero3 shards over theirs; in
        SUMMON_FULL_PARAMS from the masters, in full precision. The data are there after ``post_unshard()``.
        """
        if not hasattr(self.flat_param, "_full_param_padded"):
            raise AssertionError(self._about("call pre_unshard() before unshard()"))
        self._allocate_to_gather()
        padded = self._get_padded_unsharded_flat_param()
        if self._training_state is SUMMON_FULL_PARAMS:
            self._gathered = self._is_from_masters = False
            self._gather(padded, self.flat_param._zero1_shard, self.zero1_process_group)
        else:
            self._all_gather_flat_param(padded)
        self._use_unsharded_flat_param(padded)

    def _all_gather_flat_param(self, padded_unsharded_flat_param: Tensor) -> Tensor:
        """Fill ``padded_unsharded_flat_param``, unless it has fresh values."""
        flat_param, padded = self.flat_param, padded_unsharded_flat_param
        if self._gathered and (self._confirmed or self._training_state in IN_BACKWARD):
            return padded
        from_masters = self._must_refresh()
        if from_masters:
            self._refuse_older_graphs()
            self._gather(padded, flat_param._zero1_shard.to(self._fwd_bwd_param_dtype), self.zero1_process_group)
            self._seen = self._now
            self._is_from_masters = True
        elif not self._gathered:
            self._gather(padded, flat_param._zero3_shard, self.zero3_process_group)
        self._gathered = self._confirmed = True
        return padded

    def _refuse_older_graphs(self) -> None:
        """Let autograd refuse graphs of forwards with other weights, as it does for an unsharded module."""
        if self._seen[0] != -1 and self._is_changed_here:
            torch.autograd.graph.increment_version(self.flat_param)

    def _gather(self, padded: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
        expected = shard.numel() * group.size()
        if padded.numel() != expected:
            raise AssertionError(self._about(f"expects {expected} elements to gather into, got {padded.numel()}"))
        self.wait_unshard()
        if group.size() == 1:
            with torch.no_grad():
                padded.copy_(shard)
            return
        self._gather_source, self._ag_group = shard.detach(), group
        self._ag_handle = order.issue(gathering(), padded, self._gather_source, group=group)

    def wait_unshard(self) -> None:
        """Wait for the gather: the host on the CPU, the current stream on an accelerator."""
        if self._ag_handle is not None:
            self._was_given_up = True
            try:
                order.wait(self._ag_handle, self._ag_group, self.device)
            except RuntimeError:
                if self._ag_handle.is_completed():  # it has failed
                    self._ag_handle = self._gather_source = None
                    self._gathered = self._confirmed = self._is_from_masters = False
                    self._forget_what_was_gathered()
                raise
        self._was_given_up = False
        self._ag_handle = self._gather_source = None

    def post_unshard(self) -> None:
        """Wait for the gather."""
        self.wait_unshard()
        self._check_on_compute_device(self.flat_param)

    def _use_unsharded_flat_param(self, padded_unsharded_flat_param: Tensor) -> None:
        """Let ``flat_param`` be the unsharded one; the modules have views in forward and backward, else parameters."""
        flat_param, padded, state = self.flat_param, padded_unsharded_flat_param, self._training_state
        self._is_unsharded = True
        in_forward = state is FORWARD
        again = state is BACKWARD_PRE and flat_param._tensors[0] is not None
        if (in_forward or state is BACKWARD_PRE) and self._loops_in_c(padded):
            views = self._unit.use_unsharded(flat_param, padded, flat_param._tensors, again, in_forward, self._unsafe)
            if views is not None:
                flat_param._tensors[:] = views
                return
        flat_param.data = padded[: flat_param._unpadded_unsharded_size.numel()]
        if state is BACKWARD_PRE and not again:
            with torch.enable_grad():
                flat_param._tensors[:] = self._get_unflat_views()
        self._use_unsharded_views(as_params=not in_forward and state is not BACKWARD_PRE)

    _use_unpadded_unsharded_flat_param = _use_unsharded_flat_param

    # Resharding

    @torch.no_grad()
    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Switch to the master; take the zero3 shard if the masters were gathered; free the unsharded one if asked.

        With a zero3 group of one rank the unsharded parameter is the zero3 shard, and is not freed.
        """
        flat_param = self.flat_param
        self.wait_unshard()
        summoned = self._training_state is SUMMON_FULL_PARAMS
        if self._is_from_masters:
            self._is_from_masters = False
            if self._has_zero3_copy:
                with torch.inference_mode(False):  # it outlives a forward in that
                    flat_param._zero3_shard = self._get_shard_from_padded_unshard_tensor(
                        flat_param._full_param_padded, self.zero3_group_rank, self.zero3_group_size
                    )
            elif self._stays_unsharded:
                flat_param._zero3_shard = flat_param._full_param_padded.detach()
            self._param_synced = True
        self._confirmed, self._agreed = False, None
        self._use_sharded_flat_param()
        if summoned:
            self._free(self._get_padded_unsharded_flat_param())
            if self._stays_unsharded:
                flat_param._zero3_shard = None  # it was freed, or may have been written to
        elif free_unsharded_flat_param and not (self._stays_unsharded and self._gathered):
            self._free_unsharded_flat_param()
            self._gathered = False

    def post_reshard(self) -> None:
        """Nothing: for symmetry with ``post_unshard()``."""

    def _use_sharded_flat_param(self) -> None:
        flat_param = self.flat_param
        self._is_unsharded = False
        flat_param.data = flat_param._zero1_shard
        self._use_sharded_views()

    def sync_params(self) -> None:
        """Take what is forwarded with from the masters now, where they have changed: after a load, before evaluation.

        IDLE -> SYNC_PARAMS -> IDLE; all ranks call it. Raises: RuntimeError in any other state.
        """
        self._training_state = SYNC_PARAMS
        try:
            self._agreed = None
            if self._has_zero3_copy or self._stays_unsharded:
                self.pre_unshard()
                if self._must_refresh():
                    self._agreed, self._confirmed = True, False
                    self.unshard()
                    self.post_unshard()
                self.reshard(True)
                self.post_reshard()
        finally:
            self._agreed = None
            self._training_state = IDLE

    def _forget_what_was_gathered(self) -> None:
        """The masters are about to change: the next unshard gathers from them."""
        self._param_synced = False
        self.flat_param._zero3_shard = None
