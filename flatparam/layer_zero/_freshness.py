"""Decide whether a unit gathers from its masters, because they have changed, and decide it alike on all ranks.

A rank sees only the writes to its own masters. If one rank gathered over the zero1 group and another over the zero3
group, they would wait for each other forever. So if control flow does not decide it, the ranks exchange 4 bytes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..common import optimizers
from ..fsdp.desync import checked_collectives
from ._base import Base
from ._sums import Sums
from .states import BACKWARD_POST, BACKWARD_PRE


class Freshness(Sums):
    """The part of the handle that decides when to gather from the masters.

    With ``_needs_param_sync and not _param_synced`` it does so without an exchange, as the reference does. The driver
    may set both flags.
    """

    # The versions of the masters and the optimizer steps, when the masters were gathered last
    _seen_values = _seen_steps = -1

    def _note_fresh(self) -> None:
        """Note that the current masters have been gathered."""
        self._seen_values, self._seen_steps = self._core.versions(), optimizers.taken

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


def _any_rank(flags: list[bool], handle: Base) -> list[bool]:
    """Return for each flag whether any rank of the zero1 group has set it. A collective call."""
    if handle.zero1_world_size == 1:
        return flags
    found = torch.tensor(flags, dtype=torch.int32, device=handle.device)
    group = handle.zero1_process_group
    checked_collectives.wait(
        checked_collectives.issue(dist.all_reduce, found, op=dist.ReduceOp.MAX, group=group), group, handle.device
    )
    return [bool(flag) for flag in found.tolist()]
