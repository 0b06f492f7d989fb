"""Compare a unit over its ranks while it is built, before ranks that differ could hang in its collectives.

The comparison is a unit's first collective, so a rank that cannot build its unit reports that in it. The wrapper and
LayerZero's handle call this module. It receives a unit in words (``Described``) and knows neither parameters nor
modules. It also makes the gloo group over which ranks exchange flags on the host, for ``placement.py``.
"""

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
from torch import Tensor

from ...common.collectives import check_gloo, gloo_beside, is_sliced, ranks_of, unwrapped
from ...common.described import Described, digest_of_said, first_difference
from ...common.warned import warn_user
from ..errors import OrderError
from .checked_collectives import exchange, gather_objects, meet
from .events import SetupCollective
from .stores import Store, store_of
from .unit_ids import UnitIds, ids_of

_SAID = 4  # words of 8 bytes in the digest of a description
_TOLD = "_flatparam_told"  # an attribute of errors that all ranks raise
_PATIENCE = 2.0  # seconds to wait for the other ranks without a warning

_Result = TypeVar("_Result")


class Agreed(NamedTuple):
    """The result of the comparison: the unit's ids, and by FQN the two ranks whose values of a parameter differ."""

    numbers: dict[UnitIds, int]
    mismatched: dict[str, list[int]]


def check_same_unit(
    described: Described,
    groups: list[dist.ProcessGroup],
    inner: dist.ProcessGroup | None,
    digests: Callable[[], dict[str, int]],
    shown: tuple[str, str],
) -> Agreed:
    """Compare a unit over each of ``groups``, and take its ids. A collective call: 48 bytes a rank and group.

    The caller assigns the ids to the unit (``unit_ids.assign``).

    Args: ``groups``: the list is emptied once the comparison has begun, see ``telling``; ``inner``: another group that
    needs an id of the unit; its ranks are all in one of ``groups``; ``digests``: returns the digest of each parameter's
    values by FQN, or nothing if values are not to be compared; not called if every group has one rank; ``shown``: for
    the error, not compared: the unit's name and place, and the units that this rank builds, in words.
    Raises: ValueError on all ranks alike. It names the first rank and parameter that differ from those of the group's
    first rank, or the rank that could not build its unit and the reason. Different values raise nothing here.
    """
    alone = all(dist.get_world_size(group) == 1 for group in groups)
    values = _Values({} if alone else digests())
    numbers: dict[UnitIds, int] = {}
    problem = _compare(described, groups, numbers, values, shown)
    if problem is not None:
        raise _told(problem)
    if inner is not None:
        ids = ids_of(inner)
        ids.generation = ids.generation or next(iter(numbers)).generation
        numbers[ids] = ids.of_built()
    return Agreed(numbers, values.mismatched)


def _told(problem: str) -> ValueError:
    """Return an error that all ranks raise, marked so that ``telling`` does not report it again."""
    error = ValueError(problem)  # made here: a local variable of the raising frame would keep the module alive
    vars(error)[_TOLD] = True
    return error


class _Values:
    """Digests of the first values of a unit's parameters, and by FQN the two ranks that differ (``mismatched``)."""

    def __init__(self, digests: dict[str, int]):
        self.mismatched: dict[str, list[int]] = {}
        self._names, self._digests = list(digests), list(digests.values())

    @property
    def word(self) -> bytes:
        """A digest, equal on ranks that have the same values and have found the same differences so far."""
        return hashlib.sha256(repr((self._digests, sorted(self.mismatched))).encode()).digest()[:8]

    def explain(self, group: dist.ProcessGroup) -> None:
        """Find the parameters that differ from those of the group's first rank. A collective call."""
        ranks = ranks_of(group)
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
    """Report an exception of the block to the ranks that are about to compare the unit: they raise a ValueError.

    ``groups``: the groups of the coming comparison, or none. The block keeps the list up to date. The report takes part
    in the other ranks' ``check_same_unit``, so it must be their next collective: ``check_same_unit`` empties the
    list once its first collective has begun. From then on other ranks may have read this rank's description and gone
    on, so all of them wait until this rank has ended, and are told its exception alike.
    Raises: the exception of the block.
    """
    try:
        yield
    except Exception as error:
        # all ranks raise an OrderError, or an error that is marked: there is nobody to tell
        if groups and _TOLD not in vars(error) and not isinstance(error, OrderError):
            vars(error)[_TOLD] = True
            said = f"rank {dist.get_rank()} could not build its unit: {type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):  # the other ranks have ended
                _compare(said, groups, {})
        raise


def _compare(
    said: Described | str,
    groups: list[dist.ProcessGroup],
    numbers: dict[UnitIds, int],
    values: _Values | None = None,
    shown: tuple[str, str] = ("", ""),
) -> str | None:
    """Compare ``said`` over one group after the other. Returns the problem, the same on all ranks; None: none.

    ``said``: the description, or the text of this rank's error. A problem in one group becomes ``said`` in the next,
    since the ranks there cannot know of it otherwise. Fills ``numbers`` with the id over each group. Empties
    ``groups`` once the first collective has begun.
    """
    for group in list(groups):
        everyone = _tell(said, group, groups, bytes(8) if values is None else values.word)
        ids = ids_of(group)
        ids.generation = ids.generation or f"{int(everyone[0, -1]):x}"
        numbers[ids] = ids.of_built()
        if not _is_same(everyone, slice(_SAID)):
            said = _explain(said, shown, group)
        elif values is not None and not _is_same(everyone, slice(_SAID, _SAID + 1)):
            values.explain(group)
    return said if isinstance(said, str) else None


def _tell(said: Described | str, group: dist.ProcessGroup, groups: list[dist.ProcessGroup], word: bytes) -> Tensor:
    """Gather 6 int64 words from each rank of ``group``: 4 of the digest of ``said``, ``word``, and a random number.

    The first rank's random number becomes the group's generation. Empties ``groups`` once the collective has begun.
    """
    digest = digest_of_said(said)
    parts = (*(digest[8 * i : 8 * i + 8] for i in range(_SAID)), word, os.urandom(8))
    words = [int.from_bytes(part, "little", signed=True) for part in parts]
    device = dist.distributed_c10d._get_object_coll_device(group)
    mine = torch.tensor(words, dtype=torch.int64, device=device)
    everyone = mine.new_empty(dist.get_world_size(group), len(mine))

    def begin(*tensors: Any, **options: Any) -> Any:
        work = dist.all_gather(*tensors, **options)
        groups.clear()
        return work

    late = threading.Timer(_PATIENCE, _warn_of_waiting, (said,))
    late.daemon = True
    if isinstance(said, str):
        late.start()
    try:
        exchange(SetupCollective.BUILDS, begin, list(everyone), mine, group=group)
    finally:
        late.cancel()
    return everyone.cpu()


def _is_same(everyone: Tensor, words: slice) -> bool:
    return bool((everyone[:, words] == everyone[0, words]).all())


def check_described(described: Described, problem: Exception | None, group: dist.ProcessGroup, name: str = "") -> None:
    """Compare the descriptions of all ranks of ``group``. A collective call: 48 bytes a rank if they agree.

    ``problem``: why this rank cannot build its part. ``name``: of the thing that is described, for the error.
    Raises: on all ranks alike: ``problem`` on the rank that has it, else ValueError. It names the first rank with a
    problem, or the first name in which a rank differs from the group's first.
    """
    refusal = f"rank {dist.get_rank()} cannot build its part of this unit: {problem}"
    groups = [group] if dist.get_world_size(group) > 1 else []
    found = _compare(refusal if problem else described, groups, {}, shown=(name, ""))
    try:
        if problem is not None:
            raise problem
    finally:
        problem = None  # the exception refers to this frame: break the cycle
    if found is not None:
        raise ValueError(found)


def _warn_of_waiting(said: str) -> None:
    """Show the error before the other ranks have come, as they may never come. Runs in a timer's thread."""
    with contextlib.suppress(UserWarning):  # warnings may be errors
        warnings.warn(f"waiting to tell the other ranks, which build it later or not at all, that {said}", stacklevel=2)


_hosts: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = weakref.WeakKeyDictionary()
_CONNECTING = datetime.timedelta(seconds=30)  # to connect gloo, at most: nothing interrupts that


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Return a gloo group with the ranks of ``group``, for messages on the host; None: there is no network for it.

    The first call over a group is collective, for ranks that have compared a unit over it. Later calls return the same.
    """
    if group not in _hosts:
        store = store_of(group)
        _hosts[group] = None if store is None else _group_on_host(group, store)
    return _hosts[group]


def _group_on_host(group: dist.ProcessGroup, store: Store) -> dist.ProcessGroup | None:
    """Make a gloo group that nobody else uses. Other threads may use the gloo of ``group`` (torch's asynchronous
    checkpoints), and the order of collectives in it would differ between ranks.

    Returns None, with a warning, if a rank finds no network for it, or does not connect.
    """
    meet(group)  # Ctrl-C and a rank that has ended interrupt this wait; they cannot interrupt gloo's connecting
    cpu, name = torch.device("cpu"), f"flatparam {ids_of(group).generation}"
    timeout, lacking = dist.constants.default_pg_timeout, None
    if is_sliced(group, cpu):  # it uses gloo, so the network works
        timeout = unwrapped(group._get_backend(cpu)).options._timeout
    else:  # no rank may wait for a connection to a rank without network
        _, lacking = _on_all_ranks(group, check_gloo)
    if lacking is None:
        connecting = min(timeout, _CONNECTING)
        made, lacking = _on_all_ranks(group, lambda: gloo_beside(group, store.raw, name, timeout, connecting))
    if lacking is None:
        return made
    warn_user(
        "ZERO_1 and LAYER_ZERO wait for the device in each step, as their ranks tell each other things over "
        f"{dist.get_backend(group)}: {lacking}. GLOO_SOCKET_IFNAME names an interface for gloo",
        [group],
    )
    return None


def _on_all_ranks(group: dist.ProcessGroup, call: Callable[[], _Result]) -> tuple[_Result | None, str | None]:
    """Call ``call`` on all ranks of ``group``. Returns its result, and words for the first rank on which it failed."""
    result: _Result | None = None
    problem = ""
    try:
        result = call()
    except (AttributeError, RuntimeError) as error:  # AttributeError: this torch has no gloo
        problem = str(error).split("\n")[0] or repr(error)
    told = zip(ranks_of(group), meet(group, problem), strict=True)
    return result, next((f"rank {rank} finds no network for gloo ({why})" for rank, why in told if why), None)


def _explain(said: Described | str, shown: tuple[str, str], group: dist.ProcessGroup) -> str:
    """Return the first rank's error, else the first difference from the group's first rank. A collective call."""
    ranks = ranks_of(group)
    everyone: list[Any] = gather_objects(SetupCollective.BUILDS, (said, *shown), group)
    described, names, plans = zip(*everyone, strict=True)
    for other in described:
        if isinstance(other, str):
            return other
    found = f"the ranks have built different units: {first_difference(ranks, described, names)}"
    first = plans[0]
    for rank, other in zip(ranks, plans, strict=True):
        if first and other and other != first:
            return f"{found}. Rank {ranks[0]} builds {first}, rank {rank} {other}"
    return found
