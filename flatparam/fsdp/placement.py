"""Over which ranks a unit's parameter, gradient and optimizer state are spread: data, one row a strategy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from .api import ShardingStrategy


class Row(NamedTuple):
    """One strategy, by the names of groups: ``wide`` is all ranks that share gradients, ``inner`` and ``outer`` the
    dimensions of a grid (ranks that share the parameter; the replicas of one shard), None is this rank alone.

    ``param``: in forward and backward; ``optim``: the shard that the optimizer steps, and its gradient's;
    ``replicate``: the gradient is all-reduced over it, after it was reduce-scattered over ``grad``.
    """

    param: str | None
    grad: str | None
    optim: str | None
    replicate: str | None
    reshard_after_forward: bool


TABLE: dict[ShardingStrategy, Row] = {
    ShardingStrategy.FULL_SHARD: Row("wide", "wide", "wide", None, True),
    ShardingStrategy.SHARD_GRAD_OP: Row("wide", "wide", "wide", None, False),
    ShardingStrategy.ZERO_1: Row(None, "wide", "wide", None, False),
    ShardingStrategy.NO_SHARD: Row(None, None, None, "wide", False),
    ShardingStrategy.HYBRID_SHARD: Row("inner", "inner", "inner", "outer", True),
    ShardingStrategy._HYBRID_SHARD_ZERO2: Row("inner", "inner", "inner", "outer", False),
    ShardingStrategy.LAYER_ZERO: Row("inner", "wide", "wide", None, True),
}


@dataclass(frozen=True)
class Placement:
    """The groups of one unit; None is this rank alone.

    Args: ``param``: the ranks that share the parameter in forward and backward; ``grad``: over which the gradient is
    reduce-scattered; ``optim``: over which the optimizer's shard and state are spread; ``replicate``: over which the
    gradient of the shard is all-reduced as well; ``reshard_after_forward``: free the parameter between forward and
    backward.
    Raises: ValueError for groups that do not fit together.
    """

    param: dist.ProcessGroup | None = None
    grad: dist.ProcessGroup | None = None
    optim: dist.ProcessGroup | None = None
    replicate: dist.ProcessGroup | None = None
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        if self.grad is not self.optim:
            raise ValueError(
                "Placement: the gradient is reduce-scattered to the shards that the optimizer steps, so grad and optim "
                f"must be one group, got {_ranks(self.grad)} and {_ranks(self.optim)}"
            )
        if self.param is not None and self.param is not self.optim:
            raise ValueError(
                "Placement: a parameter spread over other ranks than the optimizer's shards (LayerZero) is not "
                f"supported yet: param is {_ranks(self.param)}, optim {_ranks(self.optim)}"
            )
        for group in (self.param, self.grad, self.optim, self.replicate):
            if group is not None and dist.get_rank(group) < 0:
                raise ValueError(f"Placement: this rank is not in the group of ranks {_ranks(group)}")

    def __deepcopy__(self, memo: Any) -> "Placement":
        return self  # groups belong to the process, and nothing here changes

    @property
    def shards(self) -> int:
        """How many ranks share the optimizer's shard."""
        return 1 if self.optim is None else dist.get_world_size(self.optim)

    @property
    def rank(self) -> int:
        """Ours among them."""
        return 0 if self.optim is None else dist.get_rank(self.optim)

    @property
    def replicas(self) -> int:
        """How many ranks hold the same shard and average its gradient."""
        return 1 if self.replicate is None else dist.get_world_size(self.replicate)

    @property
    def stays_full(self) -> bool:
        """Whether the unsharded parameter keeps its memory."""
        return self.param is None and self.optim is not None

    @property
    def factors(self) -> tuple[float, float]:
        """What a gradient is divided by before and after it is summed over the ranks."""
        return averaging_factors(self.shards * self.replicas)


def averaging_factors(ranks: int) -> tuple[float, float]:
    """``(before, after)``: their product is ``ranks``, and neither lets a sum overflow or underflow by much.

    Source: torch 2.13 ``DefaultState._get_gradient_predivide_factor``.
    """
    factor = 1
    while ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor), ranks / factor


def place(strategy: ShardingStrategy, groups: dict[str, dist.ProcessGroup]) -> Placement:
    """The placement of a row over groups by name; a group of one rank counts as none."""
    row = TABLE[strategy]

    def group(name: str | None) -> dist.ProcessGroup | None:
        return groups[name] if name is not None and dist.get_world_size(groups[name]) > 1 else None

    return Placement(
        group(row.param), group(row.grad), group(row.optim), group(row.replicate), row.reshard_after_forward
    )


def is_grid(strategy: ShardingStrategy) -> bool:
    """Whether the strategy needs a grid of ranks instead of one group."""
    row = TABLE[strategy]
    return "inner" in (row.param, row.grad, row.optim)


def groups_of(strategy: ShardingStrategy, process_group: Any, device_mesh: Any) -> dict[str, dist.ProcessGroup]:
    """The groups, by the names in the table, that the user's arguments give.

    Raises: ValueError and TypeError as torch does, saying which argument the strategy takes.
    """
    if TABLE[strategy].param not in (None, TABLE[strategy].optim):
        raise ValueError(
            f"{strategy.name} spreads the parameter over other ranks than the optimizer's shards: not supported yet"
        )
    if process_group is not None and device_mesh is not None:
        raise ValueError("Cannot pass both process_group and device_mesh at the same time. Please just pass only one.")
    if device_mesh is not None:
        return _groups_of_mesh(strategy, device_mesh)
    if is_grid(strategy):
        if not (isinstance(process_group, Sequence) and len(process_group) == 2):
            raise ValueError(
                f"{strategy.name} must know which ranks share a parameter and which replicate it: pass process_group="
                f"(shard group, replicate group) or a 2-D device_mesh, got process_group={process_group!r}"
            )
        inner, outer = process_group
        _check_groups(inner, outer)
        return {"inner": inner, "outer": outer}
    if isinstance(process_group, Sequence):
        raise TypeError(
            f"{strategy.name} takes one process group, got {len(process_group)}; a pair is for HYBRID_SHARD"
        )
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise ValueError("torch.distributed is not initialized: call torch.distributed.init_process_group() first")
    _check_groups(group)
    return {"wide": group}


def _groups_of_mesh(strategy: ShardingStrategy, mesh: Any) -> dict[str, dist.ProcessGroup]:
    dimensions = 2 if is_grid(strategy) else 1
    if mesh.ndim != dimensions:
        raise ValueError(
            f"{strategy.name} takes a {dimensions}-D device_mesh"
            f"{' (replicate, shard)' if dimensions == 2 else ''}, got {mesh.ndim}-D of shape {tuple(mesh.mesh.shape)}"
        )
    if dimensions == 1:
        return {"wide": mesh.get_group(0)}
    return {"outer": mesh.get_group(0), "inner": mesh.get_group(1)}


def _check_groups(*groups: Any) -> None:
    for group in groups:
        if group is dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"expected a process group that this rank {dist.get_rank()} is in, got {group!r}")


def _ranks(group: dist.ProcessGroup | None) -> str:
    return "this rank alone" if group is None else f"ranks {dist.get_process_group_ranks(group)}"
