"""Run a program on ranks that are threads of this process, in virtual time, from a seed.

``process.py`` starts the process, with the library of ``seams.c`` preloaded. Each rank has a torch world, a store and
a backend (``store.hpp``, ``backend.hpp``), and a process number.
"""

import _thread
import contextlib
import ctypes
import datetime
import gc
import importlib
import os
import sys
import threading
import time
import traceback
from collections import UserList
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _simulated_world as world  # process.py builds it
import simulated
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from flatparam.common.collectives import gloo_beside
from flatparam.fsdp.desync import same_unit

from .faults import Fault, Finished, UserError, coming

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
    ("points", ctypes.c_int64),
):
    getattr(seams, f"fp_sim_{_name}").restype = _type


class _World:
    """What torch keeps of one rank's world."""

    def __init__(self) -> None:
        self.default_pg = None
        self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config = {}, {}, {}, {}
        self.group_count = 0
        self.tags_to_pg, self.pg_to_tag, self.pg_coalesce_state, self.comms = {}, {}, {}, []
        self.pg_flight_recorder_hooks = {}  # new in torch 2.15
        self.registered = []  # names of groups


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

    def __new__(cls, store: Any, rank: int, size: int, timeout: datetime.timedelta, **options: Any) -> Any:
        """``options``: of newer torch versions."""
        return world.Backend(store, rank, size, timeout, True)

    @staticmethod
    def create_default_device() -> None:
        """There is a network."""


def _connecting_late(*args: Any) -> Any:
    """Make the host's part of a backend of the device. NCCL does not connect ranks as a group is made."""
    return world.Backend(*args, False)


class _EachRank(UserList):
    """In place of a list that a process has: the list of the rank to which this thread belongs."""

    def __init__(self) -> None:
        self._lists: dict[int, list[Any]] = {}

    @property
    def data(self) -> list[Any]:
        return self._lists.setdefault(seams.fp_sim_rank(), [])


# Lists of flatparam that a process has once
OF_PROCESS = {
    "troubled": ("fsdp.desync.checked_collectives", "fsdp.interop.backward_inputs", "fsdp.wrapper.forward"),
    "_active": ("fsdp.unit.summon",),
}


@contextlib.contextmanager
def _lists_of_ranks():
    before = []
    for name, modules in OF_PROCESS.items():
        of_ranks = _EachRank()
        for module in map(importlib.import_module, (f"flatparam.{each}" for each in modules)):
            before.append((module, name, getattr(module, name)))
            setattr(module, name, of_ranks)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@contextlib.contextmanager
def _torch_of_ranks(size: int):
    name = c10d._process_group_name

    def unique(ranks: Any, use_hashed_name: bool) -> str:
        c10d._world.registered.append(NAMES.format(seams.fp_sim_rank()) + name(ranks, use_hashed_name))
        return c10d._world.registered[-1]

    def unregister_all() -> None:  # when a rank destroys its world; torch's forgets the groups of all ranks
        for each in c10d._world.registered:
            with contextlib.suppress(RuntimeError):
                c10d._unregister_process_group(each)
        c10d._world.registered.clear()

    def beside(group: Any, store: Any, name: str, *time_outs: Any, **more: Any) -> Any:
        return gloo_beside(group, store, NAMES.format(seams.fp_sim_rank()) + name, *time_outs, **more)

    hook = sys.excepthook  # init_process_group() puts another around it
    replaced = [
        (c10d, "_world", _Worlds(size, c10d._world)),
        (c10d, "_process_group_name", unique),
        (c10d, "_unregister_all_process_groups", unregister_all),
        (c10d, "ProcessGroupGloo", _Gloo),
        (dist, "ProcessGroupGloo", _Gloo),
        (same_unit, "gloo_beside", beside),
    ]
    before = [(place, each, getattr(place, each)) for place, each, _ in replaced]
    for place, each, value in replaced:
        setattr(place, each, value)
    try:
        yield
    finally:
        for each in c10d._world._all:
            for group in each.pg_names.values():
                c10d._unregister_process_group(group)
        sys.excepthook = hook
        for place, each, value in before:
            setattr(place, each, value)


@dataclass
class Run:
    """What has become of a run."""

    size: int
    reason: int
    seconds: float  # of virtual time
    steps: int
    digest: int
    results: dict[int, Any] = field(default_factory=dict)  # what the program returned, by rank
    errors: dict[int, BaseException] = field(default_factory=dict)
    raised: dict[int, float] = field(default_factory=dict)  # the virtual second of each error
    ended: dict[int, float] = field(default_factory=dict)  # and of the end of each rank that was not killed
    struck: dict[Fault, float] = field(default_factory=dict)  # and of each fault that has struck
    points: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # of seams, user code and disk, by rank
    stacks: str = ""  # of all ranks, if the run did not end
    calls: tuple[int, int] = (0, 0)  # to the store, and their bytes
    statuses: dict[int, int] = field(default_factory=dict)  # of ranks that are processes, as subprocess has them
    outputs: dict[int, str] = field(default_factory=dict)  # and what they have printed

    def story(self) -> str:
        """Return which fault struck whom, what each rank raised, and when."""
        events = [(second, str(fault)) for fault, second in self.struck.items()]
        events += [
            (self.raised[rank], f"rank {rank} raises {type(error).__name__}: {error}")
            for rank, error in self.errors.items()
        ]
        events += [(second, f"rank {rank} ends") for rank, second in self.ended.items()]
        return "".join(f"{second:10.3f} s: {text}\n" for second, text in sorted(events)) + self.stacks

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
    timeout: float = 60.0,
    faults: Sequence[Fault] = (),
    device: str | None = None,
    prepare: Callable[[int], Any] = lambda rank: None,
    **settings: Any,
) -> Run:
    """Run ``program(rank)`` on ``size`` ranks until all have ended.

    Args: ``timeout``: of collectives and of the store; ``device``: which streams of its device are late, if each rank
    has the simulated device of tests/support/simulated.py: "others" than the one that computes, or "computing". The
    device's backend calls itself "nccl". ``prepare``: is called before the program; no fault strikes there;
    ``settings``: of ``begin_run``.
    """
    if device is not None:
        rank_here = ctypes.cast(seams.fp_sim_rank, ctypes.c_void_p).value
        simulated.use(simulated.build(), device, _connecting_late).of_ranks(rank_here, size)
    run = Run(size, 0, 0.0, 0, 0)
    of_user = {(fault.rank, fault.point): fault for fault in faults if fault.native() is None}
    native = begin_run(size, seed, faults, **settings)
    threads: dict[int, int] = {}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # it would destroy one rank's objects in another's thread
    lives = [_Life(rank, size, timeout, run, of_user, device is not None) for rank in range(size)]
    coming[:] = [lambda: lives[seams.fp_sim_rank()].come_to_user_code()]
    with _torch_of_ranks(size), _lists_of_ranks():
        for rank, life in enumerate(lives):
            seams.fp_sim_spawn(rank)
            _thread.start_new_thread(_live, (life, prepare, program, run, threads))
        run.reason = seams.fp_sim_run()
        coming.clear()  # the reference of the next run comes to user code, too, and belongs to no rank
        if run.reason != ENDED:
            run.stacks = _stacks(threads)
        if was_enabled:
            gc.enable()
        gc.collect()
    note_end(run, native)
    return run


def begin_run(
    size: int,
    seed: int,
    faults: Sequence[Fault],
    *,
    limit: float = 600.0,
    switches: int = 64,
    latency: float = 0.001,
    host: int | None = None,
    machines: bool = False,
) -> list[Fault]:
    """Reset the world and the scheduler, and write what ranks find in /proc. Returns the faults that C strikes.

    Args: ``limit``: virtual seconds that the run may take; ``switches``: the chance, of 256, that a rank hands over
    where it need not; ``latency``: virtual seconds until a rank sees that a collective has ended, at most; ``host``:
    the rank whose process has the store, if one has; ``machines``: each rank has a machine of its own, and cannot see
    the processes of the others.
    """
    native = [(fault, numbers) for fault in faults if (numbers := fault.native()) is not None]
    world.reset(int(latency * SECOND), -1 if host is None else host, [numbers for _, numbers in native])
    seams.fp_sim_reset(ctypes.c_uint64(seed), ctypes.c_int64(int(limit * SECOND)), switches)
    _write_places(size, machines)
    return [fault for fault, _ in native]


def note_end(run: Run, native: Sequence[Fault]) -> None:
    """Note in ``run`` when it has ended, its counts, and when each of the ``native`` faults has struck."""
    run.seconds, run.steps = seams.fp_sim_now() / SECOND, seams.fp_sim_steps()
    run.digest, run.calls = seams.fp_sim_digest(), world.calls()
    for fault, struck in zip(native, world.struck(), strict=True):
        if struck >= 0:
            run.struck[fault] = struck / SECOND


def _write_places(size: int, machines: bool) -> None:
    """Write what each rank finds in /proc. ``machines``: each rank has a machine of its own."""
    proc = Path(os.environ["FLATPARAM_SIMULATED_PROC"])
    for rank in range(size):
        process = seams.fp_sim_process(rank)
        stat = f"{process} (rank) S 1 " + "0 " * 17 + f"{100 + rank} 0"  # the 22nd field: the start of the process
        (proc / str(process)).write_text(stat)
        (proc / f"machine of {rank}").write_text(f"{rank if machines else 0}\n")


def kill(rank: int) -> None:
    """End a rank as ``kill -9`` does; it does not return if it is the caller's."""
    world.end_process(rank)
    seams.fp_sim_end(rank)


def has_ended(rank: int) -> bool:
    """Whether a rank was killed, or has come to its end."""
    return bool(seams.fp_sim_has_ended(rank))


def now() -> float:
    """Return the virtual seconds since the run began."""
    return seams.fp_sim_now() / SECOND


# It starts autograd's threads, and waits for each of them: before any rank is lost, and no two ranks at once
_first_backward = threading.Lock()


def enter_world(rank: int, size: int, patience: datetime.timedelta) -> None:
    store = world.Store(patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)


def run_program(rank: int, size: int, prepare: Callable[[int], Any], program: Callable[[int], Any]) -> Any:
    """Return ``program(rank)``, where faults strike, called after ``prepare(rank)``, where none does.

    Raises: Finished if ``prepare`` has failed because another rank has ended.
    """
    try:
        prepare(rank)
    except dist.DistError as gone:  # torch makes groups
        if not any(map(has_ended, range(size))):  # the rank that has the store may be killed already
            raise
        raise Finished from gone
    seams.fp_sim_count_points(rank)
    return program(rank)


def error_of(fault: Fault) -> BaseException:
    """Return the exception of a fault of user code."""
    return Finished() if fault.kind == "has fewer batches" else UserError(f"batch {fault.point} is bad")


class _Life:
    """One rank of a run."""

    def __init__(
        self, rank: int, size: int, timeout: float, run: Run, faults: dict[tuple[int, int], Fault], has_device: bool
    ):
        self.rank, self._size, self._run, self._faults, self._has_device = rank, size, run, faults, has_device
        self._patience = datetime.timedelta(seconds=timeout)
        self._points = 0  # of user code

    def live(self, prepare: Callable[[int], Any], program: Callable[[int], Any]) -> None:
        rank, run = self.rank, self._run
        error: BaseException | None = None
        result = None
        try:
            enter_world(rank, self._size, self._patience)
            if self._has_device:
                time.sleep(0.01)  # until this rank has appeared
                with _first_backward:
                    torch.ones(1, device="sim", requires_grad=True).sum().backward()
            result = run_program(rank, self._size, prepare, program)
        except Finished:
            pass
        except BaseException as raised:
            error = raised
        if seams.fp_sim_has_ended(rank):
            return  # until its next point a killed rank goes on, and nobody sees that
        if error is None:
            run.results[rank] = result
        else:
            run.errors[rank], run.raised[rank] = error, now()
        run.points[rank] = seams.fp_sim_points(rank), self._points, world.disk_points(rank)
        _end(error)

    def come_to_user_code(self) -> None:
        fault = self._faults.get((self.rank, self._points))
        self._points += 1
        if fault is not None:
            self._run.struck[fault] = now()
            raise error_of(fault)


def _live(
    life: _Life, prepare: Callable[[int], Any], program: Callable[[int], Any], run: Run, threads: dict[int, int]
) -> None:
    threads[life.rank] = threading.get_ident()
    with contextlib.suppress(KeyboardInterrupt):  # at the end of a process Python ignores it
        life.live(prepare, program)
    if not seams.fp_sim_has_ended(life.rank):
        run.ended[life.rank] = now()
        world.end_process(life.rank)


def _end(error: BaseException | None) -> None:
    """Do what the hooks of flatparam do at the end of a process."""
    world = dist.group.WORLD
    liveness = sys.modules.get("flatparam.fsdp.desync.liveness")
    if liveness is None or world is None:
        return
    liveness.end_rank(world, error)
    ours = liveness._boards.get(world)
    if ours is not None:
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
