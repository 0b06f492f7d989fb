"""Collectives by the names that the installed torch has, looked up at each call: users count and replace them.

They are waited for in slices, so that Ctrl-C is noticed meanwhile: torch waits in C++ until they have ended.
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
    """Without what TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it."""
    return getattr(backend, "wrapped_pg", backend)


def name_of(backend: Any) -> str:
    """What it calls itself; empty: it does not."""
    return str(backend.name()) if hasattr(backend, "name") else ""


def name_in_cpp(group: dist.ProcessGroup) -> str | None:
    """The name under which C++ finds ``group``, if it does."""
    name = group.group_name
    try:
        known = dist.distributed_c10d._resolve_process_group(name) is not None
    except (RuntimeError, KeyError, ValueError):
        known = False
    return name if known else None


def can_be_cut(backend: Any) -> bool:
    """Whether waits for its collectives may be given up and begun again: gloo's may, those of others abort."""
    return name_of(unwrapped(backend)) == "gloo"


def is_sliced(group: Any, device: torch.device) -> bool:
    """The same of the backend that ``group`` has for ``device``."""
    return _backend_of(group, device) == "gloo"


def tells_when_done(group: Any, device: torch.device) -> bool:
    """Whether the works of ``group`` do, whose own waits leave the host out: NCCL's, by events of the device."""
    return _backend_of(group, device) == "nccl"


def _backend_of(group: Any, device: torch.device) -> str:
    """The name of it; empty: ``group`` has none of torch's kind."""
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
    """A group of gloo with the ranks of ``group``. A collective call.

    ``name``: that no group had in ``store``; C++ finds it by that for as long as it is referred to. torch's
    ``new_group()`` asks all ranks of the world, or names a group after how many groups a rank has. ``timeout``: of its
    collectives; ``connecting``: of this call. Raises: RuntimeError, where a rank finds no network to the others.
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
    """Raises: RuntimeError, where gloo finds no interface of this host."""
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    for name in names.split(",") if names else ():
        dist.ProcessGroupGloo.create_device(interface=name)
    if not names:
        dist.ProcessGroupGloo.create_default_device()


def wait_in_slices(work: Any, sliced: bool = True, look: Callable[[], object] = lambda: None) -> None:
    """Wait for ``work``, and ``look`` between two slices. What raises meanwhile leaves the collective under way."""
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
    """Until a device has done ``work``, whose own wait the host does not take part in; and ``look`` now and then."""
    begin = looked = time.monotonic()
    while not work.is_completed():
        now = time.monotonic()
        if now - looked > PATIENCE.total_seconds():
            looked = now
            look()
        time.sleep(min(0.01, 0.0001 + (now - begin) / 10))
    work.wait()


def wait_in_thread(work: Any, look: Callable[[], object] = lambda: None) -> None:
    """The same for a reduce-scatter of gloo, whose wait takes no time-out: a thread goes on to wait if this is left."""
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


# The names that torch has had for each, the newest first
NAMES = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_reduce": ("all_reduce",),
}


def torchs(name: str) -> Any:
    """``torch.distributed``'s function of this name; None: it has none, or a user's stands there already."""
    function = getattr(dist, name, None)
    code = getattr(function, "__code__", None)
    return function if code is not None and code.co_filename.startswith(os.path.dirname(dist.__file__)) else None


_TORCHS = [torchs(name) for name in ("all_gather", *NAMES["all_gather"], *NAMES["all_reduce"])]


def is_replaced(function: Any) -> bool:
    """Whether a user has put it in the place of the ``torch.distributed`` function of its name."""
    return function not in _TORCHS


def gathering() -> Callable[..., Any]:
    """The all-gather into one tensor, by the newest name that this torch has."""
    newest, older = NAMES["all_gather"]
    function: Callable[..., Any] = getattr(dist, newest, None) or getattr(dist, older)
    return function


def native_gather(group: dist.ProcessGroup, device: torch.device) -> _C.Gather | None:
    """All-gathers over ``group`` without torch's Python; None where they need it.

    They do under TORCH_DISTRIBUTED_DEBUG=DETAIL, where ranks are compared, and where C++ does not know the group.
    """
    name = name_in_cpp(group)
    if name is None or dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return None
    return _C.Gather(group, name, is_sliced(group, device))


def all_gather_single(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``shard`` ``[n]`` of every rank into ``output`` ``[world size * n]``, in rank order."""
    _complete(gathering(), shard, group, output, shard, group)


def all_gather_chunks(chunks: list[Tensor], shard: Tensor, group: dist.ProcessGroup) -> None:
    """The same into one tensor a rank, through ``torch.distributed.all_gather``, which every backend has."""
    _complete(dist.all_gather, shard, group, chunks, shard, group=group)


def all_gather_beside(shard: Tensor, group: Any) -> list[list[Any]] | None:
    """The values of ``shard`` on every rank, in rank order, past the functions and modes with which users count.

    None, and nothing is done, where ``group`` has neither gloo nor NCCL for its device.
    """
    kind = _backend_of(group, shard.device)
    if kind not in ("gloo", "nccl"):
        return None
    with _disable_current_modes():
        everyone = [torch.empty_like(shard) for _ in range(group.size())]
        wait_in_slices(group.allgather([everyone], [shard]), kind == "gloo")
        return [other.tolist() for other in everyone]


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The sum over ranks, in place."""
    _complete(dist.all_reduce, tensor, group, tensor, group=group)


def _complete(
    collective: Callable[..., Any], sent: Tensor, group: dist.ProcessGroup, /, *args: Any, **kwargs: Any
) -> None:
    """Wait for it here, so that Ctrl-C ends that; torch does for what a user has put in its place, and where waits
    cannot be cut.
    """
    if is_sliced(group, sent.device) and not is_replaced(collective):
        wait_in_slices(collective(*args, **kwargs, async_op=True))
    else:
        collective(*args, **kwargs)


class FakeGroup:
    """torch's FakeProcessGroup, which communicates nothing, with the collectives that it lacks in torch 2.13.

    torch's own runtime fails there with FSDP_USE_FAKE_REDUCE: ``dist.reduce_scatter_single`` asks the group for it.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._group: Any = FakeProcessGroup._create_internal(rank=rank, world_size=world_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return FakeGroup, (self._group.rank(), self._group.size())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, _OLD_NAMES.get(name, name))


_OLD_NAMES = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}


def fake_group(rank: int, world_size: int) -> Any:
    """A group in which ``rank`` is alone: its collectives return at once."""
    if all(hasattr(FakeProcessGroup, name) for name in _OLD_NAMES):
        return FakeProcessGroup._create_internal(rank=rank, world_size=world_size)
    return FakeGroup(rank, world_size)
