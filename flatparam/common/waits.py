"""Waiting for collectives in slices, so that Ctrl-C is noticed meanwhile: torch waits in C++ until they have ended."""

import datetime
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

PATIENCE = datetime.timedelta(seconds=0.3)

_sliced: "weakref.WeakKeyDictionary[Any, dict[str, bool]]" = weakref.WeakKeyDictionary()


def unwrapped(backend: Any) -> Any:
    """Without what TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it."""
    return getattr(backend, "wrapped_pg", backend)


def name_of(backend: Any) -> str:
    """What it calls itself; empty: it does not."""
    return str(backend.name()) if hasattr(backend, "name") else ""


def can_be_cut(backend: Any) -> bool:
    """Whether waits for its collectives may be given up and begun again: gloo's may, those of others abort."""
    return name_of(unwrapped(backend)) == "gloo"


def is_sliced(group: Any, device: torch.device) -> bool:
    """The same of the backend that ``group`` has for ``device``."""
    of_group = _sliced.setdefault(group, {})
    if device.type not in of_group:
        try:
            backend = group._get_backend(device)
        except (AttributeError, RuntimeError):  # it has none of torch's kind
            backend = None
        of_group[device.type] = can_be_cut(backend)
    return of_group[device.type]


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


def wait_in_thread(work: Any, look: Callable[[], object] = lambda: None) -> None:
    """The same for a reduce-scatter of gloo, whose wait takes no time-out: a thread goes on to wait if this is left."""
    thread = _threads.setdefault(work, _Waiting(work))
    if thread.ident is None:
        thread.start()
    while not thread.has_ended.wait(PATIENCE.total_seconds()):  # join() takes a thread for ended when it is interrupted
        look()
    if thread.error is not None:
        raise thread.error


class _Waiting(threading.Thread):
    def __init__(self, work: Any):
        super().__init__(name="flatparam waits", daemon=True)
        self._work, self.has_ended = work, threading.Event()
        self.error: RuntimeError | None = None

    def run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self.error = error
        finally:
            self._work = None  # what refers to this as long as it exists
            self.has_ended.set()


_threads: "weakref.WeakKeyDictionary[Any, _Waiting]" = weakref.WeakKeyDictionary()
