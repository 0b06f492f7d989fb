"""Run a program on ranks that are threads of this process, in virtual time, from a seed.

``process.py`` starts the process, with the library of ``seams.c`` preloaded. Each rank has a torch world, a store and
a backend (``world.cpp``), and a process number.
"""

import _thread
import contextlib
import ctypes
import datetime
import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _simulated_world as world  # process.py builds it
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

ENDED, STUCK, LATE, TOO_LONG = range(4)  # of fp_sim_run()
NAMES = "\x01{}\x01"  # torch registers names of groups for a process: each rank's get this, and the store leaves it out
SECOND = 1_000_000_000

seams = ctypes.CDLL(None)
for _name, _type in (
    ("now", ctypes.c_int64),
    ("digest", ctypes.c_uint64),
    ("steps", ctypes.c_int64),
    ("random", ctypes.c_uint64),
    ("state", ctypes.c_char_p),
):
    getattr(seams, f"fp_sim_{_name}").restype = _type


class _World:
    """What torch keeps of one rank's world."""

    def __init__(self) -> None:
        self.default_pg = None
        self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config = {}, {}, {}, {}
        self.group_count = 0
        self.tags_to_pg, self.pg_to_tag, self.pg_coalesce_state, self.comms = {}, {}, {}, []


class _Worlds:
    """In place of torch's world: the world of the rank to which this thread belongs."""

    def __init__(self, size: int, outside: Any):
        object.__setattr__(self, "_all", [_World() for _ in range(size)])
        object.__setattr__(self, "_outside", outside)

    def _here(self) -> Any:
        rank = seams.fp_sim_rank()
        return self._outside if rank < 0 else self._all[rank]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._here(), name, value)


class _GlooType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, world.Backend)


class _Gloo(metaclass=_GlooType):
    """In place of ``ProcessGroupGloo``: makes a simulated backend."""

    def __new__(cls, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        return world.Backend(store, rank, size, timeout)


@contextlib.contextmanager
def _torch_of_ranks(size: int):
    name = c10d._process_group_name

    def unique(ranks: Any, use_hashed_name: bool) -> str:
        return NAMES.format(seams.fp_sim_rank()) + name(ranks, use_hashed_name)

    hook = sys.excepthook  # init_process_group() puts another around it
    before = {each: getattr(c10d, each) for each in ("_world", "_process_group_name", "ProcessGroupGloo")}
    c10d._world, c10d._process_group_name, c10d.ProcessGroupGloo = _Worlds(size, c10d._world), unique, _Gloo
    try:
        yield
    finally:
        for each in c10d._world._all:
            for group in each.pg_names.values():
                c10d._unregister_process_group(group)
        sys.excepthook = hook
        for each, value in before.items():
            setattr(c10d, each, value)


@dataclass
class Run:
    """What has become of a run."""

    reason: int
    seconds: float  # of virtual time
    steps: int
    digest: int
    results: dict[int, Any] = field(default_factory=dict)  # what the program returned, by rank
    errors: dict[int, BaseException] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)  # the virtual second at which each rank ended
    stacks: str = ""  # of all ranks, if the run did not end
    calls: tuple[int, int] = (0, 0)  # to the store, and their bytes

    def must_end(self) -> "Run":
        """Return this run. Raises: AssertionError if a rank waits for ever; the first error of a rank."""
        assert self.reason == ENDED, f"the run is {('', 'stuck', 'late', 'too long')[self.reason]}:\n{self.stacks}"
        for rank, error in sorted(self.errors.items()):
            error.add_note(f"in simulated rank {rank}")
            raise error
        return self


def simulate(
    program: Callable[[int], Any],
    size: int,
    seed: int = 0,
    *,
    limit: float = 600.0,
    switches: int = 64,
    latency: float = 0.001,
    timeout: float = 60.0,
) -> Run:
    """Run ``program(rank)`` on ``size`` ranks until all have ended.

    Args: ``limit``: virtual seconds that the run may take; ``switches``: the chance, of 256, that a rank hands over
    where it need not; ``latency``: virtual seconds until a rank sees that a collective has ended, at most;
    ``timeout``: of collectives and of the store.
    """
    run = Run(0, 0.0, 0, 0)
    for rank in range(size):
        process = seams.fp_sim_process(rank)
        stat = f"{process} (rank) S 1 " + "0 " * 17 + f"{100 + rank} 0"  # the 22nd field: the start of the process
        Path(os.environ["FLATPARAM_SIMULATED_PROC"], str(process)).write_text(stat)
    world.reset(int(latency * SECOND))
    seams.fp_sim_reset(ctypes.c_uint64(seed), ctypes.c_int64(int(limit * SECOND)), switches)
    threads: dict[int, int] = {}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # it would destroy one rank's objects in another's thread
    with _torch_of_ranks(size):
        for rank in range(size):
            seams.fp_sim_spawn(rank)
            _thread.start_new_thread(_live, (program, rank, size, timeout, run, threads))
        run.reason = seams.fp_sim_run()
        if run.reason != ENDED:
            run.stacks = _stacks(threads)
        if was_enabled:
            gc.enable()
        gc.collect()
    run.seconds, run.steps = seams.fp_sim_now() / SECOND, seams.fp_sim_steps()
    run.digest, run.calls = seams.fp_sim_digest(), world.calls()
    return run


def kill(rank: int) -> None:
    """End a rank as ``kill -9`` does; it does not return if it is the caller's."""
    world.end_process(rank, False)
    seams.fp_sim_end(rank)


def now() -> float:
    """Return the virtual seconds since the run began."""
    return seams.fp_sim_now() / SECOND


def _live(program: Any, rank: int, size: int, timeout: float, run: Run, threads: dict[int, int]) -> None:
    threads[rank] = threading.get_ident()
    patience = datetime.timedelta(seconds=timeout)
    error = None
    try:
        dist.init_process_group("gloo", store=world.Store(patience), rank=rank, world_size=size, timeout=patience)
        run.results[rank] = program(rank)
    except BaseException as raised:
        run.errors[rank] = error = raised
    _end(error)
    run.ended[rank] = now()
    world.end_process(rank, False)


def _end(error: BaseException | None) -> None:
    """Do what the hooks of flatparam do at the end of a process."""
    liveness = sys.modules.get("flatparam.fsdp.desync.liveness")
    ours = liveness and liveness._boards.get(dist.group.WORLD)
    if ours is None:
        return
    if error is not None and not getattr(error, "_flatparam_posted", False):
        error._flatparam_posted = True
        ours.join()
        ours.report(liveness.describe(error, ours.rank, "has ended"))
    elif error is None:
        ours.native.finish()
    ours.native.stop()


def _stacks(threads: dict[int, int]) -> str:
    frames = sys._current_frames()
    found = []
    for rank, ident in threads.items():
        if ident in frames:
            found.append(f"rank {rank}:\n" + "".join(traceback.format_stack(frames[ident])[-12:]))
    i = 0
    while (state := seams.fp_sim_state(i)) is not None:
        found.append(state.decode() + "\n")
        i += 1
    return "".join(found)
