"""Whether what a unit would forward with is still what its masters say: found out by all ranks alike.

What a rank sees of its own masters may be less than what has changed on another one. Ranks that then gather over
different groups wait for each other for ever: so where control flow does not tell, they ask each other, in 4 bytes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..common import optimizers
from ..fsdp.desync import checked_collectives
from ._base import Base
from ._sums import Sums


class Freshness(Sums):
    """The part of the handle that decides when to gather from the masters.

    ``_needs_param_sync and not _param_synced`` says so without asking, as in the reference; drivers may set both.
    """

    def _note_fresh(self) -> None:
        """Masters are gathered as they are now."""
        self._seen_values, self._seen_steps = self._versions()[0], optimizers.taken

    def _ask(self, changed: bool) -> bool:
        return _any_rank([changed], self)[0]

    def _refuse_write(self) -> None:
        raise RuntimeError(
            f"{self._names()} was written to after agree() and before its forward: write before, or do without agree()"
        )


def agree(handles: Sequence[Any]) -> None:
    """Ask once for ``handles``, which share a zero1 group, which masters have changed: their next unshard need not.

    All ranks call it with the same handles, for instance as a forward begins. Communicates 4 bytes a handle.
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
    """For each flag whether it is set on some rank of the zero1 group."""
    if handle.zero1_world_size == 1:
        return flags
    found = torch.tensor(flags, dtype=torch.int32, device=handle.device)
    group = handle.zero1_process_group
    checked_collectives.wait(
        checked_collectives.issue(dist.all_reduce, found, op=dist.ReduceOp.MAX, group=group), group, handle.device
    )
    return [bool(flag) for flag in found.tolist()]
