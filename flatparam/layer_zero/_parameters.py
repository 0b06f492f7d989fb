"""The path of parameters through the handle: from the master or the zero3 shard to the unsharded one, and back.

| tensor | shape | dtype | memory |
|---|---|---|---|
| ``_zero1_shard``, the master | ``[N / ranks of zero1]`` | ``full_prec_dtype`` | always |
| ``_zero3_shard`` | ``[N / ranks of zero3]`` | ``param_dtype`` | from a gather of masters until these change |
| ``_full_param_padded`` | ``[N]`` | ``param_dtype`` | while unsharded |
| ``_full_prec_full_param_padded`` | ``[N]`` | ``full_prec_dtype`` | in SUMMON_FULL_PARAMS |

The runtime's unit ``_core`` gathers and frees, and gives the modules views. This file builds it.

A rank sees only the writes to its own masters. If one rank gathered over the zero1 group and another over the zero3
group, they would wait for each other forever. So if control flow does not decide whether the masters are gathered, the
ranks exchange 4 bytes.
"""

import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _C
from ..common import optimizers
from ..common.collectives import gathering, is_sliced, name_in_cpp
from ..common.tensors import allocate, pinned
from ..fsdp.desync import checked_collectives
from ..fsdp.desync.torch_collectives import WATCHED
from ..fsdp.desync.trace import TRANSPORT
from ..fsdp.sharding.pytrees import find_tensors
from ._sums import Sums
from .states import BACKWARD_POST, BACKWARD_PRE, FORWARD, SUMMON_FULL_PARAMS


class Collectives:
    """The gathers that go through Python: where a user has replaced torch's function, or torch compares ranks."""

    def __init__(self, device: torch.device):
        self.device, self.interrupted = device, None

    def all_gather(self, output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
        """Gather, and wait. After an interrupted wait the next call waits for the same collective again."""
        work, self.interrupted = self.interrupted, None
        work = checked_collectives.issue(gathering(), output, shard, group=group) if work is None else work
        try:
            checked_collectives.wait(work, group, self.device)
        except BaseException:
            self.interrupted = None if work is None or work.is_completed() else work
            raise


class Waits:
    """Looks after the other ranks of a group while the unit waits for a gather over it."""

    looks = False  # since the gather began

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def look(self) -> None:
        """Raises: OrderError if a rank has ended."""
        if not self.looks:
            self.looks, self._look = True, checked_collectives.look_of(self.group)
        self._look()

    def explain(self, message: str) -> None:
        """Raises: OrderError if the gather has failed with ``message`` because a rank has ended."""
        if TRANSPORT.search(message):
            checked_collectives.look_of(self.group)(has_failed=True)


class Parameters(Sums):
    """The part of the handle that shards, unshards and reshards, and decides when to gather from the masters.

    With ``_needs_param_sync and not _param_synced`` it does so without an exchange, as the reference does. The driver
    may set both flags.
    """

    _collectives: Collectives
    # The versions of the masters and the optimizer steps, when the masters were gathered last
    _seen_values = _seen_steps = -1

    @torch.no_grad()
    def shard(self) -> None:
        """Make the master from the shard, in ``full_prec_dtype``. From now on the original parameters lie in it."""
        [flat], flat_param = self.unit.flat_params, self.flat_param
        flat_param._zero1_shard = nn.Parameter(flat_param.data.to(self.full_prec_dtype), requires_grad=False)
        flat_param._zero3_shard = None
        flat_param.data = flat_param._zero1_shard
        spec = dataclasses.replace(
            flat.spec(self.unit.options), shard=flat_param._zero1_shard, stays_full=self._stays_unsharded
        )
        write_back = functools.partial(_write_back_replaced, weakref.ref(self))
        core = _C.Unit(self._names(), (spec,), True, write_back, self._freed_message)
        self._collectives = Collectives(self.device)
        root = _C.Root(0, False, self._collectives, WATCHED, find_tensors)
        groups = self.zero1_process_group, self.zero3_process_group
        compares = dist.get_debug_level() == dist.DebugLevel.DETAIL
        if compares or None in map(name_in_cpp, groups):
            root.always_python()
        core.join(root)
        sliced = is_sliced(groups[0], self.device)
        flat_param._full_param_padded = core.drive(flat_param, Waits(groups[0]), Waits(groups[1]), sliced)
        core.alias_params()
        core.put(False)
        self.unit.core = self._core = core

    @staticmethod
    def _get_shard_from_padded_unshard_tensor(tensor: Tensor, rank: int, world_size: int) -> Tensor:
        """Return a copy of ``rank``'s part of ``tensor``, whose numel must be a multiple of ``world_size``."""
        if tensor.numel() % world_size:
            raise AssertionError(f"expected a multiple of {world_size} elements, got {tensor.numel()}")
        return tensor.chunk(world_size)[rank].clone()

    @torch.no_grad()
    @torch.inference_mode(False)
    def init_flat_param_attributes(self) -> None:
        """Make the tensors of a step, without memory. Called once, when ``flat_param`` is sharded and on its device."""
        flat_param = self.flat_param
        if not hasattr(flat_param, "_zero1_shard"):
            raise AssertionError(self._about("expects to be sharded: call shard() first"))
        self._check_on_compute_device(flat_param)
        size, low, full = flat_param._padded_unsharded_size, self._fwd_bwd_param_dtype, self.full_prec_dtype
        dtypes = {"_full_grad_padded": low, "_full_prec_grad_padded": full, "_full_prec_full_param_padded": full}
        for name, dtype in dtypes.items():
            tensor = torch.empty(size, device=self.device, dtype=dtype)
            self._free(tensor)
            setattr(flat_param, name, tensor)
        if self._offload_grads:
            flat_param._cpu_grad = pinned(torch.zeros(size, dtype=full, device="cpu"))
        self._is_bound = True

    # The unsharded tensors

    def _get_padded_unsharded_flat_tensor(self, param: bool = True, free: bool = True) -> Tensor:
        """Return the unsharded parameter, or with ``param=False`` the gradient. ``free``: free its memory first."""
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
            self._core.release()
        else:
            self._free(self.flat_param._full_grad_padded)

    # Unsharding

    def needs_unshard(self) -> bool:
        """Whether unshard() has work: to gather, to ask if the gathered data are fresh, or to switch to them."""
        return (
            not self._is_unsharded
            or self._is_gathering
            or self._state is SUMMON_FULL_PARAMS
            or not self._gathered
            or not (self._confirmed or self._state is BACKWARD_PRE or self._state is BACKWARD_POST)
        )

    def _write_back(self) -> bool:
        """Copy into the master the tensors that users have put in place of parameters. Returns if there were any."""
        return not self._is_unsharded and self._core is not None and bool(self._core.sync_user_writes())

    def pre_unshard(self) -> bool:
        """Write replaced parameters back. Returns whether any was written back, or a gather is needed."""
        if not self._is_bound:
            self.init_flat_param_attributes()
        wrote = self._write_back()
        self._check_on_compute_device(self.flat_param)
        return wrote or not self._gathered

    def unshard(self) -> None:
        """Gather, unless fresh data are gathered already, and switch to them.

        It gathers over the zero1 group from the masters if they have changed, else over the zero3 group from the zero3
        shards; in SUMMON_FULL_PARAMS from the masters, in full precision. The data are there after post_unshard().
        """
        if not self._is_bound:
            raise AssertionError(self._about("call pre_unshard() before unshard()"))
        if self._state is SUMMON_FULL_PARAMS:
            self._summon()
        else:
            self._use_unsharded_flat_param(self._all_gather_flat_param(self.flat_param._full_param_padded))

    def _all_gather_flat_param(self, padded: Tensor) -> Tensor:
        """Fill ``padded``, the unsharded tensor, unless it has fresh values."""
        state = self._state
        if self._gathered and (self._confirmed or state is BACKWARD_PRE or state is BACKWARD_POST):
            return padded
        refresh = self._must_refresh()
        if refresh or not self._gathered:
            renewed = self._core.gather(refresh)
            self._is_gathering = True
            if renewed is not None:
                self.flat_param._full_param_padded = padded = renewed
            if refresh:
                self._seen_values, self._seen_steps = self._core.versions(), optimizers.taken
                self._is_from_masters = True
        self._gathered = self._confirmed = True
        return padded

    @property
    def _is_changed_here(self) -> bool:
        """Whether masters were written to here, or an optimizer has stepped, since they were gathered last."""
        return bool(self._seen_values != self._core.versions() or self._seen_steps != optimizers.taken)

    def _must_refresh(self) -> bool:
        """Return whether to gather from the masters rather than to use what was gathered from them before.

        A collective call over the zero1 group, unless in backward or control flow tells: an all-reduce of 4 bytes.
        Raises: RuntimeError if masters were written to after agree().
        """
        agreed, self._agreed = self._agreed, None
        keeps = self._has_zero3_copy or self._stays_unsharded
        has_copy = self.flat_param._zero3_shard is not None if keeps else self._gathered
        if not has_copy or (self._needs_param_sync and not self._param_synced):
            return True  # known to all ranks
        if self._state is BACKWARD_PRE or self._state is BACKWARD_POST:
            return False  # backward goes with what its forward had
        changed = self._is_changed_here
        if agreed is None:
            return _any_rank([changed], self)[0]
        if changed and not agreed:
            raise RuntimeError(
                f"{self._names()} was written to after agree() and before its forward: write before, or do without "
                "agree()"
            )
        return agreed

    def wait_unshard(self) -> None:
        """Wait for the gather: the host on the CPU, the current stream on an accelerator."""
        if not self._is_gathering:
            return
        try:
            self._core.wait()
        except BaseException:
            if not self._core.is_gathered:  # it has failed
                self._is_gathering = self._gathered = self._confirmed = self._is_from_masters = False
                self._forget_what_was_gathered()
            raise
        self._is_gathering = False

    post_unshard = wait_unshard

    def _use_unsharded_flat_param(self, padded: Tensor) -> None:
        """Let ``flat_param`` be unsharded; in forward and backward the modules have views, else whole parameters."""
        self._is_unsharded = True
        if self._state is FORWARD or self._state is BACKWARD_PRE:
            self._core.show_views(self.flat_param._tensors, self._state is FORWARD)
        else:
            self._is_whole = True
            self._core.show_params(padded, True)

    _use_unpadded_unsharded_flat_param = _use_unsharded_flat_param

    @torch.no_grad()
    def _summon(self) -> None:
        """Gather the masters in full precision, and let the parameters be whole.

        The low-precision ones are freed: the user may change the parameters, and they would be outdated.
        """
        flat_param, group = self.flat_param, self.zero1_process_group
        whole = flat_param._full_prec_full_param_padded
        self.wait_unshard()
        if not self._stays_unsharded:
            self._free_unsharded_flat_tensor()
        allocate(whole, flat_param._padded_unsharded_size)
        if self.zero1_world_size == 1:
            whole.copy_(flat_param._zero1_shard)
        else:
            self._collectives.all_gather(whole, flat_param._zero1_shard.detach(), group)
        self._use_unsharded_flat_param(whole)

    # Resharding

    def _use_sharded_flat_param(self) -> None:
        """Let ``flat_param`` be the master, and the parameters its pieces."""
        tensors, was_whole, self._is_unsharded, self._is_whole = self.flat_param._tensors, self._is_whole, False, False
        self._core.show_params(None, was_whole)
        if self._state is BACKWARD_POST and tensors[0] is not None:
            _C.clear_grads(tensors)
            tensors[:] = [None] * len(tensors)

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Switch to the master; take the zero3 shard if the masters were gathered; free the unsharded one if asked.

        What a forward has written to weights goes into the master. With a zero3 group of one rank the unsharded
        parameter is the zero3 shard, and is not freed.
        """
        self.wait_unshard()
        if self._is_unsharded and self._state is FORWARD:
            self._core.take_written()
        if self._is_from_masters:
            self._take_zero3_shard()
        self._confirmed, self._agreed = False, None
        if self._is_unsharded or self._state is not BACKWARD_POST or self.flat_param._tensors[0] is not None:
            self._use_sharded_flat_param()
        if self._state is SUMMON_FULL_PARAMS:
            self._free(self.flat_param._full_prec_full_param_padded)
        elif free_unsharded_flat_param and self._gathered and not self._stays_unsharded:
            self._core.release()
            self._gathered = False

    def _take_zero3_shard(self) -> None:
        """After a gather from the masters: keep this rank's part of it as the zero3 shard."""
        self._is_from_masters, self._param_synced = False, True
        if self._stays_unsharded:
            self.flat_param._zero3_shard = self.flat_param._full_param_padded
        elif self._has_zero3_copy:
            self.flat_param._zero3_shard = self._core.cut_secondary_shard()

    def _forget_what_was_gathered(self) -> None:
        """Drop the zero3 shard, as the masters are about to change: the next unshard gathers from them."""
        self._param_synced = False
        self.flat_param._zero3_shard = None
        if self._has_zero3_copy and self._core is not None:
            self._core.forget_gathered()

    def post_reshard(self) -> None:
        """Do nothing. The method exists for symmetry with ``post_unshard()``."""

    def _use_sharded_views(self) -> None:
        """Let the modules have the original parameters, which are pieces of the master."""
        self._use_sharded_flat_param()

    def _use_unsharded_views(self, as_params: bool) -> None:
        """Let the modules have views of the unsharded flat parameter, or with ``as_params`` whole parameters."""
        if as_params:
            self._core.show_params(self.flat_param.detach(), True)
        else:
            self._use_unsharded_flat_param(self.flat_param._full_param_padded)


def agree(handles: Sequence[Any]) -> None:
    """Find out in one exchange which of ``handles`` have changed masters. Their next unshards need no exchange.

    All ranks of their common zero1 group call it with the same handles, for example when a forward begins.
    Communicates: an all-reduce of 4 bytes for each handle. Raises: ValueError for a handle of another zero1 group.
    """
    if not handles:
        return
    first = handles[0]
    for handle in handles:
        handle._write_back()
        if handle.zero1_process_group is not first.zero1_process_group:
            raise ValueError(f"expected handles of one zero1 group, but {handle._names()} has another")
    for handle, changed in zip(handles, _any_rank([h._is_changed_here for h in handles], first), strict=True):
        handle._agreed = changed


def _any_rank(flags: list[bool], handle: Sums) -> list[bool]:
    """Return for each flag whether any rank of the zero1 group has set it. A collective call."""
    if handle.zero1_world_size == 1:
        return flags
    found = torch.tensor(flags, dtype=torch.int32, device=handle.device)
    checked_collectives.run(dist.all_reduce, found, op=dist.ReduceOp.MAX, group=handle.zero1_process_group)
    return [bool(flag) for flag in found.tolist()]


def _write_back_replaced(reference: "weakref.ref[Parameters]") -> None:
    """The unit has found parameters that users have replaced, or given other data: copy these into the master."""
    handle = reference()
    if handle is not None:
        handle.unit.write_back()
        handle._note_owner()
