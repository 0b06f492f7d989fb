"""Worlds of ranks: processes on gloo, and ranks that do not exist, whose collectives return at once."""

import ctypes
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """Make this process ``rank`` of a fake world of ``size``; nothing is communicated."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


PR_SET_PDEATHSIG = 1
PATIENCE = 600  # seconds


class Ranks:
    """``size`` processes of a gloo world, each of one thread, which run ``serve(connection, folder, *arguments)``.

    ``folder`` is one of theirs alone, while the context lasts. At its end they are killed.
    """

    def __init__(self, size: int, serve: Callable[..., None], *arguments: Any) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([serve.__module__])
        self._folder = tempfile.TemporaryDirectory(prefix="flatparam-bench-")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            given = (theirs, rank, size, Path(self._folder.name), serve, arguments)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def ask(self, *command: Any) -> list[Any]:
        """Send ``command`` to each rank. Returns: their answers."""
        for connection in self._connections:
            connection.send(command)
        return self.answers()

    def answers(self) -> list[Any]:
        """Return what each rank sends next.

        Raises: RuntimeError: a rank has failed, or sends nothing for ``PATIENCE``.
        """
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(PATIENCE):
                raise RuntimeError(f"rank {rank} has not answered for {PATIENCE} seconds")
            try:
                answer = connection.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} has ended") from None
            if isinstance(answer, Failure):
                raise RuntimeError(f"rank {rank}: {answer}")
            answers.append(answer)
        return answers


class Failure(str):
    """The traceback of a rank's exception."""


def _serve(
    connection: Connection, rank: int, size: int, folder: Path, serve: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE))
        serve(connection, folder, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        connection.send(Failure(traceback.format_exc()))
