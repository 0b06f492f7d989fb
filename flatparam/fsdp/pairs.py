"""A wide group of ranks cut into inner groups: whether all ranks cut it alike, and the groups across the cuts."""

import json
import warnings
import weakref
from typing import Any

import torch.distributed as dist

from .peers import Meetings, life_of_world

Cut = tuple[tuple[int, ...], ...]  # the ranks, counted in the world, of every inner group

_cuts: "weakref.WeakKeyDictionary[Any, dict[Any, Cut]]" = weakref.WeakKeyDictionary()
_exchanged: "weakref.WeakKeyDictionary[Any, Meetings]" = weakref.WeakKeyDictionary()
_made: "weakref.WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], Any]]" = weakref.WeakKeyDictionary()


def inner_groups(inner: Any, wide: Any) -> Cut:
    """The inner groups that ``wide`` is cut into, by their first ranks, as ``check_pair`` has found them."""
    return _cuts[dist.group.WORLD][_ranks(inner), _ranks(wide)]


def remember_cut(inner: Any, wide: Any, cut: Cut) -> None:
    """As if ``check_pair`` had found it."""
    _cuts.setdefault(dist.group.WORLD, {}).setdefault((_ranks(inner), _ranks(wide)), cut)


def check_pair(inner: Any, wide: Any, what: str) -> None:
    """Compare with all ranks of ``wide`` how it is cut into groups like ``inner``.

    A call that all of them make; it moves no tensor. ``what``: begins the messages.
    Raises: ValueError on each rank of ``wide`` alike unless the inner groups are of one size, disjoint, inside of
    ``wide`` and cover it, and all have named the same ``wide``.
    """
    mine = (_ranks(inner), _ranks(wide))
    claims = _exchange(mine)
    complaint = _complaint(mine, claims)
    if complaint is not None:
        raise ValueError(f"{what}: {complaint}")
    known = _cuts.setdefault(dist.group.WORLD, {})
    if mine in known:
        return
    known[mine] = tuple(sorted({claim[0] for claim in claims.values()}))
    places = [mine[1].index(rank) for rank in mine[0]]
    if places != list(range(places[0], places[0] + len(places))):
        warnings.warn(
            f"{what}: the ranks {list(mine[0])} of the inner group do not follow each other in {list(mine[1])}: this "
            "is correct, but inner groups are meant to be of neighbours, on one machine",
            stacklevel=3,
        )


def _complaint(mine: tuple[tuple[int, ...], tuple[int, ...]], claims: dict[int, Any]) -> str | None:
    """What is wrong with the groups that the ranks have named, the same on all of them; None: nothing."""
    wide = mine[1]
    for rank, (_, other) in claims.items():
        if other != wide:
            return (
                f"the ranks have named different zero1 groups: rank {dist.get_rank()} has {list(wide)}, rank {rank} "
                f"has {list(other)}"
            )
    first = min(claims)
    size = len(claims[first][0])
    for rank, (inner, _) in claims.items():
        if len(inner) != size:
            return (
                f"the zero3 groups must be of one size: rank {first} has {list(claims[first][0])}, rank {rank} has "
                f"{list(inner)}"
            )
        outside = sorted(set(inner) - set(wide))
        if outside:
            return (
                f"the zero1 group must hold the zero3 group, but of rank {rank}'s zero3 ranks {list(inner)} the ranks "
                f"{outside} are not in its zero1 group {list(wide)}"
            )
    if len(wide) % size:
        nearest = min((n for n in range(1, len(wide) + 1) if len(wide) % n == 0), key=lambda n: abs(n - size))
        return (
            f"the size of the zero1 group must be a multiple of that of the zero3 group, got {len(wide)} ranks "
            f"{list(wide)} and {size} ranks {list(claims[first][0])}; the nearest size that divides it is {nearest}"
        )
    for rank, (inner, _) in claims.items():
        for other in inner:
            theirs = claims[other][0]
            if theirs != inner:
                return f"the zero3 groups overlap: rank {rank} has {list(inner)}, rank {other} has {list(theirs)}"
    return None


def _exchange(mine: tuple[tuple[int, ...], tuple[int, ...]]) -> dict[int, Any]:
    """What every rank of the wide group has named in its call of the same number, by rank.

    Through the store that the process group was made with: ranks that disagree about groups would wait for each other
    in a collective over them. A store may outlive the groups made with it, so keys have the number of the world, which
    each rank counts alike.
    """
    inner, wide = mine
    world: Any = dist.group.WORLD
    if dist.get_backend(world) == "fake":  # there are no other ranks: they would have cut it as we have
        return {rank: (row, wide) for row in _like(inner, wide) for rank in row}
    if world not in _exchanged:
        store = dist.distributed_c10d._get_default_store()
        _exchanged[world] = Meetings(store, f"flatparam/pairs of {life_of_world()}")
    answers = _exchanged[world].meet(wide, json.dumps(mine))
    return {rank: tuple(map(tuple, json.loads(answer))) for rank, answer in zip(wide, answers, strict=True)}


def _like(inner: tuple[int, ...], wide: tuple[int, ...]) -> Cut:
    """``wide`` cut into runs like ``inner``, or, if that is no run, as the columns of a grid."""
    size, count = len(inner), len(wide) // max(1, len(inner))
    runs = tuple(wide[i * size : (i + 1) * size] for i in range(count))
    return runs if inner in runs else tuple(wide[i::count] for i in range(count))


def outer_group(inner: Any, wide: Any, given: Any = None) -> Any:
    """The group of the ranks that have this one's place in their inner groups: ``given``, or made here once, with the
    backends of ``wide``.

    All ranks of ``wide`` call it. Raises: ValueError for a ``given`` one of other ranks, and without one unless
    ``wide`` is the world: torch makes groups with all of its ranks.
    """
    cut = inner_groups(inner, wide)
    columns = [tuple(sorted(column)) for column in zip(*cut, strict=True)]
    mine = columns[dist.get_rank(inner)]
    if given is not None:
        if _ranks(given) != mine:
            raise ValueError(
                f"the outer group must have the ranks {list(mine)}, which have this rank's place in the zero3 groups "
                f"{[list(row) for row in cut]}, got {list(_ranks(given))}"
            )
        return given
    backends = dist.get_backend_config(wide)
    known = _made.setdefault(dist.group.WORLD, {})
    if (backends, mine) not in known:
        if _ranks(wide) != _ranks(dist.group.WORLD):
            raise ValueError(
                f"the zero1 group {list(_ranks(wide))} is not the world, so the outer groups cannot be made here: pass "
                f"process_group=(zero3 group, zero1 group, outer group), the last of ranks {list(mine)}, or a 2-D "
                "device_mesh (outer, inner)"
            )
        known.update(((backends, column), dist.new_group(list(column), backend=backends)) for column in columns)
    return known[backends, mine]


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
