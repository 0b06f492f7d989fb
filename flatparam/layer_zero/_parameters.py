"""The path of the parameters: master, zero3 shard, unsharded, and back."""

from typing import Any

import torch
from torch import Tensor

from ..common.tensors import allocate, pinned
from ..dropin.handle import FlatParamHandle as FlatParam
from ..fsdp import order
from ._freshness import Freshness
from .metadata import with_places
from .states import BACKWARD_POST, BACKWARD_PRE, FORWARD, SUMMON_FULL_PARAMS


class Parameters(Freshness):
    """The part of the handle that shards, unshards and reshards."""

    _ag_handle: Any = None
    _ag_group: Any = None
    _gather_source: Tensor | None = None  # kept while it is read
    _was_given_up = False  # a wait for it, by Ctrl-C say
    _is_from_masters = False  # what was gathered, and no reshard has taken a zero3 shard of it yet

    @torch.no_grad()
    def shard(self) -> None:
        """Keep this rank's zero1 shard as the master, in ``full_prec_dtype``, and free the unsharded storage."""
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
        """A copy of ``rank``'s part of ``tensor``, whose elements must be a multiple of ``world_size``."""
        if tensor.numel() % world_size:
            raise AssertionError(f"expected a multiple of {world_size} elements, got {tensor.numel()}")
        return FlatParam._get_shard(tensor, rank, world_size)[0]

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
            *([("_full_prec_full_param_padded", full)] if low != full else []),
        ):
            tensor = torch.empty(size, device=self.device, dtype=dtype)
            self._free(tensor)
            setattr(flat_param, name, tensor)
        if self._offload_grads:
            flat_param._cpu_grad = pinned(torch.zeros(size, dtype=full, device="cpu"))

    # The unsharded tensors

    def _get_padded_unsharded_flat_tensor(self, param: bool = True, free: bool = True) -> Tensor:
        """The unsharded parameter, or gradient; its memory is given back if ``free``."""
        tensor: Tensor = self.flat_param._full_param_padded if param else self.flat_param._full_grad_padded
        if free:
            self._free_unsharded_flat_tensor(param)
        return tensor

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
        """In SUMMON_FULL_PARAMS the full-precision one: the other is freed, as the user may change the parameters."""
        flat_param = self.flat_param
        padded: Tensor = flat_param._full_param_padded
        if self._state is SUMMON_FULL_PARAMS and hasattr(flat_param, "_full_prec_full_param_padded"):
            self._free(padded)
            padded = flat_param._full_prec_full_param_padded
        return padded

    # Unsharding

    def needs_unshard(self) -> bool:
        """Whether ``unshard()`` has anything to do: to gather, to ask if what was kept is fresh, or to switch to it."""
        if not self._is_unsharded or self._was_given_up or self._state is SUMMON_FULL_PARAMS:
            return True
        return not self._is_settled

    @property
    def _is_settled(self) -> bool:
        """Whether what was gathered is good without asking."""
        return self._gathered and (self._confirmed or self._in_backward_state)

    def pre_unshard(self) -> bool:
        """Write back what was put in place of parameters, and allocate. Returns whether anything was done."""
        if not hasattr(self.flat_param, "_full_param_padded"):
            self.init_flat_param_attributes()
        wrote = self._write_back()
        self._check_on_compute_device(self.flat_param)
        return allocate(self._get_padded_to_gather_into(), self.flat_param._padded_unsharded_size) or wrote

    def _write_back(self) -> bool:
        """Copy into the master what the user has put in place of parameters; whether there was any."""
        flat_param, unit = self.flat_param, self._unit
        if self._is_unsharded or self._flat._skip_writeback_check or not self._flat.is_sharded(flat_param):
            return False
        if self._shown is not None:
            self._notice_cleared_grads()
        grad = flat_param.grad
        if grad is not None and self._shown is None and not self._in_backward:
            grad = self._drop_cleared_grad()
        as_put = (
            unit is not None
            and not flat_param._shared_param_infos
            and unit.scan(flat_param._params, flat_param, grad, flat_param._shard_param_infos) == []
        )
        return not as_put and self._flat._writeback_orig_params()

    def unshard(self) -> None:
        """Gather what is not gathered yet, or is no longer fresh, and switch to it.

        From the masters over the zero1 group where they have changed, else from the zero3 shards over theirs; in
        SUMMON_FULL_PARAMS from the masters, in full precision. The data are there after ``post_unshard()``.
        """
        if not hasattr(self.flat_param, "_full_param_padded"):
            raise AssertionError(self._about("call pre_unshard() before unshard()"))
        padded = self._get_padded_to_gather_into()
        allocate(padded, self.flat_param._padded_unsharded_size)
        if self._state is SUMMON_FULL_PARAMS:
            self._gathered = self._is_from_masters = False
            self._gather(padded, self.flat_param._zero1_shard, from_masters=True)
        else:
            self._all_gather_flat_param(padded)
        self._use_unsharded_flat_param(padded)

    def _all_gather_flat_param(self, padded_unsharded_flat_param: Tensor) -> Tensor:
        """Fill ``padded_unsharded_flat_param``, unless it has fresh values."""
        flat_param, padded = self.flat_param, padded_unsharded_flat_param
        if self._is_settled:
            return padded
        from_masters = self._must_refresh()
        if from_masters:
            self._refuse_older_graphs()
            self._gather(padded, flat_param._zero1_shard.to(self._fwd_bwd_param_dtype), from_masters=True)
            self._seen = self._now
            self._is_from_masters = True
        elif not self._gathered:
            self._gather(padded, flat_param._zero3_shard)
        self._gathered = self._confirmed = True
        return padded

    def _refuse_older_graphs(self) -> None:
        """Let autograd refuse graphs of forwards with other weights, as it does for an unsharded module."""
        if self._seen[0] != -1 and self._is_changed_here:
            torch.autograd.graph.increment_version(self.flat_param)

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
        self._ag_handle = order.begin_gather(native, padded, shard, group)

    def wait_unshard(self) -> None:
        """Wait for the gather: the host on the CPU, the current stream on an accelerator."""
        if self._ag_handle is None:
            return
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

    post_unshard = wait_unshard

    def _use_unsharded_flat_param(self, padded_unsharded_flat_param: Tensor) -> None:
        """Let ``flat_param`` be the unsharded one; the modules have views in forward and backward, else parameters."""
        flat_param, padded, state = self.flat_param, padded_unsharded_flat_param, self._state
        self._is_unsharded = True
        in_forward = state is FORWARD
        again = state is BACKWARD_PRE and flat_param._tensors[0] is not None
        if (in_forward or state is BACKWARD_PRE) and self._unit is not None:
            unsafe = self._flat._unsafe
            views = self._unit.use_unsharded(flat_param, padded, flat_param._tensors, again, in_forward, unsafe)
            if views is not None:
                flat_param._tensors[:] = views
                return
        flat_param.data = padded[: flat_param._unpadded_unsharded_size.numel()]
        if state is BACKWARD_PRE and not again:
            with torch.enable_grad():
                flat_param._tensors[:] = self._flat._get_unflat_views()
        self._flat._use_unsharded_views(as_params=not in_forward and state is not BACKWARD_PRE)

    _use_unpadded_unsharded_flat_param = _use_unsharded_flat_param

    # Resharding

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Switch to the master; take the zero3 shard if the masters were gathered; free the unsharded one if asked.

        With a zero3 group of one rank the unsharded parameter is the zero3 shard, and is not freed.
        """
        flat_param = self.flat_param
        if self._ag_handle is not None:
            self.wait_unshard()
        if self._is_from_masters:
            self._take_zero3_shard()
        self._confirmed, self._agreed = False, None
        if self._is_unsharded or self._state is not BACKWARD_POST or flat_param._tensors[0] is not None:
            self._use_sharded_flat_param()
        if self._state is SUMMON_FULL_PARAMS:
            self._free(self._get_padded_to_gather_into())
            if self._stays_unsharded:
                flat_param._zero3_shard = None  # it was freed, or may have been written to
        elif free_unsharded_flat_param and not (self._stays_unsharded and self._gathered):
            self._free_after_use(flat_param._full_param_padded)
            self._gathered = False

    @torch.no_grad()
    def _take_zero3_shard(self) -> None:
        flat_param = self.flat_param
        self._is_from_masters = False
        if self._has_zero3_copy:
            with torch.inference_mode(False):  # it outlives a forward in that
                flat_param._zero3_shard = self._get_shard_from_padded_unshard_tensor(
                    flat_param._full_param_padded, self.zero3_group_rank, self.zero3_group_size
                )
        elif self._stays_unsharded:
            flat_param._zero3_shard = flat_param._full_param_padded.detach()
        self._param_synced = True

    def post_reshard(self) -> None:
        """Nothing: for symmetry with ``post_unshard()``."""

    def _use_sharded_flat_param(self) -> None:
        flat_param, unit = self.flat_param, self._unit
        shard, params, shared = flat_param._zero1_shard, flat_param._params, flat_param._shared_params
        self._is_unsharded = False
        if (
            unit is None
            or shard.size() != flat_param._sharded_size
            or not shard.is_contiguous()
            or not unit.use_sharded(
                flat_param, shard, params, shared, flat_param._shard_param_infos, self._flat._unsafe
            )
        ):
            flat_param.data = shard
            self._flat._use_sharded_views()
        elif self._state is BACKWARD_POST:
            flat_param._tensors[:] = [None] * len(flat_param._tensors)  # backward is over, their graph may go

    def _forget_what_was_gathered(self) -> None:
        """The masters are about to change: the next unshard gathers from them."""
        self._param_synced = False
        self.flat_param._zero3_shard = None
