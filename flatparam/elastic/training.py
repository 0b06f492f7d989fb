"""A training loop that survives the loss of ranks: ``start``, ``steps``, ``survive``, ``rank``, ``size``.

| when | what happens |
|---|---|
| after ``every`` steps | each rank copies its state (``snapshot.py``), and sends stripes of the copy (``parity.py``) |
| before the optimizer steps | each rank waits for the others' stripes: then the copied step is committed |
| a rank is lost | the others decide the next epoch (``epochs.py``), and go back to the last committed step in it |
| a process asks to join | the ranks decide an epoch with it in their next commit, but not in the first of an epoch |
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import inspect
import math
import operator
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .. import _C
from ..checkpoint.errors import CheckpointError
from ..checkpoint.optimizers import labelled
from ..checkpoint.progress import newest_of
from ..common.collectives import backends_of
from ..common.patches import Lifetime
from ..common.redundancy import MOST, group_of
from ..common.warned import warn_user
from ..fsdp.desync import liveness
from ..fsdp.desync.checked_collectives import CAME_LATE, STAYS_AWAY, check_exchanges, exchange, gather_objects, settle
from ..fsdp.desync.events import DIFFERENT, SetupCollective
from ..fsdp.desync.stores import WITHOUT_STORE, Store, all_groups, forget_names, in_memory, store_of_world
from ..fsdp.desync.trace import TRANSPORT
from ..fsdp.errors import OrderError, StateError
from ..fsdp.sharding.placement import world
from ..fsdp.unit.base import wrappers_in
from ..fsdp.unit.unit import units_of
from .epochs import MEMBER, PATIENCE, Epoch, Epochs, store_of_job
from .parity import Generation, Kept, rebuild
from .resizing import check_model, check_reduced, devices_of, enter, inner_sizes, leave
from .snapshot import Key, Plan, read
from .transport import Held

_CONNECTING = 1.0  # seconds in gloo for a new world, as all members have come; twice as long in each further try
_NOT_COMMITTED = "elastic.start: ranks are lost, and no state is committed yet: start the job again"
_LOOKING = 0.5  # seconds for a lost rank, if a world cannot be made
_ATTEMPTS = 3  # worlds of the same members, with no rank known to be lost: the error of the last one passes
Build = Callable[[], tuple[nn.Module, Any]]
_training = Lifetime("from the start of `flatparam.elastic` to the end of the process")
_here = threading.local()


class Session:
    """The training of one rank, through all its epochs, in the thread that called ``start``. Read ``steps`` first.

    It owns the snapshots, and makes and ends the worlds. ``step``: the number of steps that are done. ``generations``:
    the snapshots, oldest first: at most two, or three from the first commit of an epoch to the second.
    """

    def __init__(
        self,
        store: Store,
        member: str,
        slots: int,
        redundancy: str,
        every: int,
        time_out: datetime.timedelta,
        backend: str | None = None,
    ):
        self._store, self._redundancy, self._every, self._time_out = store, redundancy, every, time_out
        self._backend = backend = backend or _default_backend()
        self.epochs = Epochs(store, member, time_out.total_seconds(), f"{redundancy=}, {every=}, {backend=}")
        self.slots = slots
        self.joins: Epoch | None = None  # the epoch in which a new process joins
        self.epoch = Epoch(-1, [])
        self.step = 0
        self._until = -1  # before ``steps``
        self.has_recovered = False  # since the last step was yielded
        self.model: Any = None
        self.optimizer: Any = None
        self.extra: Any = None
        self.generations: list[Generation] = []
        self._world: Callable[[], Any] = lambda: None  # a weak reference to the world that was made last
        self._makes_world = False
        self._settable = {"gloo", "nccl"}  # backends whose time-out can be set later
        self._group: Any = None  # of the parities; None until its world is made
        self._meetings: dict[str, liveness.Meetings] = {}  # to make process groups, by name
        self._attempts = 0  # of _ATTEMPTS, since a state was committed or a rank was lost; the same on all ranks
        self._inner: list[int] = []  # of ``inner_sizes``
        self._has_hook = False  # whether torch has wrapped sys.excepthook: it would do so for each world
        _here.session = self
        _training.hold(self)

    # Worlds

    def make_world(self, epoch: Epoch) -> None:
        """Come to ``epoch`` or a later one, and make its world. Raises: as ``meet``; RuntimeError if a rank is lost."""
        tried, epoch = self.epoch, self.epochs.meet(epoch)
        self._attempts = self._attempts + epoch.number - tried.number if epoch.members == tried.members else 0
        self.epoch = epoch
        store = self._store.below(f"flatparam world {epoch.number}").raw
        number, size, hook = epoch.members.index(self.epochs.me), len(epoch.members), sys.excepthook
        store.set_timeout(self._time_out)
        self._makes_world = True
        try:
            dist.init_process_group(self._backend, timeout=self._time_out, world_size=size, rank=number, store=store)
            self._world = weakref.ref(world())
            with contextlib.suppress(RuntimeError):  # a backend refuses
                world().set_timeout(self._time_out)
                self._settable |= _backends_in(self._backend)
            if self._has_hook:
                sys.excepthook = hook
            self._has_hook = True
            groups = {tuple(group_of(one, size, self._redundancy)) for one in range(size)}
            for ranks in sorted(groups):  # all ranks make all groups
                made = dist.new_group(list(ranks), timeout=self._time_out, backend="gloo")
                self._group = made if number in ranks else self._group
        finally:
            self._makes_world = False
        liveness.enter()  # a rank that is slow in ``build`` answers from now on, and a stopped one is known

    def makes(self, backend: str) -> bool:
        """Whether a group that torch is asked for is one of this session. After the loop a script may have own ones."""
        is_ours = dist.is_initialized() and dist.group.WORLD is self._world()
        return backend not in WITHOUT_STORE and (self._makes_world or is_ours)

    def make_group(
        self, make: Callable[..., Any], ranks: Sequence[int], backend: str, name: str, timeout: datetime.timedelta
    ) -> Any:
        """Return the result of torch's ``make(timeout=...)``, with the group ``name`` of ``ranks``; empty: the world.

        ``make`` waits for a lost rank until its time-out, so the ranks meet before, and have seconds to connect.
        Raises: OrderError if a rank is lost or does not come within ``timeout``; RuntimeError.
        """
        if not self._makes_world and dist.get_rank() in ranks:  # in ``make_world`` all have just met
            look = functools.partial(self._look, timeout.total_seconds())
            meetings = liveness.Meetings(store_of_world(), f"flatparam makes {name}")
            self._meetings.setdefault(name, meetings).meet(ranks, patience=math.inf, look=look)
        is_wrapped = dist.get_debug_level() == dist.DebugLevel.DETAIL  # by a backend with a time-out of its own
        if is_wrapped or not {"gloo"} <= _backends_in(backend) <= self._settable:
            return make(timeout=timeout)
        # gloo waits 5 times as long for a connection, and a member that comes too late to the next epoch is dropped
        most = ((liveness.heartbeat() or math.inf) + PATIENCE - 1.0) / 5
        connecting = datetime.timedelta(seconds=min(most, _CONNECTING * 2**self._attempts))
        made = make(timeout=connecting)
        if isinstance(made[0], dist.ProcessGroup):
            made[0].set_timeout(timeout)
        return made

    def _look(self, most: float, waited: float) -> None:
        """Raises: OrderError if other ranks have left this epoch, have not come out of ``make_world``, or are late."""
        if self.epochs.after(self.epoch) is not None:
            raise OrderError(f"elastic: other ranks have left epoch {self.epoch.number}")
        board = liveness.board() if waited > (liveness.heartbeat() or math.inf) + PATIENCE else None
        if board is not None and (absent := board.absent(range(dist.get_world_size()))):
            raise OrderError(absent)
        if waited >= most:
            raise OrderError(
                f"elastic: not all of its ranks have come to make a process group within {most:g} s: let all of them "
                "call new_group(), in one order, or give it a longer `timeout`"
            )

    def end_world(self) -> None:
        """Destroy the world, without a wait for ranks that are lost."""
        if not dist.is_initialized():
            forget_names()
            return
        board = liveness.board()
        if board is not None:
            board.leave("a rank was lost, or joins")
        for generation in self.generations:
            generation.drop_work()
        for group in all_groups():
            if dist.get_backend(group) != "fake":
                for backend in backends_of(group):
                    backend.abort()
                _C.let_go(group.group_name)
        if self.model is not None:
            for device in devices_of(self.model):  # each was waiting for a lost rank until the abort
                _C.wait_device(str(device))
            leave(self.model)
        self._group = None
        self._meetings.clear()
        dist.destroy_process_group()
        gc.collect()

    # The model

    def build(self, build: Build) -> None:
        """Build the model and the optimizer over the world."""
        self.model, self.optimizer = build()
        check_model(self.model)
        self._inner = inner_sizes(self.model)
        for one in labelled(self.optimizer).values():
            one.register_step_pre_hook(lambda *_: self.complete())

    def check_commits(self) -> None:
        """Check commits in one order with units: gloo ends a process that mixes both, a device waits for the host."""
        for device in (torch.device("cpu"), *devices_of(self.model)):
            check_exchanges([world()], device)

    def ask_to_join(self, build: Build) -> tuple[nn.Module, Any]:
        """Build the model over a fake world, ask to join, and wait for the epoch. ``begin`` makes its world."""
        hook = sys.excepthook
        dist.init_process_group("fake", store=in_memory().raw, rank=0, world_size=self.slots)
        sys.excepthook = hook
        self.build(build)
        self.end_world()
        self.epochs.ask()
        self.joins = self.epochs.wait_to_join(self.slots)
        if self.joins is None:
            raise SystemExit(0)
        return self.model, self.optimizer

    # Commits

    def commit(self) -> None:
        """Take a snapshot of the step that is done, and begin to send its stripes. Take in processes that ask to join.

        At its end the parity of the snapshot before is whole on all ranks. A collective call.
        """
        number, size = dist.get_rank(), dist.get_world_size()
        self._check_step()
        devices = devices_of(self.model)
        extra = {"step": self.step, "rng": _random_states(devices), "extra": _state_of(self.extra)}
        plan = Plan(self.model, self.optimizer, extra, (self.epoch.number, self.step), number)
        lengths, asks = self._agree(plan.length)
        old, is_first = None, not self._is_committed()
        if not is_first:  # all ranks are here, so the newest generation is whole on all of them
            self._attempts = 0
            old = self.generations[0] if len(self.generations) > 1 else None
            del self.generations[:-1]
        ranks = group_of(number, size, self._redundancy)
        longest = max(lengths[one] for one in ranks)
        before = self.generations[-1] if self.generations else None
        generation = Generation(self.epoch, self.step, number, ranks, longest, before, old, bool(devices))
        plan.write(generation.data)
        self.generations.append(generation)
        generation.send(self._group)
        if min(asks) > self.epoch.asks and not is_first:  # a step that was lost waits for no new process
            self.complete()
            _gathered(0)  # the newest snapshot is whole on all ranks
            self.go_to(self.epochs.grown(self.epoch, min(asks)))

    def finish(self) -> None:
        """End the training: all ranks have done its last step, so nobody needs a copy of it. A collective call."""
        self._check_step()
        self._agree(0)
        self.epochs.finish()

    def _agree(self, length: int) -> tuple[list[int], list[int]]:
        """Return ``length`` and the asks to join of each rank. A collective call. Raises: StateError on all ranks."""
        lengths, asks, untils = map(list, zip(*_gathered(length, self.epochs.asks(), self._until), strict=True))
        if len(set(untils)) > 1:
            raise StateError(f"elastic.steps: expected the same `until` on all ranks, got {untils}")
        return lengths, asks

    def _check_step(self) -> None:
        """Complete the parity before, and wait for the step that is done.

        Raises: RuntimeError if its values are not valid; StateError if gradients are not reduced.
        """
        self.complete()
        _check_communicators()
        check_reduced(self.model, "elastic.steps")
        settle(part for unit in units_of(self.model.modules()) for part in unit.flat_params)

    # Recovery

    def recover(self, error: Exception) -> None:
        """Go on without the ranks whose loss has caused ``error``. Raises: as ``epoch_after`` and ``go_to``."""
        self.go_to(self.epoch_after(error))

    def epoch_after(self, error: Exception) -> Epoch:
        """Return the epoch that follows on the loss that has caused ``error``.

        If no rank is known to be lost, but the error may come from one, all members go on, at most ``_ATTEMPTS - 1``
        times: a rank that does not come to the next world is lost. Raises: ``error`` after that, and for other causes.
        If the ranks issue different collectives, all raise it at once: who waited would take the others for lost.
        """
        is_of_ranks = isinstance(error, OrderError | CheckpointError) and not DIFFERENT.search(str(error))
        is_of_transport = isinstance(error, RuntimeError) and TRANSPORT.search(str(error))
        if isinstance(error, StateError) or not (is_of_ranks or is_of_transport):
            raise error
        members, board = self.epoch.members, liveness.board() if dist.is_initialized() else None
        has_world = self._group is not None  # without one, ranks that are lost do not come to the next epoch
        end = time.monotonic() + (2 * liveness.READING if has_world else _LOOKING)
        while time.monotonic() < end:
            later = self.epochs.after(self.epoch)
            if later is not None:
                return later
            lost = self.epochs.ended(members)
            if board is not None:
                others = [rank for rank, one in enumerate(members) if one not in [self.epochs.me, *lost]]
                lost += [members[rank] for rank in board.find_lost(others)]
            if lost:
                return self.epochs.without(self.epoch, lost)
            time.sleep(0.02)
        is_absent = board is not None and board.absent(range(len(members)))
        is_told = any(words in str(error) for words in (STAYS_AWAY, CAME_LATE))
        is_unclear = is_of_transport or is_absent or not has_world or is_told
        if is_unclear and self._attempts + 1 < _ATTEMPTS:  # a rank that does not come to the next world is lost
            return self.epochs.without(self.epoch, [])
        raise error

    def go_to(self, epoch: Epoch) -> None:
        """Leave the world for that of ``epoch``, or a later one if more ranks are lost, with the committed state.

        Raises: CheckpointError, StateError on all ranks if there is no such state; Replaced.
        """
        found: _Found | str | None = None
        while found is None:
            self.end_world()
            try:
                self.make_world(epoch)
                found = self._find_state()
                if not isinstance(found, str):
                    self._bind(found)
            except Exception as error:
                found, epoch = None, self.epoch_after(error)
        if isinstance(found, str):
            raise StateError(found) if found is _NOT_COMMITTED else CheckpointError(found)
        self.has_recovered = True
        if self.epoch.members[0] == self.epochs.me:
            reason = "; ".join([self.epochs.reasons(self.epoch), *found.corrupt])
            text = f"flatparam.elastic: epoch {self.epoch.number}: {size()} ranks go on from step {self.step}: {reason}"
            print(text, file=sys.stderr, flush=True)

    def _find_state(self) -> _Found | str:
        """Return the newest state that the ranks have together; or why there is none, on all ranks alike."""
        kept = [one.check() for one in self.generations]
        newest = newest_of(self.model) if kept else None  # a new process knows only the one from which it was built
        told = gather_objects(SetupCollective.RESIZES, (kept, newest, self._inner), world())
        if None in told:  # a rank is in ``begin_session``, which gathers None here
            return _NOT_COMMITTED
        units = [len(inner) for *_, inner in told]
        if len(set(units)) > 1:
            raise StateError(f"elastic: build() must return one model on all ranks, which have {units} units")
        inner = zip(*(inner for *_, inner in told), strict=True)
        self._inner = [min(sizes) for sizes in inner]  # some may have been built in a smaller world
        refused: dict[Key, list[str]] = {}
        while not isinstance(found := _choose(told, self._redundancy, refused), str):
            problems = self._read(found)
            if not problems:
                return found
            refused[found.key] = problems
        return found if any(one.key[1] > 0 for theirs, *_ in told for one in theirs) else _NOT_COMMITTED

    def _read(self, found: _Found) -> list[str]:
        """Read the copies of ``found`` into it, and rebuild the lost ones. Returns: problems, on all ranks alike."""
        me = dist.get_rank()
        mine = next((one for one in self.generations if one.key == found.key and found.at.get(one.number) == me), None)
        runs = {} if mine is None else {mine.number: mine.data}
        runs |= rebuild(mine, found.lost, found.at.__getitem__)
        problem = None
        try:
            found.here.update({number: read(run, found.key, number) for number, run in runs.items()})
        except CheckpointError as error:  # a stripe had changed before the parity was made of it
            problem = f"{error}, when it is rebuilt from what the others keep"
        return [one for one in gather_objects(SetupCollective.RESIZES, problem, world()) if one is not None]

    def _bind(self, found: _Found) -> None:
        """Bind the model to the ranks of the world, with the state that was ``found``."""
        try:
            extra = enter(self.model, self.optimizer, found.here, self._inner)
        except CheckpointError as error:
            hint = "; in a new process `build` must return the model and the optimizer as the others have them now"
            raise CheckpointError(f"{error}{hint if self.epoch.asks else ''}") from error
        self.generations = [one for one in self.generations if one.key <= found.key][-2:]
        self.step = extra["step"]
        _set_random_states(devices_of(self.model), extra["rng"])
        _set_state(self.extra, extra["extra"])
        self.check_commits()

    # The loop

    def begin(self, model: nn.Module, optimizer: Any, until: int, extra: Any) -> None:
        """Check the arguments of ``steps``. A process that joins comes to its epoch here."""
        if model is not self.model or optimizer is not self.optimizer:
            raise ValueError("elastic.steps: expected the model and the optimizer of elastic.start")
        try:
            until = max(operator.index(until), 0)
        except TypeError as error:
            raise ValueError(f"elastic.steps: expected `until` to be an int, got {until!r}") from error
        if self._until != -1:
            raise StateError("elastic.steps: was called before: one call yields all steps; `until` is their number")
        _state_of(extra)
        self.extra, self._until = extra, until
        if self.joins is not None:
            self.go_to(self.joins)
            self.joins = None

    def steps(self) -> Iterator[int]:
        """Yield the steps. At the end, or if the script leaves the loop, say so to the launcher."""
        with contextlib.suppress(GeneratorExit):  # the script leaves the loop
            yield from self._steps()
        self.epochs.leave()

    def _steps(self) -> Iterator[int]:
        while True:
            self.has_recovered = False
            try:
                if self.step >= self._until:
                    self.finish()
                    return
                if self.step % self._every == 0 or not self._is_committed():
                    self.commit()
            except Exception as error:
                may_be_end = self.step >= self._until and not isinstance(error, StateError)
                is_end = may_be_end and self.epochs.wait_for_end(liveness.READING)
                if is_end and self.epochs.after(self.epoch) is None:
                    return  # another rank of this epoch has come through: all have done the last step
                self.recover(error)
            if not self.has_recovered:
                yield self.step
            if not self.has_recovered:
                self.step += 1

    def _is_committed(self) -> bool:
        """Whether there is a snapshot of this epoch."""
        return bool(self.generations) and self.generations[-1].epoch == self.epoch

    def complete(self) -> None:
        """Wait until the parities are complete. A hook before optimizer steps. Raises: OrderError if a rank is lost."""
        for generation in self.generations:
            generation.complete()


@_training.around("torch.distributed.distributed_c10d:_new_process_group_helper", test="tests/elastic/test_worlds.py")
def _meeting_first(original: Any, *args: Any, **settings: Any) -> Any:
    """Let the ranks of a new process group meet before they connect: torch waits for a lost one until the time-out."""
    here: Session | None = getattr(_here, "session", None)
    given = inspect.signature(original).bind(*args, **settings).arguments
    if here is None or given.get("timeout") is None or not here.makes(given["backend"]):
        return original(*args, **settings)
    names = ("global_ranks_in_group", "backend", "group_name", "timeout")
    return here.make_group(functools.partial(original, **given), *(given[one] for one in names))


def _backends_in(backend: str) -> set[str]:
    """Return the backends of ``backend``, such as ``cpu:gloo,cuda:nccl``, without the devices."""
    return set(dist.distributed_c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map().values())


def _default_backend() -> str:
    """Return gloo, for control messages and copies in host memory, beside the accelerator's default, if there is one.

    The world exists before the model, so its device is unknown.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return "gloo" if found is None else f"cpu:gloo,{found.type}:{dist.get_default_backend_for_device(found)}"


def _check_communicators() -> None:
    """Raises: RuntimeError if NCCL has reported an error in this world: results of later collectives are not valid."""
    for backend in (one for group in all_groups() for one in backends_of(group)):
        error = backend.get_error() if hasattr(backend, "get_error") else None
        if error is not None and error.name != "SUCCESS":
            raise RuntimeError(f"elastic.steps: a communicator was aborted after an error of NCCL ({error.name})")


def _random_states(devices: list[torch.device]) -> list[torch.Tensor]:
    """Return the states of the random numbers of the CPU and of ``devices``."""
    return [torch.get_rng_state(), *(torch.get_device_module(one).get_rng_state(one) for one in devices)]


def _set_random_states(devices: list[torch.device], states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.get_device_module(device).set_rng_state(state, device)


def _gathered(*mine: int) -> list[list[int]]:
    """Return the numbers that each rank gives. A collective call."""
    told = [torch.empty(len(mine), dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size())]
    exchange(SetupCollective.COMMITS, dist.all_gather, told, torch.tensor(mine, device="cpu"), group=world())
    return [one.tolist() for one in told]


class _Found(NamedTuple):
    """The newest state that the ranks have together. ``at``: old rank -> rank now; ``lost``: as in ``rebuild``.

    ``corrupt``: the corrupt pieces of newer states, and of this one; ``here``: old rank -> its state, on this rank.
    """

    key: Key
    at: dict[int, int]
    lost: dict[int, list[int]]
    corrupt: list[str]
    here: dict[int, Held]


def _choose(told: list[Any], redundancy: str, refused: dict[Key, list[str]]) -> _Found | str:
    """Return what can be rebuilt from what the ranks told; or why nothing can.

    ``told``: of each rank its generations, the newest checkpoint that it knows, and its ``_inner``; ``refused``: states
    with a rebuilt copy that was corrupt, and the errors.
    """
    of_key: dict[Key, list[tuple[int, Kept]]] = {}
    for rank, (theirs, *_) in enumerate(told):
        for one in theirs:
            of_key.setdefault(one.key, []).append((rank, one))
    corrupt: list[str] = []
    lost_last: list[str] = []
    for key in sorted(of_key, reverse=True):
        kept = of_key[key]
        members = kept[0][1].members
        at = {one.number: rank for rank, one in kept if one.has_copy}
        sound = {one.number for _, one in kept if one.has_copy and one.has_parity}
        groups = {one: group_of(one, len(members), redundancy) for one in range(len(members)) if one not in at}
        corrupt += [*(problem for _, one in kept for problem in one.corrupt), *refused.get(key, ())]
        can_be = (len(ranks) > 1 and sound >= set(ranks) - {number} for number, ranks in groups.items())
        if key not in refused and all(can_be):
            return _Found(key, at, groups, corrupt, {})
        lost_last = lost_last or [members[one] for one in groups]
    which = f" ({'; '.join(corrupt)})" if corrupt else ""
    _, path = max((newest for _, newest, _ in told if newest is not None), default=(0.0, ""))
    return (
        f"the state of {', '.join(lost_last) or 'all ranks'} is lost, with what the others keep of it{which}: "
        f"start again from the newest checkpoint{path and f', {path}'}"
    )


def _state_of(extra: Any) -> Any:
    """Return what a snapshot has of ``extra``. Raises: ValueError."""
    if extra is None:
        return None
    if isinstance(extra, dict):
        return {name: _state_of(one) for name, one in extra.items()}
    if not (hasattr(extra, "state_dict") and hasattr(extra, "load_state_dict")):
        raise ValueError(
            "elastic.steps: expected `extra` to be an object with state_dict() and load_state_dict(), or a dict of "
            f"such objects, got {type(extra).__name__}"
        )
    if isinstance(extra, nn.Module) and wrappers_in(extra):
        raise ValueError(
            f"elastic.steps: `extra` has a wrapped {type(extra).__name__}, and only the model of elastic.start moves "
            "to other ranks: leave it out"
        )
    return extra.state_dict()


def _set_state(extra: Any, state: Any) -> None:
    if isinstance(extra, dict):
        for name, one in extra.items():
            if name not in state:
                raise StateError(f"elastic.steps: `extra` had no {name!r} at the last commit: give it to elastic.steps")
            _set_state(one, state[name])
    elif extra is not None:
        extra.load_state_dict(state)


def session() -> Session:
    """Return the session of this rank. Raises: StateError before ``start``."""
    found: Session | None = getattr(_here, "session", None)
    if found is None:
        raise StateError("flatparam.elastic: call elastic.start(build) first, in this thread")
    return found


def begin_session(found: Session, build: Build) -> tuple[nn.Module, Any]:
    """Make the world of ``found``, or ask to join the present one, and build the model.

    If a rank is lost before the model is built on all, the others build it again.
    """
    if not found.epochs.me.endswith(".0"):
        return found.ask_to_join(build)
    epoch = found.epochs.first(found.slots)
    while True:
        try:
            found.make_world(epoch)
            others = gather_objects(SetupCollective.RESIZES, None, world())
            if len(others) == 1 or any(one is not None for one in others):  # some have trained with the lost rank
                raise StateError(_NOT_COMMITTED)
            found.build(build)
            found.check_commits()
            return found.model, found.optimizer
        except Exception as error:
            epoch = found.epoch_after(error)
            found.end_world()


def start(
    build: Build,
    *,
    redundancy: str = "parity",
    every: int = 1,
    timeout: datetime.timedelta = dist.constants.default_pg_timeout,
    backend: str | None = None,
) -> tuple[nn.Module, Any]:
    """Make the world, and build the model and the optimizer in it; a new process of the job asks to join.

    Call it once in each process, which ``torchrun ... -m flatparam.elastic script.py`` has started.

    Args:
        build: returns the model, wrapped over the world, and its optimizer, or a list or dict of several.
        redundancy: "parity": groups of up to 4 ranks, each of which may lose one rank; "buddy": groups of 2 or 3.
        every: steps from one snapshot to the next.
        timeout: of the process groups, and for all ranks to start.
        backend: of the world, as in ``init_process_group``, with gloo for the CPU. None: gloo, beside the default one
            of the accelerator where this process has one.

    Returns: what ``build`` has returned.
    Raises: ValueError, StateError: the model cannot move to other ranks, or a rank has not started.
    SystemExit: a process that joins finds that the job has ended.
    """
    if redundancy not in MOST:
        raise ValueError(f"elastic.start: expected redundancy to be one of {list(MOST)}, got {redundancy!r}")
    if every < 1:
        raise ValueError(f"elastic.start: expected every to be at least 1, got {every}")
    if backend is not None and "gloo" not in backend:
        raise ValueError(f"elastic.start: expected backend to have gloo, as 'cpu:gloo,cuda:nccl' has, got {backend!r}")
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"elastic.start: the environment has no {missing[0]}: start the script with torchrun")
    slot, slots = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if slots < 2:
        raise ValueError("elastic.start: expected at least 2 ranks, as a rank alone has nobody who keeps its state")
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not by_agent:
        warn_user(
            "elastic.start: the store is in rank 0, so the job ends if that rank is lost: start it with torchrun, and "
            "without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
            (),
        )
    if MEMBER not in os.environ:
        warn_user(
            "elastic.start: torchrun ends the job when a rank is lost, unless it is started with "
            "`torchrun --max-restarts 0 ... -m flatparam.elastic script.py`",
            (),
        )
    # By default torch ends a process if NCCL reports that another is lost. Each commit asks for such errors instead
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    store = store_of_job(serves=not by_agent and slot == 0)
    member = os.environ.get(MEMBER, f"{slot}.0")
    return begin_session(Session(store, member, slots, redundancy, every, timeout, backend), build)


def steps(model: nn.Module, optimizer: Any, until: int, extra: Any = None) -> Iterator[int]:
    """Yield the numbers of the steps to do, from 0 to ``until - 1``; a step is yielded again after a loss in it.

    Before the first, and every ``every`` steps, all ranks commit the step before: each keeps parts of others' state.
    All ranks must take part.

    Args:
        model, optimizer: of ``start``.
        until: the number of steps of the training.
        extra: with ``state_dict`` and ``load_state_dict``, as schedulers have, or a dict of such objects. It goes back
            with the model. The random states of the CPU and of the model's devices go back without it.

    Raises: ValueError, StateError for other arguments than in ``start``, or than on other ranks.
    """
    session().begin(model, optimizer, until, extra)
    return session().steps()


@contextlib.contextmanager
def survive() -> Iterator[None]:
    """A block with one step. If other ranks are lost in it, the rest goes back to the last committed step.

    The block ends then, and ``steps`` yields the step to do again. Other errors pass. Raises: CheckpointError on all
    ranks, if they have not kept enough; Replaced, which ends a process that others took for lost.
    """
    try:
        yield
    except Exception as error:
        session().recover(error)


def rank() -> int:
    """Return this process's rank now. It changes when ranks are lost or join. Raises: StateError as ``size``."""
    return dist.get_rank(_world_now())


def size() -> int:
    """Return the number of ranks now. Raises: StateError in a process that joins, before ``steps``."""
    return dist.get_world_size(_world_now())


def _world_now() -> Any:
    found, here = dist.group.WORLD, getattr(_here, "session", None)
    if found is None and here is not None and here.joins is not None:
        raise StateError("flatparam.elastic: a process that joins has a rank from elastic.steps on: ask in the loop")
    if found is None:
        raise StateError(
            "flatparam.elastic: there is no world before elastic.start, and none while it is made anew: ask in the loop"
        )
    return found
