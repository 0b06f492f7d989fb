"""Collectives that Python begins, and which of them are checked: see ``trace.py``."""

from __future__ import annotations

import os
import pickle
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _C
from ...common.collectives import (
    gathering,
    is_replaced,
    is_sliced,
    name_of,
    tells_when_done,
    unwrapped,
    wait_for_device,
    wait_in_slices,
    wait_in_thread,
)
from ..errors import OrderError, StoreGoneError
from . import liveness, stores
from .events import SetupCollective, encode
from .stores import store_of
from .trace import AND_SO, TRANSPORT, GroupTrace
from .unit_ids import Shared, id_of_flat_param

_traces: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, GroupTrace | None]] = weakref.WeakKeyDictionary()


def trace_of(group: dist.ProcessGroup | None, device: torch.device) -> GroupTrace | None:
    """The one of ``group`` for units on ``device``: a group may have a backend for each type of device.

    None where its ranks are no processes that could disagree.
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
    except RuntimeError:  # it is no backend of torch's kind
        return None
    is_wrapped, backend = unwrapped(backend) is not backend, unwrapped(backend)
    if name_of(backend) in stores.WITHOUT_STORE:
        return None
    trace = GroupTrace(group, backend, store, device.type)
    # a wrapper's own comparison waits as long as a collective may take
    trace.core.always = int(is_wrapped or dist.get_debug_level() == dist.DebugLevel.DETAIL)
    return trace


def _end_after_fork() -> None:
    for of_group in _traces.values():
        for trace in filter(None, of_group.values()):
            trace.end_after_fork()


os.register_at_fork(after_in_child=_end_after_fork)


def before(part: Shared, kind: int, device: torch.device) -> GroupTrace | None:
    """Record a collective outside of a step, on ``device``, over the ranks that share ``part``.

    Returns: the trace to wait on, or None if the group is not checked.

    Raises: OrderError, when the other ranks do another thing.
    """
    come_back()
    number = id_of_flat_param(part)
    trace = None if number is None else trace_of(part.group, device)
    if trace is not None and number is not None:
        trace.core.note(number * _C.EVENT_KINDS + kind, False)
    return trace


def all_reduce(tensor: Tensor, op: Any, part: Shared, kind: int) -> None:
    """A small one outside of a step, over the ranks that share ``part``, the first that it is about."""
    group = part.group
    assert group is not None
    trace = before(part, kind, tensor.device)
    if trace is None:
        wait(issue(dist.all_reduce, tensor, op=op, group=group), group, tensor.device)
    else:
        trace.core.launch()
        trace.wait(dist.all_reduce(tensor, op=op, group=group, async_op=True))


troubled: list[
    GroupTrace
] = []  # whose ranks wait, maybe, for one that an exception has kept from what comes next: this


def tell_trouble(parts: Iterable[Shared], error: BaseException) -> None:
    """Tell waiting ranks that ``error`` has ended a pass of the units of ``parts`` on this rank, which lives on."""
    if not isinstance(error, Exception) or isinstance(error, OrderError):
        return
    for trace in _traces_of(parts):
        if trace not in troubled:
            trace.tell_trouble(liveness.describe(error, dist.get_rank(), "has not gone on since"))
            troubled.append(trace)


def _traces_of(parts: Iterable[Shared]) -> dict[GroupTrace, torch.device]:
    """Those that there are for the collectives of ``parts``, each with their device."""
    found = {}
    for part in parts:
        for group in part.groups:
            trace = _traces.get(group, {}).get(part.device.type)
            if trace is not None:
                found[trace] = part.device
    return found


def come_back() -> None:
    """This rank goes on after what it has told by ``tell_trouble``."""
    while troubled:
        troubled.pop().come_back()


_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, liveness.Meetings] = weakref.WeakKeyDictionary()
_connected: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # a collective was begun over them


def issue(collective: Callable[..., Any], *tensors: Any, group: dist.ProcessGroup, **options: Any) -> Any:
    """Begin a collective that is in no order, to be waited for by ``wait``: all ranks of ``group`` by this function.

    TORCH_DISTRIBUTED_DEBUG=DETAIL has ranks wait for each other where it begins, as NCCL has for the first one over a
    group, and Ctrl-C cannot end that: there they meet in the store before. Raises: OrderError, when another rank cannot
    come to it.
    """
    _connect(group, tensors[-1].device)
    return collective(*tensors, group=group, async_op=True, **options)


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    connects = group not in _connected and tells_when_done(group, device)
    if connects or dist.get_debug_level() == dist.DebugLevel.DETAIL:
        meet(group)
        _connected.add(group)


def exchange(
    what: SetupCollective, collective: Callable[..., Any], *tensors: Any, group: dist.ProcessGroup, **options: Any
) -> None:
    """A collective of no unit, outside of a step, until the host can read what came; as ``issue`` begins it.

    Once ``check_exchanges`` was called for ``group`` it is checked as those of units are. Raises: OrderError, when
    another rank does another thing, or cannot come to it.
    """
    come_back()
    device = tensors[-1].device
    traces = [trace for _, trace in sorted(_checked.get(group, {}).items())]
    for trace in traces:
        trace.core.note(encode(what), False)
    _connect(group, device)
    for trace in traces:
        trace.core.launch()
    work = collective(*tensors, group=group, async_op=True, **options)
    for trace in traces:
        trace.core.begin()
    wait(work, group, device, is_read=True, traces=traces)


_checked: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, GroupTrace]] = weakref.WeakKeyDictionary()


def check_exchanges(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """From now on those over these groups are checked, in the order of what units on ``device`` do.

    All ranks of a group must call this between the same two of them: others may have an order of it or none, as ranks
    may load models and run them alone.
    """
    for group in groups:
        trace = trace_of(group, device)
        if trace is not None:
            _checked.setdefault(group, {})[device.type] = trace


def begin_gather(native: _C.Gather | None, output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Any:
    """The all-gather of ``native_gather(group)``, into ``output`` ``[ranks * n]``, as ``issue`` begins it."""
    if native is None or is_replaced(gathering()):
        return issue(gathering(), output, shard.detach(), group=group)
    native.begin(output, shard)
    return native


def meet(group: dist.ProcessGroup, mine: str = "is here") -> list[str]:
    """What each rank says; the wait for it is in the store. Raises: OrderError, when one cannot come."""
    store, ranks = store_of(group), dist.get_process_group_ranks(group)
    if store is None or len(ranks) == 1:
        return [mine]
    if group not in _meetings:
        _meetings[group] = liveness.Meetings(
            store.own_connection(), f"flatparam meets {liveness.generation_of_world()}"
        )
    said = _meetings[group].meet(ranks, mine)
    _meetings[group].forget()
    return said


def wait(
    work: Any,
    group: dist.ProcessGroup,
    device: torch.device,
    is_reduce_scatter: bool = False,
    error: Exception | None = None,
    is_read: bool = False,
    traces: Iterable[GroupTrace] = (),
) -> None:
    """For a collective that is in no order, as those by which units are compared. Ctrl-C ends it, not the collective.

    ``error``: that waiting for it has raised already; ``is_read``: by the host, which waits for a device then;
    ``traces``: that it is in nevertheless.
    Raises: OrderError, when another rank cannot come to it.
    """
    if work is None:
        return
    begin = time.monotonic()
    sliced = is_sliced(group, device)
    by_device = is_read and group.size() > 1 and tells_when_done(group, device)
    trace = _traces.get(group, {}).get(device.type) if by_device else None
    before = torch.accelerator.current_stream(device).record_event() if by_device else None
    is_absent = (lambda rank: True) if by_device else None  # no collective fails there when a process ends

    def look(has_failed: bool = False) -> None:
        for each in traces:
            each.look()
        ours, ranks = liveness.board(), dist.get_process_group_ranks(group)
        try:
            waited = time.monotonic() - begin
            found = ours and (ours.diagnose(ranks) if has_failed else ours.find_dead(ranks, waited, is_absent))
        except StoreGoneError as error:
            found = str(error) if has_failed else None
        if found:
            raise OrderError(found + AND_SO)

    try:
        if error is not None:
            raise error
        if isinstance(work, _C.Gather):
            while not work.wait():
                look()
            return
        if is_reduce_scatter and sliced and device.type == "cpu":
            wait_in_thread(work, look)
        elif by_device:
            wait_for_device(work, look)
            if trace is not None:
                trace.raise_if_closed()  # it has been aborted: there are no values
        else:
            wait_in_slices(work, sliced, look)
    except OrderError:
        if by_device:
            if trace is not None:
                trace.core.broken = _C.TRACE_BROKEN if before is not None and before.query() else _C.TRACE_LOST
                trace.note_told()
            group._get_backend(device).abort()
        raise
    except RuntimeError as error:
        if TRANSPORT.search(str(error)):
            look(has_failed=True)
        raise


def settle(parts: Iterable[Shared]) -> None:
    """Wait until devices have done all that they were given, for values that are read or saved without a collective.

    Raises: OrderError, if one has waited for a collective of ``parts`` that was aborted: there are no values.
    """
    found = {trace: device for trace, device in _traces_of(parts).items() if trace.is_by_device}
    for device in set(found.values()):
        _C.wait_device(str(device))
    for trace in found:
        trace.raise_if_lost()


def gather_objects(what: SetupCollective, mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """``mine`` of every rank of ``group``. A collective call, which waits as ``exchange`` does.

    Raises: ValueError on all ranks for what one of them cannot pickle.
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
    padded = torch.tensor(list(data.ljust(max(sizes), b"\0")), dtype=torch.uint8, device=device)
    pairs = zip(sizes, gather(padded), strict=True)
    found = [pickle.loads(bytes(other[:size].tolist())) for size, other in pairs]
    for rank, (problem, _) in zip(dist.get_process_group_ranks(group), found, strict=True):
        if problem is not None:
            raise ValueError(f"rank {rank} has what cannot be told to others: {problem}")
    return [other for _, other in found]
