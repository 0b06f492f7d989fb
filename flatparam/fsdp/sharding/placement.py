"""The process groups over which a unit's parameter, gradient and optimizer state are sharded.

``TABLE`` has one row for each strategy; nothing else decides by a strategy's name. The wrapper's constructor calls
``groups_of`` and ``place``; all other code reads the ``Placement``. The module owns the groups that it makes (those of
a machine, the outer groups) and knows no parameter.
"""

import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ... import _C
from ...common.collectives import ranks_of
from ...common.warned import warn_user
from ..api import ShardingStrategy
from ..desync.checked_collectives import meet
from ..desync.liveness import Meetings, generation_of_world
from ..desync.same_unit import host_group
from ..desync.stores import store_of_world


class Row(NamedTuple):
    """One strategy. The first four fields are names of groups; None is this rank alone.

    | group | ranks |
    |---|---|
    | ``wide`` | all that share gradients |
    | ``inner`` | one dimension of a grid: those that share the parameter |
    | ``outer`` | the other dimension: those that have the same shard over ``inner`` |

    | field | meaning |
    |---|---|
    | ``param`` | the parameter is sharded over it in forward and backward |
    | ``grad`` | the gradient is reduce-scattered over it |
    | ``optim`` | the shards that the optimizer steps, and their gradients, are spread over it |
    | ``replicate`` | the gradient of the shard is all-reduced over it afterwards |
    | ``nested`` | gathers and reductions go through ``outer`` and ``inner`` in turn, not through ``wide`` at once |
    | ``full_precision`` | MixedPrecision.reduce_dtype is the shard's dtype by default, which must not be a low one |

    If ``param`` and ``optim`` differ, there is a secondary shard, or with ``param=None`` a whole copy. It is gathered
    over ``optim`` once after each change of the shards. ``nested``: one rank's secondary shard consists of the shards
    of the ranks of ``outer``.
    """

    param: str | None
    grad: str | None
    optim: str | None
    replicate: str | None
    reshard_after_forward: bool
    nested: bool = False
    full_precision: bool = False

    def over(self, sizes: Mapping[str, int]) -> "Row":
        """Return the row for groups of ``sizes``. Groups of one rank become None; a ``param`` as large as optim, optim.

        ``nested`` stays only with a secondary shard.
        """
        param, grad, optim, replicate = (name if name and sizes[name] > 1 else None for name in self[:4])
        if param is not None and optim is not None and sizes[param] == sizes[optim]:
            param = optim
        nested = self.nested and param not in (None, optim)
        return self._replace(param=param, grad=grad, optim=optim, replicate=replicate, nested=nested)


TABLE: dict[ShardingStrategy, Row] = {
    ShardingStrategy.FULL_SHARD: Row("wide", "wide", "wide", None, True),
    ShardingStrategy.SHARD_GRAD_OP: Row("wide", "wide", "wide", None, False),
    ShardingStrategy.ZERO_1: Row(None, "wide", "wide", None, False),
    ShardingStrategy.NO_SHARD: Row(None, None, None, "wide", False),
    ShardingStrategy.HYBRID_SHARD: Row("inner", "inner", "inner", "outer", True),
    ShardingStrategy._HYBRID_SHARD_ZERO2: Row("inner", "inner", "inner", "outer", False),
    ShardingStrategy.LAYER_ZERO: Row("inner", "wide", "wide", None, True, full_precision=True),
    ShardingStrategy.LAYER_ZERO_NESTED: Row("inner", "wide", "wide", None, True, nested=True, full_precision=True),
}


@dataclass(frozen=True)
class Placement:
    """The groups of one unit; None is this rank alone. Immutable; the groups belong to the process.

    Args: ``param``: the ranks that share the parameter in forward and backward; ``grad``: the gradient is
    reduce-scattered over it; ``optim``: the optimizer's shard and state are spread over it; ``replicate``: the gradient
    of the shard is all-reduced over it afterwards; ``reshard_after_forward``: free the parameter between forward and
    backward; ``outer``: for nested strategies (docs/layerzero.md) the ranks of ``optim`` that have this rank's place in
    ``param``; ``full_precision``: reduce gradients in the dtype of the shard, which must not be a low one; ``mesh``:
    the device mesh that has the groups, if any: sharded states are DTensors on it; ``given``: the group that the user
    passed, also if it has one rank and all others are None; ``host``: a gloo group with the ranks of ``optim``, for
    flags on the host, or None.
    Raises: ValueError for groups that do not fit together.
    """

    param: dist.ProcessGroup | None = None
    grad: dist.ProcessGroup | None = None
    optim: dist.ProcessGroup | None = None
    replicate: dist.ProcessGroup | None = None
    reshard_after_forward: bool = True
    outer: dist.ProcessGroup | None = None
    full_precision: bool = False
    mesh: Any = field(default=None, compare=False)
    given: Any = field(default=None, compare=False)
    host: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for group in (self.param, self.grad, self.optim, self.replicate, self.outer):
            if group is not None and dist.get_rank(group) < 0:
                raise ValueError(f"Placement: this rank is not in the group of ranks {_said(group)}")
        if self.grad is not self.optim:
            raise ValueError(
                "Placement: the gradient is reduce-scattered to the shards that the optimizer steps, so grad and optim "
                f"must be one group, got {_said(self.grad)} and {_said(self.optim)}"
            )
        if self.has_secondary_shard and self.replicate is not None:
            raise ValueError("Placement: a parameter that is spread over other ranks than its shards has no replicas")
        if self.outer is not None and not self.has_secondary_shard:
            raise ValueError("Placement: outer is for a parameter that is spread over other ranks than its shards")
        if self.has_secondary_shard:
            param, optim, outer = self.param_shards, self.shards, self.outer
            if optim % param or (outer is not None and dist.get_world_size(outer) * param != optim):
                raise ValueError(
                    f"Placement: the optimizer's shards are over {_said(self.optim)}, which param {_said(self.param)}"
                    f"{'' if outer is None else f' and outer {_said(outer)}'} must divide"
                )

    def __deepcopy__(self, memo: Any) -> "Placement":
        return self  # immutable, and groups belong to the process

    def __getstate__(self) -> dict[str, Any]:
        """Add the cut of ``optim`` into inner groups: unpickling issues no collective, so it cannot compare it anew."""
        cut = None if self.outer is None else inner_groups(self.param, self.optim)
        return {**vars(self), "given": None, "host": None, "cut": cut}

    def __setstate__(self, state: dict[str, Any]) -> None:
        cut = state.pop("cut")
        vars(self).update(state)
        if cut is not None:
            known = _cuts.setdefault(dist.group.WORLD, {})
            known.setdefault((_ranks(self.param), _ranks(self.optim)), cut)

    @property
    def shards(self) -> int:
        """The number of shards that the optimizer steps."""
        return 1 if self.optim is None else self.optim.size()  # asked often: a sixth of dist.get_world_size

    @property
    def rank(self) -> int:
        """The index of this rank's shard among ``shards``."""
        if self.outer is not None:
            return self.param_rank * self.outer.size() + self.outer.rank()
        return 0 if self.optim is None else self.optim.rank()

    @property
    def has_secondary_shard(self) -> bool:
        """Whether forward and backward gather from a secondary shard, over fewer ranks than ``optim``."""
        return self.param is not None and self.param is not self.optim

    @property
    def param_shards(self) -> int:
        """The number of secondary shards; 1 without them."""
        return self.param.size() if self.param is not None and self.has_secondary_shard else 1

    @property
    def param_rank(self) -> int:
        """The index of this rank's secondary shard; 0 without one."""
        return self.param.rank() if self.param is not None and self.has_secondary_shard else 0

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same shard and all-reduce its gradient."""
        return 1 if self.replicate is None else dist.get_world_size(self.replicate)

    @property
    def stays_full(self) -> bool:
        """Whether the unsharded parameter keeps its memory between steps."""
        return self.param is None and self.optim is not None

    @property
    def can_be_stale(self) -> bool:
        """Whether there is a copy beside the shards, which is stale after an optimizer step."""
        return self.has_secondary_shard or self.stays_full

    @property
    def compared(self) -> list[dist.ProcessGroup]:
        """The groups over which ranks compare a unit that they build or load, in order."""
        return [group for group in (self.optim, self.replicate) if group is not None]

    def traced(self) -> Iterator[tuple[int, dist.ProcessGroup | None]]:
        """Yield ``(which, group)``: the trace of ``group`` records the collectives ``which`` of ``_C.Unit.follow``.

        ``which``: one of ``_C.GROUP_*``, plus ``_C.GROUPS`` for a second trace of the same collectives.
        """
        yield _C.GROUP_SHARD, self.optim
        yield _C.GROUP_REPLICATE, self.replicate
        if self.has_secondary_shard:
            # Two inner groups may run different units while they gather from secondary shards. The ranks of one inner
            # group must issue all collectives in one order, else two of them could wait in different groups.
            second = _C.GROUPS
            for which in (_C.GROUP_PARAM, second + _C.GROUP_SHARD, second + _C.GROUP_OUTER):
                yield which, self.param
            yield _C.GROUP_OUTER, self.optim

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All groups that a unit's collectives are issued over."""
        return list(dict.fromkeys(group for _, group in self.traced() if group is not None))

    def with_host(self, device: torch.device | None) -> "Placement":
        """Return the placement with the group ``host``, if a unit on ``device`` has copies that can be stale.

        The first call over a group is collective, for ranks that have compared a unit over it.
        """
        if not self.can_be_stale or self.optim is None or device is None or device.type == "cpu":
            return self
        return replace(self, host=host_group(self.optim))

    @property
    def factors(self) -> tuple[float, float]:
        """The divisors of a gradient before and after it is summed over the ranks."""
        return averaging_factors(self.shards * self.replicas)

    def holder(self, shard: int) -> int:
        """Return the rank in ``optim`` that holds shard ``shard``: ``shard`` itself, unless shards are nested."""
        if self.outer is None or self.optim is None:
            return shard
        inner, outer = divmod(shard, dist.get_world_size(self.outer))
        rows = inner_groups(self.param, self.optim)
        return dist.get_group_rank(self.optim, sorted(row[inner] for row in rows)[outer])


def averaging_factors(ranks: int) -> tuple[float, float]:
    """Return the divisors ``(before, after)`` of an average over ``ranks``, both near the square root of ``ranks``.

    Their product is ``ranks``. To divide in two parts keeps sums in low precision from overflow and underflow.

    Source: torch 2.13 ``DefaultState._get_gradient_predivide_factor``.
    """
    factor = 1
    while ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor), ranks / factor


def place(strategy: ShardingStrategy, groups: dict[str, dist.ProcessGroup]) -> Placement:
    """Return the placement of ``strategy`` over ``groups``, which have the names of ``TABLE``."""
    row = TABLE[strategy].over({name: group.size() for name, group in groups.items()})
    param, grad, optim, replicate = (None if name is None else groups[name] for name in row[:4])
    outer = (groups.get("outer") or outer_group(param, optim)) if row.nested else None
    given = groups.get("inner", groups.get("wide"))
    return Placement(param, grad, optim, replicate, row.reshard_after_forward, outer, row.full_precision, given=given)


def is_placed(strategy: ShardingStrategy, placement: Placement) -> bool:
    """Whether ``place`` can have made ``placement`` for ``strategy``: the user may have made another one."""
    row, groups = TABLE[strategy], dict[str | None, Any]({None: None})
    mine = (placement.param, placement.grad, placement.optim, placement.replicate)
    nested = row.nested and placement.has_secondary_shard
    return (
        all(groups.setdefault(name, group) is group for name, group in zip(row[:4], mine, strict=True))
        and placement.reshard_after_forward == row.reshard_after_forward
        and (placement.outer is not None) == nested
    )


def is_grid(strategy: ShardingStrategy) -> bool:
    """Whether the strategy needs a grid of ranks instead of one group."""
    row = TABLE[strategy]
    return "inner" in (row.param, row.grad, row.optim)


def takes_a_wide_group(strategy: ShardingStrategy) -> bool:
    """Whether the second group of a user's pair is the whole grid (LayerZero), not its other dimension."""
    return is_grid(strategy) and "wide" in TABLE[strategy]


def world() -> Any:
    """Return the group of all ranks. Raises: ValueError if torch.distributed is not initialized."""
    if dist.group.WORLD is None:
        raise ValueError("torch.distributed is not initialized: call torch.distributed.init_process_group() first")
    return dist.group.WORLD


def groups_of(strategy: ShardingStrategy, process_group: Any, device_mesh: Any) -> dict[str, dist.ProcessGroup]:
    """Return the groups in the user's arguments, by the names of ``TABLE``.

    For a strategy with a grid and a wide group, all ranks of the wide group must call this (``check_pair``).
    Raises: ValueError and TypeError as torch does, naming the argument that the strategy takes.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("Cannot pass both process_group and device_mesh at the same time. Please just pass only one.")
    if device_mesh is not None:
        return _groups_of_mesh(strategy, device_mesh)
    if process_group is None:
        world()
    if is_grid(strategy):
        wide = takes_a_wide_group(strategy)
        lengths = (2, 3) if TABLE[strategy].nested else (2,)
        if not (isinstance(process_group, Sequence) and len(process_group) in lengths):
            what, pair, mesh = "replicate it", "(shard group, replicate group)", ""
            if wide:
                what, mesh = "the optimizer's state", " (outer, inner)"
                pair = "(zero3 group, zero1 group), the second holding the first"
            raise ValueError(
                f"{strategy.name} must know which ranks share a parameter and which {what}: it requires explicit "
                "specification of process group or device_mesh. Expected process_group to be passed in as "
                f"{pair}, or a 2-D device_mesh{mesh}, got process_group={process_group!r}. With an auto_wrap_policy "
                "the ranks of a machine are a group: as many as LOCAL_WORLD_SIZE says, or as there are devices"
            )
        if not wide:
            _check_groups(*process_group)
            return dict(zip(("inner", "outer"), process_group, strict=True))
        check_pair(*process_group, what=strategy.name)
        return dict(zip(("inner", "wide", "outer"), process_group, strict=False))
    if isinstance(process_group, Sequence):
        got = f"the text {process_group!r}" if isinstance(process_group, str) else len(process_group)
        raise TypeError(f"{strategy.name} takes one process group, got {got}; a pair is for HYBRID_SHARD")
    group: Any = dist.group.WORLD if process_group is None else process_group
    if isinstance(group, dist.ProcessGroup) or getattr(group, "size", int)() != 1:  # any object of size 1 will do
        _check_groups(group)
    return {"wide": group}


def groups_of_machine(strategy: ShardingStrategy) -> tuple[Any, Any] | None:
    """Return ``(inner, outer or wide)`` for a strategy that needs a grid: the ranks of this machine are ``inner``.

    None: the strategy needs no grid, or the number of ranks of a machine is unknown or does not divide the world. The
    number is LOCAL_WORLD_SIZE, else the number of devices, as in torch's class. The first call is collective over the
    world.
    """
    world: Any = dist.group.WORLD
    if not is_grid(strategy) or world is None:
        return None
    accelerator = torch.accelerator.current_accelerator()
    devices = getattr(torch, "cpu" if accelerator is None else accelerator.type).device_count()
    said = os.environ.get("LOCAL_WORLD_SIZE")
    try:
        size = int(said or devices)
    except ValueError:
        raise ValueError(f"expected LOCAL_WORLD_SIZE to be the number of this machine's ranks, got {said!r}") from None
    if size < (1 if said else 2) or world.size() % size:
        return None
    known = _made.setdefault(world, {})
    if ("node", (size,)) not in known:
        meet(world)  # see outer_group()
        columns = [dist.new_group(range(i, world.size(), size)) for i in range(size)]
        known["node", (size,)] = dist.new_subgroups(size)[0], columns[world.rank() % size]
    inner, outer = known["node", (size,)]
    return inner, world if takes_a_wide_group(strategy) else outer


def _groups_of_mesh(strategy: ShardingStrategy, mesh: Any) -> dict[str, dist.ProcessGroup]:
    dimensions = 2 if is_grid(strategy) else 1
    names = "" if dimensions == 1 else " (outer, inner)" if takes_a_wide_group(strategy) else " (replicate, shard)"
    if mesh.ndim != dimensions:
        raise ValueError(
            f"{strategy.name} takes a {dimensions}-D device_mesh{names}, got {mesh.ndim}-D of shape "
            f"{tuple(mesh.mesh.shape)}"
        )
    if dimensions == 1:
        return {"wide": mesh.get_group(0)}
    if not takes_a_wide_group(strategy):
        return {"outer": mesh.get_group(0), "inner": mesh.get_group(1)}
    ranks, world = mesh.mesh.flatten().tolist(), dist.group.WORLD
    inner = mesh.get_group(1)
    wide = world if sorted(ranks) == ranks_of(world) else mesh._flatten().get_group()
    check_pair(inner, wide, what=strategy.name)
    return {"outer": mesh.get_group(0), "inner": inner, "wide": wide}


def _check_groups(*groups: Any) -> None:
    for problem in filter(None, (_not_mine(group, "a process group") for group in groups)):
        raise ValueError(problem)


def _said(group: dist.ProcessGroup | None) -> str:
    return "this rank alone" if group is None else f"ranks {ranks_of(group)}"


# The cut of a wide group into inner groups: compare it over all ranks, and make the outer groups

Cut = tuple[tuple[int, ...], ...]  # the global ranks of every inner group

_cuts: "weakref.WeakKeyDictionary[Any, dict[Any, Cut]]" = weakref.WeakKeyDictionary()
_exchanged: "weakref.WeakKeyDictionary[Any, Meetings]" = weakref.WeakKeyDictionary()
_made: "weakref.WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], Any]]" = weakref.WeakKeyDictionary()


def inner_groups(inner: Any, wide: Any) -> Cut:
    """Return the inner groups of ``wide`` in the order of their first ranks. ``check_pair`` has found them before."""
    return _cuts[dist.group.WORLD][_ranks(inner), _ranks(wide)]


class _Claim(NamedTuple):
    """The ranks of the groups that one rank passes. ``problem``: one of them is no group of this rank; empty: none."""

    problem: str
    inner: list[int]
    wide: list[int]
    outer: list[int]


def check_pair(
    inner: Any, wide: Any, outer: Any = None, *, what: str, names: tuple[str, ...] = ("a process group",) * 3
) -> None:
    """Compare the cut of ``wide`` into inner groups over all ranks of ``wide``, and remember it for ``inner_groups``.

    All ranks of ``wide`` call this, also one that has no such groups. It goes through the store and issues no
    collective. ``what``: begins the messages; ``names``: of the groups.
    Raises: ValueError on each rank of ``wide`` alike unless all ranks pass the same ``wide``, the inner groups have one
    size, are disjoint, and cover ``wide`` exactly, and ``outer`` is None on all ranks or as in ``outer_group``.
    """
    groups = (inner, wide) if outer is None else (inner, wide, outer)
    problem = next(filter(None, map(_not_mine, groups, names)), "")
    mine = _Claim(problem, *(list(_ranks(group)) for group in (inner, wide, outer)))
    claims = _exchange(mine)
    complaint = _complaint(mine, claims)
    if complaint is not None:
        raise ValueError(f"{what}: {complaint}")
    known, key = _cuts.setdefault(dist.group.WORLD, {}), (tuple(mine.inner), tuple(mine.wide))
    if key in known:
        return
    known[key] = _rows(claims)
    places = [mine.wide.index(rank) for rank in mine.inner]
    if places != list(range(places[0], places[0] + len(places))):
        warn_user(
            f"{what}: the ranks {mine.inner} of the inner group do not follow each other in {mine.wide}: this is "
            "correct, but inner groups are meant to be of neighbours, on one machine",
            [inner],
        )


def _not_mine(group: Any, name: str) -> str:
    """Return the problem with ``group`` if it is no process group of this rank."""
    if isinstance(group, dist.ProcessGroup) and group.rank() >= 0:
        return ""
    me = f" {dist.get_rank()}" if dist.is_initialized() else ""
    return f"expected {name} that this rank{me} is in, got {group!r}"


def _rows(claims: dict[int, _Claim]) -> Cut:
    return tuple(sorted({tuple(claim.inner) for claim in claims.values()}))


def _complaint(mine: _Claim, claims: dict[int, _Claim]) -> str | None:
    """Return the problem with the groups in ``claims``, the same text on all ranks; None: they fit."""
    for claim in (mine, *claims.values()):
        if claim.problem:
            return claim.problem
    wide, first = mine.wide, min(claims)
    inner = claims[first].inner
    for rank, claim in claims.items():
        if claim.wide != wide:
            return (
                f"the ranks have named different zero1 groups: rank {dist.get_rank()} has {wide}, rank {rank} has "
                f"{claim.wide}"
            )
    for rank, claim in claims.items():
        if len(claim.inner) != len(inner):
            return f"the zero3 groups must be of one size: rank {first} has {inner}, rank {rank} has {claim.inner}"
        outside = sorted(set(claim.inner) - set(wide))
        if outside:
            return (
                f"the zero1 group must hold the zero3 group, but of rank {rank}'s zero3 ranks {claim.inner} the ranks "
                f"{outside} are not in its zero1 group {wide}"
            )
    if len(wide) % (size := len(inner)):
        nearest = min((n for n in range(1, len(wide) + 1) if len(wide) % n == 0), key=lambda n: abs(n - size))
        return (
            f"the size of the zero1 group must be a multiple of that of the zero3 group, got {len(wide)} ranks {wide} "
            f"and {size} ranks {inner}; the nearest size that divides it is {nearest}"
        )
    for rank, claim in claims.items():
        for other in claim.inner:
            theirs = claims[other].inner
            if theirs != claim.inner:
                return f"the zero3 groups overlap: rank {rank} has {claim.inner}, rank {other} has {theirs}"
    return _complaint_of_outer(claims) if 1 < size < len(wide) else None


def _complaint_of_outer(claims: dict[int, _Claim]) -> str | None:
    """Return the problem of the first rank whose outer group is not of the ranks with its place in their inner groups.

    All ranks pass one, or none does.
    """
    rows, is_given = _rows(claims), any(claim.outer for claim in claims.values())
    for rank, claim in claims.items() if is_given else ():
        column = sorted(row[claim.inner.index(rank)] for row in rows)
        if claim.outer != column:
            got = f"got {claim.outer or None}"
            return f"the outer group of rank {rank} must have the ranks {column}, one of each zero3 group, {got}"
    return None


def _exchange(mine: _Claim) -> dict[int, _Claim]:
    """Return the claim of every rank of the wide group, by rank; of none if this rank is not in it.

    It goes through the world's store (csrc/README.md says why). A store may outlive the groups made with it, so keys
    begin with the world's generation.
    """
    world: Any = dist.group.WORLD
    if dist.get_backend(world) == "fake":  # there are no other ranks: assume that they would pass the same cut
        cut = _like(tuple(mine.inner), tuple(mine.wide))
        return {rank: mine._replace(inner=list(row), outer=[]) for row in cut for rank in row}
    if world not in _exchanged:
        _exchanged[world] = Meetings(store_of_world(), f"flatparam/pairs of {generation_of_world()}")
    answers = _exchanged[world].meet(mine.wide, json.dumps(mine))
    return {rank: _Claim(*json.loads(answer)) for rank, answer in zip(mine.wide, answers, strict=True)}


def _like(inner: tuple[int, ...], wide: tuple[int, ...]) -> Cut:
    """Cut ``wide`` into runs as long as ``inner``; if ``inner`` is not one of them, into the columns of a grid."""
    size, count = len(inner), len(wide) // max(1, len(inner))
    runs = tuple(wide[i * size : (i + 1) * size] for i in range(count))
    return runs if inner in runs else tuple(wide[i::count] for i in range(count))


def groups_over(strategy: ShardingStrategy, ranks: Sequence[int], inner: int) -> dict[str, dist.ProcessGroup]:
    """Return the groups of ``strategy`` for this rank over ``ranks``, by the names of ``TABLE``; made once.

    Inner groups are runs of ``inner`` ranks. All ranks of the world call this.
    """
    wide = tuple(ranks)
    rows = tuple(wide[i : i + inner] for i in range(0, len(wide), inner)) if is_grid(strategy) else ()
    cuts = {"inner": rows, "outer": tuple(zip(*rows, strict=True)), "wide": (wide,)}
    _cuts.setdefault(dist.group.WORLD, {}).update({(row, wide): rows for row in rows})
    world: Any = dist.group.WORLD
    backends, all_ranks = dist.get_backend_config(world), _ranks(world)
    made = {
        name: [(each, world if each == all_ranks else _made_once(each, backends)) for each in cut]
        for name, cut in cuts.items()
    }
    me = dist.get_rank()
    return {name: group for name, groups in made.items() for each, group in groups if me in each}


def _made_once(ranks: tuple[int, ...], backends: str) -> Any:
    """Return the group of ``ranks`` with ``backends``, made in the first call. All ranks of the world call this."""
    known, key = _made.setdefault(dist.group.WORLD, {}), (backends, ranks)
    if key not in known:
        known[key] = dist.new_group(list(ranks), backend=backends)
    return known[key]


def outer_group(inner: Any, wide: Any) -> Any:
    """Return the group of the ranks that have this rank's place in their inner groups, with the backends of ``wide``.

    It is made once. All ranks of ``wide`` call this.
    Raises: ValueError if ``wide`` is not the world, since torch needs all ranks of the world to make a group.
    """
    columns = [tuple(sorted(column)) for column in zip(*inner_groups(inner, wide), strict=True)]
    mine = columns[dist.get_rank(inner)]
    backends = dist.get_backend_config(wide)
    if (backends, mine) not in _made.get(dist.group.WORLD, {}):
        if _ranks(wide) != _ranks(dist.group.WORLD):
            raise ValueError(
                f"the zero1 group {list(_ranks(wide))} is not the world, so the outer groups cannot be made here: pass "
                f"process_group=(zero3 group, zero1 group, outer group), the last of ranks {list(mine)}, or a 2-D "
                "device_mesh (outer, inner)"
            )
        world: Any = dist.group.WORLD
        meet(world)  # torch would wait until the time-out for a rank that has ended before
        for column in columns:
            _made_once(column, backends)
    return _made_once(mine, backends)


def _ranks(group: Any) -> tuple[int, ...]:
    """Return the ranks of ``group``; none if it is no process group."""
    return tuple(ranks_of(group)) if isinstance(group, dist.ProcessGroup) else ()
