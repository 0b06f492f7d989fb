"""Whether the ranks agree about a unit before it is made: its groups, its layout, and what each of them was given."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..fsdp.order import gather_objects, issue, wait
from ..fsdp.pairs import check_pair

Described = list[tuple[str, str]]  # (name, what it is) of everything that must be the same on all ranks


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


def check_alike(described: Described, problem: Exception | None, group: Any) -> None:
    """Compare over ``group`` what its ranks are about to build. A collective call of 40 bytes if they agree.

    ``problem``: why this rank cannot build it. Raises: it, or ValueError, on all ranks alike, naming the first rank
    that has one, or the first name in which a rank differs from the first.
    """
    digest = hashlib.sha256(repr(described).encode()).digest()
    parts = [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in range(0, len(digest), 8)]
    words = [int(problem is not None), *parts]
    mine = torch.tensor(words, device=dist.distributed_c10d._get_object_coll_device(group))
    everyone = [mine.clone() for _ in range(group.size())]
    if group.size() > 1:
        wait(issue(dist.all_gather, everyone, mine, group=group), group, mine.device)
    if problem is None and all(torch.equal(mine, other) for other in everyone):
        return
    mine_said = (described, problem and str(problem))
    told: list[Any] = gather_objects(mine_said, group) if group.size() > 1 else [mine_said]
    if problem is not None:
        raise problem
    ranks = dist.get_process_group_ranks(group)
    for rank, (_, other) in zip(ranks, told, strict=True):
        if other is not None:
            raise ValueError(f"rank {rank} cannot build its part of this unit: {other}")
    for rank, (other, _) in zip(ranks, told, strict=True):
        for i in range(max(len(other), len(told[0][0]))):
            expected, found = (side[i] if i < len(side) else ("nothing", "-") for side in (told[0][0], other))
            if expected != found:
                raise ValueError(
                    f"the ranks have built different units: rank {ranks[0]} has {expected[0]} ({expected[1]}), rank "
                    f"{rank} has {found[0]} ({found[1]})"
                )


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
