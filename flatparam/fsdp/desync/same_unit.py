"""Whether all ranks have built the same unit: found out before they talk past each other.

The first thing that a unit says to other ranks is this, so a rank that cannot build its unit says so here.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ...common.collectives import check_gloo, gloo_beside, is_sliced, unwrapped
from ...common.described import Described, digest_of_said, first_difference
from ..errors import OrderError
from .checked_collectives import exchange, gather_objects, meet
from .events import SetupCollective
from .stores import Store, store_of
from .unit_ids import UnitIds, ids_of

_SAID = 4  # words of 8 bytes in the digest of what a rank says
_TOLD = "_flatparam_told"  # an attribute of errors that all ranks know of
_PATIENCE = 2.0  # seconds in which the others are expected

_Result = TypeVar("_Result")


class Agreed(NamedTuple):
    """What ranks have found out about a unit: its numbers, and which of its values differ, see ``Unit.apart``."""

    numbers: dict[UnitIds, int]
    mismatched: dict[str, list[int]]


def check_same_unit(
    described: Described,
    groups: list[dist.ProcessGroup],
    inner: dist.ProcessGroup | None,
    digests: Callable[[], dict[str, int]],
) -> Agreed:
    """Compare a unit over ``groups``, which it is spread over. A collective call of 48 bytes for each.

    ``inner``: a group whose ranks are all in one of ``groups``, and which numbers the unit too; ``digests``: of each
    parameter's values, by FQN; empty: values are not compared; not called if there is nobody to compare with.
    Raises: ValueError on all ranks alike, naming the first rank and parameter that differ from those of rank 0, or the
    rank that could not build its unit and why.
    """
    alone = all(dist.get_world_size(group) == 1 for group in groups)
    values = _Values({} if alone else digests())
    numbers: dict[UnitIds, int] = {}
    problem = _compare(described, groups, numbers, values)
    if problem is not None:
        raise _told(problem)
    if inner is not None:
        ids = ids_of(inner)
        ids.generation = ids.generation or next(iter(numbers)).generation
        numbers[ids] = ids.of_built()
    return Agreed(numbers, values.mismatched)


def _told(problem: str) -> ValueError:
    """An error that all ranks know of."""
    error = ValueError(problem)  # not kept by the frame that raises it, which has the module
    vars(error)[_TOLD] = True
    return error


class _Values:
    """The values that a unit's parameters have at the beginning, as digests. ``apart``: those that differ."""

    def __init__(self, digests: dict[str, int]):
        self.mismatched: dict[str, list[int]] = {}
        self._names, self._digests = list(digests), list(digests.values())

    @property
    def word(self) -> bytes:
        """The same on all ranks that have the same values, and know of the same differences."""
        return hashlib.sha256(repr((self._digests, sorted(self.mismatched))).encode()).digest()[:8]

    def explain(self, group: dist.ProcessGroup) -> None:
        """Find the parameters that differ from those of the group's first rank. A collective call."""
        ranks = dist.get_process_group_ranks(group)
        everyone: list[Any] = gather_objects(SetupCollective.BUILDS, (self.mismatched, self._digests), group)
        for apart, _ in everyone:
            self.mismatched = apart | self.mismatched
        first = everyone[0][1]
        for rank, (_, digests) in zip(ranks, everyone, strict=True):
            for fqn, one, other in zip(self._names, first, digests, strict=False):
                if one != other:
                    self.mismatched.setdefault(fqn, [rank, ranks[0]])


@contextlib.contextmanager
def telling(groups: list[dist.ProcessGroup]) -> Iterator[None]:
    """An exception in the block is told to the ranks that are about to compare the unit: they raise one too.

    ``groups``: over which they will; the block changes them, to none when they have. Collective calls of this rank
    alone stand for theirs, so they must be about to. Raises: what the block does.
    """
    try:
        yield
    except Exception as error:
        if groups and _TOLD not in vars(error) and not isinstance(error, OrderError):  # that all ranks raise
            vars(error)[_TOLD] = True
            said = f"rank {dist.get_rank()} could not build its unit: {type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):  # they are gone
                _compare(said, groups, {})
        raise


def _compare(
    said: Described | str, groups: list[dist.ProcessGroup], numbers: dict[UnitIds, int], values: _Values | None = None
) -> str | None:
    """What is wrong, on all ranks of a group the same; None: nothing. A str is said by a rank that has an error.

    An error goes on to the ranks of the next group, which cannot know of it.
    """
    for group in groups:
        everyone = _tell(said, group, bytes(8) if values is None else values.word)
        ids = ids_of(group)
        ids.generation = ids.generation or f"{everyone[0][-1]:x}"
        numbers[ids] = ids.of_built()
        if not _is_same(everyone, slice(_SAID)):
            said = _explain(said, group)
        elif values is not None and not _is_same(everyone, slice(_SAID, _SAID + 1)):
            values.explain(group)
    return said if isinstance(said, str) else None


def _tell(said: Described | str, group: dist.ProcessGroup, word: bytes = bytes(8)) -> list[list[int]]:
    """What each rank of ``group`` says: the digest of it, ``word``, and a number that no other rank has."""
    digest = digest_of_said(said)
    parts = (*(digest[8 * i : 8 * i + 8] for i in range(_SAID)), word, os.urandom(8))
    mine = torch.tensor(
        [int.from_bytes(part, "little", signed=True) for part in parts],
        dtype=torch.int64,
        device=dist.distributed_c10d._get_object_coll_device(group),
    )
    everyone = mine.new_empty(dist.get_world_size(group), len(mine))
    late = threading.Timer(_PATIENCE, _warn_of_waiting, (said,))
    late.daemon = True
    if isinstance(said, str):
        late.start()
    try:
        exchange(SetupCollective.BUILDS, dist.all_gather, list(everyone), mine, group=group)
    finally:
        late.cancel()
    told: list[list[int]] = everyone.tolist()
    return told


def _is_same(everyone: list[list[int]], words: slice) -> bool:
    return all(everyone[0][words] == other[words] for other in everyone)


def check_described(described: Described, problem: Exception | None, group: dist.ProcessGroup) -> None:
    """Compare over ``group`` what its ranks are about to build. A collective call of 48 bytes if they agree.

    ``problem``: why this rank cannot build it. Raises: it, or ValueError, on all ranks alike, naming the first rank
    that has one, or the first name in which a rank differs from the first.
    """
    refusal = f"rank {dist.get_rank()} cannot build its part of this unit: {problem}"
    found = _compare(refusal if problem else described, [group] if dist.get_world_size(group) > 1 else [], {})
    try:
        if problem is not None:
            raise problem
    finally:
        problem = None  # it has this frame, and the caller's
    if found is not None:
        raise ValueError(found)


def _warn_of_waiting(said: str) -> None:
    """For ranks that may never come: then the error must be seen nevertheless. By a thread."""
    with contextlib.suppress(UserWarning):  # where warnings are errors
        warnings.warn(f"waiting to tell the other ranks, which build it later or not at all, that {said}", stacklevel=2)


_hosts: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = weakref.WeakKeyDictionary()
_CONNECTING = datetime.timedelta(seconds=30)  # where nobody has said that there is a network for gloo


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """One of the same ranks, over which they tell each other things on the host; None where they cannot.

    A collective call, the first time over a group, for ranks that have compared a unit over it.
    """
    if group not in _hosts:
        store = store_of(group)
        _hosts[group] = None if store is None else _group_on_host(group, store)
    return _hosts[group]


def _group_on_host(group: dist.ProcessGroup, store: Store) -> dist.ProcessGroup | None:
    """One of gloo that is ours alone: others use the one that was given in threads of theirs, as torch's asynchronous
    checkpoints do. None, and a warning, where that has no gloo and a rank finds no network for one.
    """
    meet(group)  # Ctrl-C, and the end of another rank, ends this wait; not that for gloo's connections
    cpu, name = torch.device("cpu"), f"flatparam {ids_of(group).generation}"
    if is_sliced(group, cpu):  # its network is there
        timeout = unwrapped(group._get_backend(cpu)).options._timeout
        return gloo_beside(group, store.raw, name, timeout, connecting=timeout)
    _, lacking = _on_all_ranks(group, check_gloo)  # so that no rank tries to connect to one that cannot
    if lacking is None:
        timeout = dist.constants.default_pg_timeout
        made, lacking = _on_all_ranks(group, lambda: gloo_beside(group, store.raw, name, timeout, _CONNECTING))
    if lacking is None:
        return made
    warnings.warn(
        "ZERO_1 and LAYER_ZERO wait for the device in each step, as their ranks tell each other things over "
        f"{dist.get_backend(group)}: {lacking}. GLOO_SOCKET_IFNAME names an interface for gloo",
        stacklevel=2,
    )
    return None


def _on_all_ranks(group: dist.ProcessGroup, call: Callable[[], _Result]) -> tuple[_Result | None, str | None]:
    """What ``call`` returns, and the first rank on which it finds no network for gloo, with the reason."""
    result: _Result | None = None
    problem = ""
    try:
        result = call()
    except (AttributeError, RuntimeError) as error:  # AttributeError: this torch has no gloo
        problem = str(error).split("\n")[0] or repr(error)
    told = zip(dist.get_process_group_ranks(group), meet(group, problem), strict=True)
    return result, next((f"rank {rank} finds no network for gloo ({why})" for rank, why in told if why), None)


def _explain(said: Described | str, group: dist.ProcessGroup) -> str:
    """The first error, or else difference from the group's first rank. A collective call."""
    ranks = dist.get_process_group_ranks(group)
    everyone = gather_objects(SetupCollective.BUILDS, said, group)
    for other in everyone:
        if isinstance(other, str):
            return other
    return f"the ranks have built different units: {first_difference(ranks, everyone)}"
