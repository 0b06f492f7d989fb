"""The groups of a unit, and how it is described to the other ranks before it is made."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..fsdp.agreement import Described
from ..fsdp.pairs import check_pair


def check_groups(zero3: Any, zero1: Any, what: str) -> None:
    """Refuse two groups that no unit can be spread over. All ranks of ``zero1`` call it.

    Raises: TypeError for what is no process group, ValueError unless this rank is in both, the zero3 groups of all
    ranks are of one size, disjoint, inside of ``zero1`` and cover it; naming sizes and ranks.
    """
    for name, group in (("zero3_process_group", zero3), ("zero1_process_group", zero1)):
        if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{what}: expected {name} to be a group that this rank is in, got {group!r}")
        if not hasattr(group, "rank") or not hasattr(group, "size"):
            raise TypeError(f"{what}: expected {name} to be a process group, got {type(group).__name__}")
        if group.rank() < 0:
            raise ValueError(f"{what}: this rank is not in {name}, of ranks {dist.get_process_group_ranks(group)}")
    check_pair(zero3, zero1, what)


def describe(settings: str, names: Sequence[str], params: Sequence[Tensor]) -> Described:
    """A unit as it must be on all ranks: how it is spread, and its parameters."""
    return [
        ("the unit", settings),
        *(
            (
                f"parameter `{name}`",
                f"shape {tuple(param.shape)}, strides {param.stride()}, {param.dtype}, "
                f"requires_grad={param.requires_grad}",
            )
            for name, param in zip(names, params, strict=True)
        ),
    ]
