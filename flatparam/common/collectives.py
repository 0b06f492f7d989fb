"""Collectives of torch by the names that this torch has, waits that Ctrl-C can end, and facts about backends.

Functions are looked up at each call, because users count calls and replace functions. torch waits in C++ until a
collective has ended, so waits here are cut into slices in which Python handles signals. The drop-in, LayerZero and
``fsdp/desync`` use this. No rank is compared here: see ``fsdp/desync/checked_collectives.py``.
"""

import datetime
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from .torch_private import FakeProcessGroup, _disable_current_modes

PATIENCE = datetime.timedelta(seconds=0.3)

_backends: "weakref.WeakKeyDictionary[Any, dict[str, str]]" = weakref.WeakKeyDictionary()


def unwrapped(backend: Any) -> Any:
    """Return the backend inside the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL; ``backend`` itself without wrapper."""
    return getattr(backend, "wrapped_pg", backend)


def name_of(backend: Any) -> str:
    """Return the backend's own name, such as "gloo"; empty: it has none."""
    return str(backend.name()) if hasattr(backend, "name") else ""


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of ``group``, each once: it has one for each device type, or one for several."""
    return list(dict.fromkeys(unwrapped(group._get_backend(device)) for device in group._device_types))


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of ``group``; None: of the world.

    Raises: ValueError if this rank is not in the group; StateError if the group was destroyed.
    """
    if isinstance(group, int):  # torch's NON_GROUP_MEMBER
        raise ValueError("this rank is not in the group")
    if group is not None and group not in dist.distributed_c10d._world.pg_group_ranks:
        raise _C.StateError(
            "the process group was destroyed (torch.distributed.destroy_process_group()), and this needs it: do it "
            "before that; or after init_process_group() build, wrap and load the model anew"
        )
    return dist.get_process_group_ranks(group)


def name_in_cpp(group: dist.ProcessGroup) -> str | None:
    """Return the name under which C++ finds ``group``; None: it does not."""
    name = group.group_name
    try:
        known = dist.distributed_c10d._resolve_process_group(name) is not None
    except (RuntimeError, KeyError, ValueError):
        known = False
    return name if known else None


def can_be_cut(backend: Any) -> bool:
    """Whether a wait for a collective may time out and be repeated. In gloo it may; other backends abort then."""
    return name_of(unwrapped(backend)) == "gloo"


def is_sliced(group: Any, device: torch.device) -> bool:
    """``can_be_cut`` for the backend that ``group`` has for ``device``."""
    return _backend_of(group, device) == "gloo"


def tells_when_done(group: Any, device: torch.device) -> bool:
    """Whether ``work.is_completed()`` tells that the device has finished. For NCCL: its ``wait()`` blocks no host."""
    return _backend_of(group, device) == "nccl"


def _backend_of(group: Any, device: torch.device) -> str:
    """Return the name of the backend of ``group`` for ``device``; empty: it has none of torch's kind."""
    of_group = _backends.setdefault(group, {})
    if device.type not in of_group:
        try:
            of_group[device.type] = name_of(unwrapped(group._get_backend(device)))
        except (AttributeError, RuntimeError):
            of_group[device.type] = ""
    return of_group[device.type]


def gloo_beside(
    group: dist.ProcessGroup, store: dist.Store, name: Any, timeout: datetime.timedelta, connecting: datetime.timedelta
) -> dist.ProcessGroup:
    """Make a gloo group with the ranks of ``group``. A collective call for these ranks only.

    torch's ``new_group()`` needs all ranks of the world, or the same number of groups on each rank.
    Args: ``name``: no group had it in ``store``; C++ finds the group by it as long as the group lives; ``timeout``: of
    its collectives; ``connecting``: the time-out of this call.
    Raises: RuntimeError if a rank cannot connect to the others.
    """
    kind = dist.ProcessGroup.BackendType.GLOO
    store = dist.PrefixStore(f"{name}/", store)
    backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), connecting)
    backend._set_default_timeout(timeout)
    made = dist.ProcessGroup(store, group.rank(), group.size())
    made._register_backend(torch.device("cpu"), kind, backend)
    made._set_default_backend(kind)
    made._set_group_name(name)
    dist.distributed_c10d._register_process_group(name, made)
    return made


def check_gloo() -> None:
    """Raises: RuntimeError if gloo finds no network interface on this host."""
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    for name in names.split(",") if names else ():
        dist.ProcessGroupGloo.create_device(interface=name)
    if not names:
        dist.ProcessGroupGloo.create_default_device()


def wait_in_slices(work: Any, sliced: bool = True, look: Callable[[], object] = lambda: None) -> None:
    """Wait for ``work`` in slices of ``PATIENCE``, and call ``look`` between them.

    An exception of ``look``, or Ctrl-C, ends the wait and leaves the collective running. ``sliced=False``: the backend
    allows one wait only; ``look`` is not called.
    """
    while sliced:
        try:
            work.wait(PATIENCE)
            return
        except RuntimeError:
            if work.is_completed():
                break
        look()
    work.wait()


def wait_for_device(work: Any, look: Callable[[], object]) -> None:
    """Let the host wait until the device has finished ``work`` of NCCL; call ``look`` every ``PATIENCE``."""
    begin = looked = time.monotonic()
    while not work.is_completed():
        now = time.monotonic()
        if now - looked > PATIENCE.total_seconds():
            looked = now
            look()
        time.sleep(min(0.01, 0.0001 + (now - begin) / 10))
    work.wait()


def wait_in_thread(work: Any, look: Callable[[], object] = lambda: None) -> None:
    """``wait_in_slices`` for a reduce-scatter of gloo, whose ``wait()`` takes no time-out: a thread waits instead.

    The thread waits on if an exception ends this call; a second call for the same ``work`` uses the same thread.
    """
    waiting = _waiting.get(work)
    if waiting is None:
        waiting = _waiting[work] = Future()
        threading.Thread(target=_wait_in, args=(work, waiting), name="flatparam waits", daemon=True).start()
    while not wait_for_futures([waiting], PATIENCE.total_seconds()).done:
        look()
    waiting.result()


def _wait_in(work: Any, waiting: "Future[None]") -> None:
    try:
        work.wait()
    except Exception as error:
        waiting.set_exception(error)
    else:
        waiting.set_result(None)


_waiting: "weakref.WeakKeyDictionary[Any, Future[None]]" = weakref.WeakKeyDictionary()


# The names of each collective in the versions of torch, the newest first
NAMES = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_reduce": ("all_reduce",),
    "exchange": ("all_to_all_single",),
}


def torchs(name: str) -> Any:
    """Return the function ``name`` of ``torch.distributed``; None: there is none, or a user has replaced it already."""
    function = getattr(dist, name, None)
    code = getattr(function, "__code__", None)
    return function if code is not None and code.co_filename.startswith(os.path.dirname(dist.__file__)) else None


_TORCHS = [torchs(name) for name in ("all_gather", *NAMES["all_gather"], *NAMES["all_reduce"])]


def is_replaced(function: Any) -> bool:
    """Whether ``function`` is a user's replacement, not the function of torch at import."""
    return function not in _TORCHS


def gathering() -> Callable[..., Any]:
    """Return the all-gather into one tensor, by the newest name that this torch has."""
    newest, older = NAMES["all_gather"]
    function: Callable[..., Any] = getattr(dist, newest, None) or getattr(dist, older)
    return function


def native_gather(group: dist.ProcessGroup, device: torch.device) -> _C.Gather | None:
    """Return an object that all-gathers over ``group`` in C++; None where the gather must go through Python.

    It must with TORCH_DISTRIBUTED_DEBUG=DETAIL, where torch compares ranks, and for a group that C++ cannot find.
    """
    name = name_in_cpp(group)
    if name is None or dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return None
    return _C.Gather(group, name, is_sliced(group, device))


def all_gather_single(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``shard`` ``[n]`` of every rank into ``output`` ``[world size * n]``, in rank order."""
    _complete(gathering(), shard, group, output, shard, group)


def all_gather_chunks(chunks: list[Tensor], shard: Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``shard`` ``[n]`` of rank ``i`` into ``chunks[i]`` ``[n]``, by ``all_gather``, which every backend has."""
    _complete(dist.all_gather, shard, group, chunks, shard, group=group)


def all_gather_beside(shard: Tensor, group: Any, look: Callable[[], object] = lambda: None) -> list[list[Any]] | None:
    """Return the values of ``shard`` on every rank, in rank order. A collective call; ``look``: as in the waits.

    It bypasses ``torch.distributed`` and dispatch modes, so users who count collectives do not see it.
    None, without a collective: ``group`` has no other processes.
    """
    kind = _backend_of(group, shard.device)
    if kind == "fake" or not isinstance(group, dist.ProcessGroup) or group.size() == 1:
        return None
    with _disable_current_modes():
        everyone = [torch.empty_like(shard) for _ in range(group.size())]
        work = group.allgather([everyone], [shard])
        if kind == "nccl":
            wait_for_device(work, look)
        else:
            wait_in_slices(work, kind == "gloo", look)
        return [other.tolist() for other in everyone]


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``tensor`` over ranks, in place."""
    _complete(dist.all_reduce, tensor, group, tensor, group=group)


def _complete(
    collective: Callable[..., Any], sent: Tensor, group: dist.ProcessGroup, /, *args: Any, **kwargs: Any
) -> None:
    """Issue a collective and wait for it in slices, so that Ctrl-C ends the wait.

    torch waits itself for a user's replacement, which may not take ``async_op``, and where a wait cannot be sliced.
    """
    if is_sliced(group, sent.device) and not is_replaced(collective):
        wait_in_slices(collective(*args, **kwargs, async_op=True))
    else:
        collective(*args, **kwargs)


class FakeGroup:
    """torch's FakeProcessGroup, which communicates nothing, plus the collectives that it lacks in torch 2.13.

    Without them ``dist.reduce_scatter_single`` fails; torch's own runtime fails so with FSDP_USE_FAKE_REDUCE.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._group: Any = FakeProcessGroup._create_internal(rank=rank, world_size=world_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return FakeGroup, (self._group.rank(), self._group.size())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, _OLD_NAMES.get(name, name))


_OLD_NAMES = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}


def fake_group(rank: int, world_size: int) -> Any:
    """Return a group of ``world_size`` that has no other processes: its collectives return at once, without data."""
    if all(hasattr(FakeProcessGroup, name) for name in _OLD_NAMES):
        return FakeProcessGroup._create_internal(rank=rank, world_size=world_size)
    return FakeGroup(rank, world_size)
