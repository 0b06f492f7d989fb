"""Warm worlds of gloo processes: each starts once and runs one program after another, until a rank dies or hangs.

A world's store is a TCPStore in the process of rank 0, as under torchrun. The system picks its port.
"""

import contextlib
import datetime
import os
import pathlib
import queue
import tempfile
import time
import traceback
from multiprocessing import connection

import gloo
import torch
import torch.distributed as dist

from tests.simulation.conformance import DIED, STOPPED

START = 60.0  # seconds in which a world starts on a busy machine
PATIENCE = 15.0  # seconds that a program may take
HANGS = "hangs"


class Pools:
    """Worlds of several sizes, each used by one caller at a time. ``run`` may be called from several threads."""

    def __init__(self, counts):
        """``counts``: number of worlds by world size."""
        self._free = {size: queue.SimpleQueue() for size in counts}
        for size, count in counts.items():
            for _ in range(count):
                self._free[size].put(None)

    def run(self, world_size, program):
        """Call ``program()`` on each rank. Return the list of their results.

        The result of a rank that has died is ``(DIED,)``; that of others that do not end ``(STOPPED,)``, ``(HANGS,)``;
        that of a rank that has raised: the traceback. A world with such a rank is replaced.
        """
        world = self._free[world_size].get()
        try:
            world = world or _World(world_size)
            results, is_whole = world.run(program)
            if not is_whole:
                world.end()
                world = None
            return results
        finally:
            self._free[world_size].put(world)

    def end(self):
        for free in self._free.values():
            while not free.empty():
                world = free.get()
                if world is not None:
                    world.end()


class _World:
    def __init__(self, size):
        self._folder = tempfile.TemporaryDirectory(prefix="flatparam-world-")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = gloo._context.Pipe()
            arguments = (theirs, rank, size, self._folder.name)
            process = gloo._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, program):
        for pipe in self._pipes:
            pipe.send(program)
        size = len(self._pipes)
        found, waiting = {}, set(range(size))
        deadline = time.monotonic() + START + PATIENCE
        while waiting and time.monotonic() < deadline:
            ready = connection.wait([self._pipes[rank] for rank in waiting], timeout=0.2)
            for rank in sorted(waiting):
                if self._pipes[rank] in ready:
                    try:
                        message = self._pipes[rank].recv()
                    except (EOFError, ConnectionResetError):
                        found[rank] = (DIED,)
                    else:
                        if message == "starts":  # the program's time begins when the world is there
                            deadline = time.monotonic() + PATIENCE
                            continue
                        found[rank] = message
                    waiting.discard(rank)
            if found and all(_is_stopped(self._processes[rank].pid) for rank in waiting):
                break
        for rank in waiting:
            found[rank] = (STOPPED if _is_stopped(self._processes[rank].pid) else HANGS,)
        results = [found[rank] for rank in range(size)]
        return results, all(isinstance(result, dict) for result in results)

    def end(self):
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _is_stopped(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _serve(pipe, rank, size, folder):
    """One rank: run the programs that come through ``pipe``, until it is closed."""
    gloo._die_with_the_parent()
    output = os.open(os.path.join(folder, f"rank{rank}.out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    meeting = dist.FileStore(os.path.join(folder, "store"), size)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False)
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    while True:
        try:
            program = pipe.recv()
        except EOFError:
            return
        for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
            dist.destroy_process_group(group)
        dist.barrier()
        pipe.send("starts")
        try:
            found = program()
        except Exception:
            found = traceback.format_exc()
        pipe.send(found)
