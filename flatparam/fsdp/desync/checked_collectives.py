"""Issue collectives from Python and wait for them, with the checks of ``trace.py``.

The C core issues the collectives of a step. Python issues the others: those of units outside of a step (``before``),
setup collectives (``exchange``), and collectives that no trace records (``issue`` and ``wait``). The module owns the
traces: one for each group and device type. It knows a flat parameter as ``Shared`` and no other part of a unit.
A wait notices Ctrl-C and ranks that have ended. An interrupted wait leaves the collective running.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _C
from ...common.collectives import (
    is_sliced,
    name_of,
    ranks_of,
    tells_when_done,
    unwrapped,
    wait_for_device,
    wait_in_slices,
    wait_in_thread,
)
from ...common.patches import FOR_GOOD, note
from ...common.tensors import bytes_of
from ..errors import OrderError, StoreGoneError
from . import liveness, stores
from .events import SetupCollective, encode
from .stores import all_groups, store_of
from .trace import AND_SO, TRANSPORT, GroupTrace, explaining
from .unit_ids import Numbered, Shared, id_of_flat_param

_traces: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, GroupTrace | None]] = weakref.WeakKeyDictionary()


def trace_of(group: dist.ProcessGroup | None, device: torch.device) -> GroupTrace | None:
    """Return the trace of ``group`` for units on ``device``. A group may have one backend for each device type.

    None: the group is not checked. It has one rank, no store, no backend of torch's for the device, or ranks that are
    not processes.
    """
    if group is None:
        return None
    of_group = _traces.setdefault(group, {})
    if device.type not in of_group:
        of_group[device.type] = _make(group, device)
    return of_group[device.type]


def _make(group: dist.ProcessGroup, device: torch.device) -> GroupTrace | None:
    store = store_of(group)
    if store is None or dist.get_world_size(group) == 1:
        return None
    try:
        backend: Any = group._get_backend(device)
    except RuntimeError:  # the group has no backend of torch's kind for this device
        return None
    is_wrapped, backend = unwrapped(backend) is not backend, unwrapped(backend)
    if name_of(backend) in stores.WITHOUT_STORE:
        return None
    trace = GroupTrace(group, backend, store, device.type)
    # torch's debug wrapper compares collectives too, but only fails at the time-out: ask the other ranks before it does
    trace.core.always = int(is_wrapped or dist.get_debug_level() == dist.DebugLevel.DETAIL)
    return trace


def _end_after_fork() -> None:
    for of_group in _traces.values():
        for trace in filter(None, of_group.values()):
            trace.end_after_fork()


os.register_at_fork(after_in_child=_end_after_fork)
note(
    FOR_GOOD,
    ["os:register_at_fork"],
    "End the collective traces in a child that a rank forks: it is no rank.",
    "tests/fsdp/desync/test_fsdp_order.py",
    "Python has none.",
)


def before(part: Shared, kind: int, device: torch.device) -> GroupTrace | None:
    """Record a collective outside of a step, before it is issued on ``device`` over ``part.group``.

    Args: ``kind``: one of ``_C.EVENT_*``.
    Returns: the trace to wait on; None if the group is not checked.
    Raises: OrderError if another rank has come to another collective.
    """
    come_back()
    number = id_of_flat_param(part)
    trace = None if number is None else trace_of(part.group, device)
    if trace is not None and number is not None:
        trace.core.note(number * _C.EVENT_KINDS + kind, False)
    return trace


def all_reduce(tensor: Tensor, op: Any, part: Shared, kind: int) -> None:
    """All-reduce a small tensor in place, outside of a step, over ``part.group``, and wait for it.

    Where the collective concerns several flat parameters, ``part`` is the first.
    """
    group = part.group
    assert group is not None
    trace = before(part, kind, tensor.device)
    if trace is None:
        run(dist.all_reduce, tensor, op=op, group=group)
    else:
        trace.run(lambda: dist.all_reduce(tensor, op=op, group=group, async_op=True))


STAYS_AWAY = "has not gone on since"  # in messages about ranks that have caught an exception
CAME_LATE = "live, but came late or not at all to a collective"  # in messages about ranks that may all be alive
# Traces in which a rank of this process has reported an exception and has not gone on since: others may wait for it
troubled: list[GroupTrace] = []


def tell_trouble(parts: Iterable[Shared], error: BaseException) -> None:
    """Tell the ranks that share ``parts`` that ``error`` has ended a collective call here. This process goes on.

    Not for an OrderError, which every rank raises, nor for KeyboardInterrupt and other errors that are no Exception,
    nor after the end of the process group: nobody waits for this rank.
    """
    if not isinstance(error, Exception) or isinstance(error, OrderError):
        return
    with contextlib.suppress(StoreGoneError):
        # all_groups() is empty after the end of the process group, and lacks groups of ranks that are other threads
        for trace in {trace_of(group, part.device) for part in parts for group in part.groups if group in all_groups()}:
            if trace is not None and trace not in troubled:
                trace.tell_trouble(liveness.describe(error, dist.get_rank(), STAYS_AWAY))
                troubled.append(trace)


@contextlib.contextmanager
def telling(units: Callable[[], Iterable[Numbered]]) -> Iterator[None]:
    """A block with collectives of ``units()`` outside of a step. Tell the other ranks of an exception that ends it."""
    try:
        yield
    except Exception as error:
        tell_trouble((part for unit in units() for part in unit.flat_params if part.is_sharded), error)
        raise


def come_back() -> None:
    """Withdraw the reports of ``tell_trouble``: this rank goes on. Not in a block of ``still_troubled``.

    Reports of another world stay: its rank is another thread of this process.
    """
    world = dist.group.WORLD
    for trace in [trace for trace in troubled if trace.world() in (None, world)] if troubled else ():
        if world not in _still_troubled:
            troubled.remove(trace)
            trace.come_back()


_still_troubled: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # worlds


def still_troubled(parts: Iterable[Shared], error: Exception | None) -> _C.Block:
    """A block with collectives that this rank issues although it has caught ``error``; None: it has caught none.

    Other ranks may not come to them. If they are elsewhere, all ranks raise the text of ``error``, and not that ranks
    differ.
    """

    world: Any = dist.group.WORLD

    def begin() -> None:
        if error is not None and world is not None:
            tell_trouble(parts, error)
            _still_troubled.add(world)

    def end() -> None:
        if world is not None:
            _still_troubled.discard(world)
        come_back()

    return _C.Block(begin, end)


_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, liveness.Meetings] = weakref.WeakKeyDictionary()
_connected: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # a collective was begun over them


def issue(collective: Callable[..., Any], *tensors: Any, group: dist.ProcessGroup, **options: Any) -> Any:
    """Begin a collective that no trace records. Returns its work, for ``wait``. All ranks of ``group`` must call this.

    Ranks wait for each other inside torch's call with TORCH_DISTRIBUTED_DEBUG=DETAIL, and in the first collective of
    NCCL over a group. Ctrl-C cannot end that wait, so in these cases the ranks meet in the store first.
    Raises: OrderError if another rank cannot come to that meeting, or if torch refuses to begin and one is the reason.
    """
    come_back()
    _connect(group, tensors[-1].device)
    with explaining_over(group):
        return collective(*tensors, group=group, async_op=True, **options)


def run(collective: Callable[..., Any], *tensors: Any, group: dist.ProcessGroup, **options: Any) -> None:
    """Begin a collective as ``issue`` does, and wait for it as ``wait`` does."""
    wait(issue(collective, *tensors, group=group, **options), group, tensors[-1].device)


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    connects = group not in _connected and tells_when_done(group, device)
    if connects or dist.get_debug_level() == dist.DebugLevel.DETAIL:
        meet(group)
        _connected.add(group)


def exchange(
    what: SetupCollective, collective: Callable[..., Any], *tensors: Any, group: dist.ProcessGroup, **options: Any
) -> None:
    """Run a setup collective outside of a step, and wait until the host can read its result.

    It begins as in ``issue``. After ``check_exchanges`` for ``group`` it is checked like the collectives of units.
    Raises: OrderError if another rank has come to another collective, or cannot come to this one.
    """
    come_back()
    device = tensors[-1].device
    traces = [trace for _, trace in sorted(_checked.get(group, {}).items())]
    ranks_of(group)  # refuses a destroyed group before the traces note a collective that would never begin
    for trace in traces:
        trace.core.note(encode(what), False)
    _connect(group, device)
    for trace in traces:
        trace.core.launch()
    with explaining_over(group, look_of(group, traces=traces)):
        work = collective(*tensors, group=group, async_op=True, **options)
    for trace in traces:
        trace.core.begin()
    wait(work, group, device, is_read=True, traces=traces)


_checked: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, GroupTrace]] = weakref.WeakKeyDictionary()


def check_exchanges(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Check each later ``exchange`` over ``groups``, in one order with the collectives of units on ``device``.

    All ranks of a group must call this between the same two exchanges. It is not done for every group: ranks may load
    models and run them alone, and their orders would differ.
    """
    for group in groups:
        trace = trace_of(group, device)
        if trace is not None:
            _checked.setdefault(group, {})[device.type] = trace


def note_meeting(what: SetupCollective, parts: Iterable[Shared], ranks: list[int]) -> list[GroupTrace]:
    """Record that this rank meets ``ranks`` in a store, in one order with the collectives of ``parts``.

    Groups with other ranks are left out: those do not come. So are groups that cannot be used any more: values may be
    saved without them.
    Returns: the traces, for ``look_at_meeting`` during the wait. Raises: OrderError if a rank of theirs is elsewhere.
    """
    groups = {(group, part.device): None for part in parts for group in part.groups}
    inside = [(group, device) for group, device in groups if set(ranks).issuperset(ranks_of(group))]
    found = dict.fromkeys(filter(None, (trace_of(group, device) for group, device in inside)))
    traces = [trace for trace in found if not trace.core.broken]
    for trace in traces:
        trace.note_meeting(what)
    return traces


def meet(group: dist.ProcessGroup, mine: str = "is here") -> list[str]:
    """Wait in the store until all ranks of ``group`` are here. Returns the text ``mine`` of each, in rank order.

    Ctrl-C ends the wait. Raises: OrderError if a rank has ended.
    """
    store, ranks = store_of(group), ranks_of(group)
    if store is None or len(ranks) == 1:
        return [mine]
    if group not in _meetings:
        _meetings[group] = liveness.Meetings(
            store.own_connection(), f"flatparam meets {liveness.generation_of_world()}"
        )
    said = _meetings[group].meet(ranks, mine, look=functools.partial(_raise_if_troubled, group))
    _meetings[group].forget()
    return said


def _raise_if_troubled(group: dist.ProcessGroup, waited: float) -> None:
    for trace in filter(None, _traces.get(group, {}).values()):
        trace.raise_if_troubled(waited)


def look_of(
    group: dist.ProcessGroup, by_device: bool = False, traces: Iterable[GroupTrace] = ()
) -> Callable[..., None]:
    """Return the function with which a wait looks after the other ranks of ``group`` from now on.

    It raises OrderError if one of them cannot come. With ``has_failed`` it asks why the collective has failed.
    """
    begin = time.monotonic()
    is_absent = (lambda rank: True) if by_device else None  # a collective of NCCL does not fail when a process ends

    def look(has_failed: bool = False) -> None:
        for each in traces:
            each.look()
        ours, ranks = liveness.board(), ranks_of(group)
        try:
            waited = time.monotonic() - begin
            _raise_if_troubled(group, waited)
            found = ours and (ours.diagnose(ranks) if has_failed else ours.find_dead(ranks, waited, is_absent))
            if found:
                for each in traces:  # of several lost ranks all ranks name the same one
                    each.break_for(found)
        except StoreGoneError as error:
            found = str(error) if has_failed else None
        if found:
            raise OrderError(found if found.endswith(AND_SO) else found + AND_SO)

    return look


def wait(
    work: Any,
    group: dist.ProcessGroup,
    device: torch.device,
    is_reduce_scatter: bool = False,
    is_read: bool = False,
    traces: Iterable[GroupTrace] = (),
) -> None:
    """Wait for a collective of ``issue``. Ctrl-C ends the wait and leaves the collective running.

    Args: ``is_reduce_scatter``: gloo's takes no time-out, so a thread waits for it; ``is_read``: the host reads the
    result, so wait until the device has it; ``traces``: the traces that have recorded the collective.
    Raises: OrderError if another rank cannot come to it. On NCCL the communicator is then aborted.
    """
    if work is None:
        return
    sliced = is_sliced(group, device)
    by_device = is_read and group.size() > 1 and tells_when_done(group, device)
    trace = _traces.get(group, {}).get(device.type) if by_device else None
    before = torch.accelerator.current_stream(device).record_event() if by_device else None
    look = look_of(group, by_device, traces)
    with explaining_over(group, look):
        try:
            if is_reduce_scatter and sliced and device.type == "cpu":
                wait_in_thread(work, look)
            elif by_device:
                wait_for_device(work, look)
                if trace is not None:
                    trace.raise_if_closed()  # the watching thread has aborted the collective: it has no result
            else:
                wait_in_slices(work, sliced, look)
        except OrderError:
            if by_device:
                if trace is not None:
                    trace.core.broken = _C.TRACE_BROKEN if before is not None and before.query() else _C.TRACE_LOST
                    trace.note_told()
                group._get_backend(device).abort()
            raise


def explaining_over(
    group: dist.ProcessGroup, look: Callable[..., None] | None = None
) -> contextlib.AbstractContextManager[None]:
    """A block with a collective over ``group``: raise why another rank does not come, in place of torch's error.

    ``look``: as ``look_of`` returns it. Without one the block looks only after the collective has failed.
    """
    return explaining(functools.partial(_raise_reason, group, look or look_of(group), time.monotonic()))


def _raise_reason(group: dist.ProcessGroup, look: Callable[..., None], begin: float, message: str) -> None:
    """Raise why a collective over ``group`` has failed, in the same words on all ranks; return if no reason is found.

    Each rank says in the store how many seconds it has waited. Live ranks that have not come, or came late, are the
    reason: the others have waited until the time-out.
    """
    if not TRANSPORT.search(message):
        return None
    waited, store, ranks = time.monotonic() - begin, store_of(group), ranks_of(group)
    if store is None:
        return look(has_failed=True)
    with contextlib.suppress(StoreGoneError):
        store = store.below(f"flatparam failed {liveness.generation_of_world()}")
        store.set(str(dist.get_rank()), str(waited))
    look(has_failed=True)
    with contextlib.suppress(StoreGoneError):
        of_ranks = {rank: float(store.value_at(str(rank)) or 0) for rank in ranks}
        longest = max(of_ranks.values())
        late = [rank for rank, seconds in of_ranks.items() if seconds < longest / 2]
        if late:
            found = f"ranks {late} {CAME_LATE}; others waited {longest:.0f} s"
            raise OrderError(store.compare_set("reason", "", found) + AND_SO)


def settle(parts: Iterable[Shared]) -> None:
    """Wait until the devices of ``parts`` are idle. Call it before shards are read or saved without a collective.

    Raises: OrderError if a device was waiting for a collective that was aborted: the shards are not valid then.
    """
    found: dict[GroupTrace, torch.device] = {}
    for part in parts:
        for group in part.groups:
            trace = _traces.get(group, {}).get(part.device.type)
            if trace is not None and trace.is_by_device:
                found[trace] = part.device
    for device in set(found.values()):
        _C.wait_device(str(device))
    for trace in found:
        trace.raise_if_lost()


def gather_objects(what: SetupCollective, mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the object ``mine`` of every rank of ``group``, in rank order. A collective call: two of ``exchange``.

    Raises: ValueError on all ranks if one of them cannot pickle its object; OrderError as ``exchange`` does.
    """
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))

    def gather(tensor: Tensor) -> list[Tensor]:
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        exchange(what, dist.all_gather, everyone, tensor, group=group)
        return everyone

    try:
        data = pickle.dumps((None, mine))
    except Exception as error:
        data = pickle.dumps((f"{type(error).__name__}: {error}", None))
    sizes = [int(size) for size in gather(torch.tensor([len(data)], device=device))]
    padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8).to(device)
    found = [pickle.loads(bytes_of(other)) for other in map(Tensor.cpu, gather(padded))]
    for rank, (problem, _) in zip(ranks_of(group), found, strict=True):
        if problem is not None:
            raise ValueError(f"rank {rank} has a value that cannot be sent to other ranks: {problem}")
    return [other for _, other in found]
