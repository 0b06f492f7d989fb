"""Ranks as threads of one process: each has its own world of gloo, with a name unique to the rank.

torch's world belongs to a thread meanwhile, as in torch's tests with the "threaded" backend. That backend has no store
in C++; gloo's has one, so health boards and collective traces work as between processes. Call it in a process of
``run_ranks``: names of process groups and torch's world belong to the process.
"""

import datetime
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import multi_threaded_pg

GLOO = dist.ProcessGroup.BackendType.GLOO


def make_world(rank, size, store, connects=True):
    """Make the world of this thread: rank ``rank`` of ``size``, with gloo on the CPU.

    ``connects``: wait for the other ranks. Without it the first collective connects, and there must be none.
    """
    name = f"world of rank {rank}"
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(GLOO)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=not connects)]
    options._timeout = datetime.timedelta(seconds=30)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
    group._register_backend(torch.device("cpu"), GLOO, backend)
    group._set_group_name(name)
    world = distributed_c10d._world
    world.pg_map[group], world.pg_names[group] = ("gloo", store), name
    world.pg_group_ranks[group] = {i: i for i in range(size)}
    world.pg_backend_config[group], world.pg_to_tag[group] = "cpu:gloo", ""
    world.tags_to_pg.setdefault("", []).append(group)
    distributed_c10d._register_process_group(name, group)
    distributed_c10d._update_default_pg(group)
    return group


def forget_world():
    """Destroy the world of this thread, and leave those of other threads: torch's function forgets all names."""
    group, world = dist.group.WORLD, distributed_c10d._world
    distributed_c10d._unregister_process_group(world.pg_names[group])
    distributed_c10d._update_default_pg(None)
    for each in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        each.clear()
    world.tags_to_pg.clear()


class Ranks:
    """What the ranks share: a store, and a barrier that is no collective."""

    def __init__(self, size):
        self.size, self.store, self._barrier = size, dist.HashStore(), threading.Barrier(size, timeout=30)

    def meet(self):
        self._barrier.wait()


def in_threads(function, size, *arguments, has_world=True):
    """Call ``function(rank, ranks, *arguments)`` in a thread for each rank; return the results in rank order.

    ``has_world``: make the world of each rank before.
    """
    dist.destroy_process_group()
    multi_threaded_pg._install_threaded_pg()
    ranks = Ranks(size)

    def run(rank):
        if has_world:
            make_world(rank, size, ranks.store)
        try:
            return function(rank, ranks, *arguments)
        finally:
            if dist.is_initialized():
                forget_world()

    try:
        with ThreadPoolExecutor(size) as threads:
            found = list(threads.map(run, range(size), timeout=60))
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # run_ranks() ends it
    return found
