"""``resize``: bind a model in place to other ranks of the world, and move its training state to them.

| step | done by | after a failure |
|---|---|---|
| plan: list the boxes of the old shards, as a save does | ranks that hold the model | nothing has changed |
| bind units to the new ranks, plan the reads, as a load does | ranks that will hold it | bound as before |
| move the bytes | all ranks | bound as before |
| commit: tell units, set the optimizers' states, then extra states | ranks that will hold it | bound to the new ranks |

The old shards stay in memory until the commit. ``training.py`` calls ``leave`` and ``enter``: they move a model
whose world has ended, and its state comes from snapshots.
"""

import contextlib
import functools
import gc
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.errors import CheckpointError
from ..checkpoint.loading import Loading
from ..checkpoint.modules import Given, given_by
from ..checkpoint.optimizers import labelled
from ..checkpoint.pieces import InHandle, all_held
from ..checkpoint.planning import SavePlan, check_idle, plan_save
from ..checkpoint.rendezvous import Rendezvous
from ..common.collectives import ranks_of
from ..common.described import Described
from ..common.torch_private import FakeProcessGroup
from ..fsdp.desync.checked_collectives import gather_objects
from ..fsdp.desync.events import SetupCollective
from ..fsdp.desync.same_unit import check_same_unit
from ..fsdp.desync.unit_ids import UnitIds, assign
from ..fsdp.errors import StateError
from ..fsdp.sharding.placement import Placement, groups_over, is_grid, is_placed, place, world
from ..fsdp.sharding.unit_description import describe_unit
from ..fsdp.unit.base import Wrapper, wrappers_in
from ..fsdp.unit.summon import refuse_unreduced
from . import peers
from .transport import Held, Pieces, Reading, described, keeping, move, together

_WHAT = "elastic.resize"
_WAY_OUT = "save a checkpoint, build the model on the other ranks, and load it there"


@dataclass
class Resized:
    """The result of ``resize``. ``sent``: bytes that other ranks have got from this one.

    ``extra``: if this rank is ``ranks[i]``, the value that old rank number ``i % old size`` gave, with the old ranks
    numbered in ascending order; None on a rank that holds nothing now.
    """

    sent: int
    extra: Any = None


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Let Python's collector not run meanwhile. A plan makes thousands of objects that soon end. Their number would let
    the collector go over all objects of the process, which takes as long as the rest of the call."""
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collector()
def resize(model: nn.Module, optimizer: Any, ranks: Sequence[int], *, extra: Any = None) -> Resized:
    """Let ``ranks`` of the world hold ``model`` from now on. Parameters and optimizers stay the same objects.

    All ranks of the world must call it between steps, each with the same model. A rank that is not in ``ranks`` gives
    up its shards and optimizer states: its model raises StateError until a later call names the rank again.

    Args:
        model: wrapped. Where a strategy is over two groups, ``ranks`` is cut into inner groups of the same size.
        optimizer: one, or a list or dict of several; None: none.
        ranks: ranks of the world, in ascending order.
        extra: this rank's own values, as in ``checkpoint.save``.

    Raises:
        CheckpointError, StateError: on every rank, naming the rank and the unit or parameter. Model and optimizer are
            as before. At the end modules' ``set_extra_state`` is called: if one raises, its exception passes on that
            rank alone, and all else is moved.
    """
    moving = _Moving(model, optimizer, ranks)
    rendezvous = Rendezvous(None, SetupCollective.RESIZES, model)
    holders, inner = rendezvous.agree(moving.check, moving.compare)
    with keeping(moving.problems):
        moving.plan_old(holders, extra)
    groups = [
        groups_over(wrapper._strategy, moving.ranks, size) for wrapper, size in zip(moving.wrappers, inner, strict=True)
    ]
    return moving.carry_out(rendezvous, moving.here, groups)


def check_model(model: nn.Module) -> None:
    """Raises: StateError for a model that cannot move to other ranks, naming the unit. No collective call."""
    moving = _Moving(model, None, [])
    moving.check_units()
    held = all_held(model)
    moving.check_held(held, given_by(model, held))


def check_reduced(model: nn.Module, what: str) -> None:
    """Raises: StateError, naming the call ``what``, if gradients of units are not reduced. No collective call."""
    units = [wrapper._unit for wrapper in wrappers_in(model)]
    refuse_unreduced(units, what)
    for unit in units:
        if any(accumulated is not None for accumulated in unit.core.accumulated()):
            raise StateError(
                f"{what}: gradients of {unit.name} were added up in no_sync(): run the last micro-batch outside "
                "of it first, or clear the gradients"
            )


def inner_sizes(model: nn.Module) -> list[int]:
    """Return for each unit the number of ranks that share its parameter in forward and backward."""
    groups = (wrapper._placement.param for wrapper in wrappers_in(model))
    return [1 if group is None else group.size() for group in groups]


def device_of(wrapper: Wrapper) -> torch.device | None:
    """Return the device on which a wrapper's unit computes; None: it has no parameters."""
    return next((flat_param.device for flat_param in wrapper._unit.flat_params), None)


def devices_of(model: nn.Module) -> list[torch.device]:
    """Return the devices other than the CPU on which units of ``model`` compute, in order of their names."""
    found = {device_of(wrapper) for wrapper in wrappers_in(model)}
    return sorted((one for one in found if one is not None and one.type != "cpu"), key=str)


def leave(model: nn.Module) -> None:
    """Bind the units of ``model`` to no ranks, and drop their values. No collective call: it may follow a failure."""
    for wrapper in wrappers_in(model):
        wrapper._forget_interrupted()
        core = wrapper._unit.core
        wrapper._unit.bind(Placement(), False)
        core.retire()
        wrapper._placement = Placement()


def enter(model: nn.Module, optimizer: Any, here: dict[int, Held], inner: list[int]) -> Any:
    """Bind a model that has left its ranks to all ranks of the world, with the state that the ranks hold.

    All ranks of the world must call it. ``here``: the number of an old rank -> its boxes, on this rank; ``inner``:
    ``inner_sizes`` of the model as it was built. An inner group gets more ranks where ``inner`` does not divide the
    world, so that no rank needs more memory for parameters than it was built for.
    Returns: the ``extra`` of old rank number ``rank % old size``. Raises: as ``resize``; then call ``leave``.
    """
    ranks = range(world().size())
    moving = _Moving(model, optimizer, ranks)
    groups = [
        groups_over(wrapper._strategy, ranks, dividing(least, len(ranks)))
        for wrapper, least in zip(moving.wrappers, inner, strict=True)
    ]
    return moving.carry_out(Rendezvous(None, SetupCollective.RESIZES, model), here, groups).extra


def dividing(least: int, size: int) -> int:
    """Return the smallest number, from ``least`` on, that divides ``size``; ``size`` if none does."""
    return next((number for number in range(least, size) if size % number == 0), size)


class _Moving:
    """One call on this rank. ``plan``: the boxes that it holds; ``loading``: the plan of its reads; None: no reads.

    ``here``: number of an old rank -> its boxes, on this rank.
    """

    reading: Reading

    def __init__(self, model: nn.Module, optimizer: Any, ranks: Sequence[int]):
        self.model, self.optimizer, self.ranks = model, optimizer, ranks
        self.wrappers = wrappers_in(model)
        self.plan, self.holds = SavePlan(), False
        self._undo: list[Callable[[], None]] = []
        self._replaced: list[Any] = []  # the cores of units that graphs from before may still call
        self._described: dict[Any, list[tuple[Wrapper, Described]]] = {}  # by groups
        self._numbers: dict[Wrapper, dict[UnitIds, int]] = {}
        self.loading: Loading | None = None
        self.here: dict[int, Held] = {}
        self.problems: list[Exception] = []  # of this rank alone: the next ``agree`` raises the first

    def check(self) -> list[Any]:
        """Check the call and the units. Returns: this rank's entry for ``compare``.

        It is ``[[ranks, labels of optimizers, strategy and device of each unit], held]``. ``held``: None if this rank
        holds no shards, else ``[inner sizes, ranks of the groups, shards times replicas of each unit]``.
        """
        everyone = world()
        self.ranks = [operator.index(rank) for rank in self.ranks]
        if isinstance(everyone, FakeProcessGroup):
            raise StateError(f"{_WHAT}: the world is a fake one, without other ranks")
        if not self.ranks or self.ranks != sorted(set(self.ranks) & set(range(everyone.size()))):
            raise CheckpointError(f"expected ascending ranks from 0 to {everyone.size() - 1}, got {self.ranks}")
        self.check_units()
        units = []
        for wrapper in self.wrappers:
            device = device_of(wrapper)
            if device is not None and device.type not in {one.type for one in everyone._device_types}:
                raise StateError(
                    f"{_WHAT}: {wrapper._unit.name} is on {device}, and the world has no collectives for it: give "
                    f"init_process_group() a backend for it, such as cpu:gloo,cuda:nccl, not "
                    f"{dist.get_backend_config(everyone)}"
                )
            units.append(f"{wrapper._strategy.name} on {None if device is None else device.type}")
        said = [self.ranks, None if self.optimizer is None else list(labelled(self.optimizer)), units]
        aways = {wrapper._unit.is_away for wrapper in self.wrappers}
        if aways == {True}:
            return [said, None]
        if len(aways) > 1:
            raise StateError(f"{_WHAT}: this rank holds shards of only a part of the model: {_WAY_OUT}")
        self.holds = True
        placements = [wrapper._placement for wrapper in self.wrappers]
        over = {rank for one in placements for group in one.groups for rank in ranks_of(group)}
        parts = [one.shards * one.replicas for one in placements]
        return [said, [inner_sizes(self.model), sorted(over | {dist.get_rank()}), parts]]

    def plan_old(self, holders: list[int], extra: Any) -> None:
        """Plan the save of the shards here. ``holders``: the ranks that hold the model."""
        if not self.holds:
            return
        number = holders.index(dist.get_rank())
        self.plan = plan_save(self.model, self.optimizer, extra, number, shares=False)
        self.plan.keep_alone(number, False)
        self.check_held(self.plan.held, self.plan.given)
        self.here = {number: Held(described(self.plan), self.plan.parts)}

    def check_held(self, held: list[Any], given: Given | None) -> None:
        """Raises: StateError if a parameter is in a handle, or a module has its own code for state dicts."""
        for one in held:
            if isinstance(one, InHandle):
                raise StateError(f"{_WHAT}: `{one.name}` is in a handle that is driven by hand: {_WAY_OUT}")
        if given is not None:
            raise StateError(f"{_WHAT}: a module of the model has its own code for state dicts: {_WAY_OUT}")

    def check_units(self) -> None:
        """Raises: StateError naming a unit that is in a pass, has gradients to reduce, or cannot be bound anew."""
        check_idle(self.model, _WHAT)
        if not self.wrappers:
            raise StateError(f"{_WHAT}: the model has no FullyShardedDataParallel")
        check_reduced(self.model, _WHAT)
        for wrapper in self.wrappers:
            name = wrapper._unit.name
            if wrapper._placement.mesh is not None or wrapper._unit.options.extensions:
                raise StateError(f"{_WHAT}: {name} is over a device mesh: {_WAY_OUT}")
            if not wrapper._unit.is_away and not is_placed(wrapper._strategy, wrapper._placement):
                raise StateError(f"{_WHAT}: {name} has a placement of its own: {_WAY_OUT}")
            if any(flat_param.is_deferred for flat_param in wrapper._unit.flat_params):
                raise StateError(f"{_WHAT}: {name} has parameters without values: load or initialize them first")

    def compare(self, said: list[Any]) -> list[Any]:
        """On the first rank: compare all ranks. Returns: ranks that hold the model; size of each unit's inner group."""
        holders = [rank for rank, (_, held) in enumerate(said) if held is not None]
        inner = said[holders[0]][1][0] if holders else []
        for rank, (mine, held) in enumerate(said):
            (ranks, labels, units), first = mine, said[0][0]
            if ranks != first[0]:
                raise CheckpointError(f"rank {rank} resizes to the ranks {ranks}, rank 0 to {first[0]}")
            if labels != first[1]:
                raise CheckpointError(f"rank {rank} gives the optimizers {labels}, rank 0 {first[1]}")
            if units != first[2]:
                raise CheckpointError(f"rank {rank} has units of the strategies {units}, rank 0 of {first[2]}")
            if held is not None and (
                held[0] != inner or not set(held[1]) <= set(holders) or set(held[2]) != {len(holders)}
            ):
                raise CheckpointError(
                    f"rank {rank} has units over the ranks {held[1]}, not each over all of {holders}: {_WAY_OUT}"
                )
        for wrapper, size in zip(self.wrappers, inner, strict=True):
            if is_grid(wrapper._strategy) and len(self.ranks) % size:
                raise CheckpointError(
                    f"{wrapper._unit.name} has inner groups of {size} ranks, and {len(self.ranks)} ranks were given: "
                    f"expected {', '.join(map(str, range(size, len(said) + 1, size)))} of them"
                )
        return [holders, inner]

    def carry_out(self, rendezvous: Rendezvous, here: dict[int, Held], groups: list[dict[str, Any]]) -> Resized:
        """Bind units to their ``groups``, move, commit. ``here``: number of an old rank -> its boxes, on this rank."""
        placements = [
            place(wrapper._strategy, mine).with_host(device_of(wrapper)) if mine else Placement()
            for wrapper, mine in zip(self.wrappers, groups, strict=True)
        ]
        parts = {file: boxes for held in here.values() for file, boxes in held.parts.items()}
        word, told = peers.new_word(), None
        with keeping(self.problems):
            shown = peers.show(parts, word)
            told = None if self.problems else ({number: held.table for number, held in here.items()}, shown)
        everyone = gather_objects(SetupCollective.RESIZES, told, world())
        works = None not in everyone  # else ``agree`` raises the problem of a rank on all
        try:
            ways = rendezvous.agree(lambda: self.bind(everyone, placements) if works else self.raise_first(), together)
            with keeping(self.problems):
                self.compare_units()
            sent = move(self.reading, ways, parts, self.problems)
            rendezvous.agree(self.raise_first, lambda said: None, is_last=True)
            self.commit()
        except BaseException:
            word.zero_()  # if this rank is interrupted after it has agreed, another may read here still
            self.undo()
            raise
        return Resized(sent, None if self.loading is None else self.loading.extra)

    @torch.no_grad()
    def bind(self, everyone: list[Any], placements: list[Placement]) -> list[Any]:
        """Bind the units to the new ranks, and plan what this rank reads. Returns: this rank's entry for ``together``.

        ``everyone``: by rank the tables of the old ranks, and what it has shown. After an exception the
        caller calls ``undo``.
        """
        told = {i: (table, rank) for rank, (tables, _) in enumerate(everyone) for i, table in tables.items()}
        source = Pieces([told[i] for i in sorted(told)], dist.get_rank())
        holds = dist.get_rank() in self.ranks
        kept = [(one.owner, one.owner.detach().clone()) for one in self.plan.held if not one.is_managed]
        self._undo.append(functools.partial(_restore, kept))
        for one in labelled(self.optimizer).values() if self.optimizer is not None else ():
            state = one.state
            self._undo += [functools.partial(state.update, dict(state)), state.clear]  # the last comes first
            state.clear()
        for wrapper, placement in zip(self.wrappers, placements, strict=True):
            self._undo.append(functools.partial(setattr, wrapper, "_placement", wrapper._placement))
            self._replaced.append(wrapper._unit.core)
            self._undo.append(wrapper._unit.bind(placement, holds))
            wrapper._placement = placement
            if wrapper._in_full:
                wrapper._unit.core.compute_in_full(True)
        if holds:
            self.loading = Loading(self.model, self.optimizer, self.ranks.index(dist.get_rank()), len(self.ranks))
            self.loading.prepare_from(source)
            self.describe_units()
        reads = [] if self.loading is None else self.loading.reads
        self.reading = Reading(source, reads, [shown for _, shown in everyone])
        return self.reading.told()

    def describe_units(self) -> None:
        """Describe the units for ``compare_units``, by their groups.

        Units over the same groups are compared at once: with 33 units an exchange for each took a sixth of the time.
        """
        paths = {wrapper: path for path, wrapper in self.model.named_modules()}
        for wrapper in self.wrappers:
            unit = wrapper._unit
            # unit.name has the path from the first forward on, which a new process has not run
            name = f"the unit of {type(unit.module).__name__} at `{paths[wrapper]}`"
            settings, *params = describe_unit(name, unit.originals, unit.options)
            described = [settings, *((f"{param} in {name}", properties) for param, properties in params)]
            placement = unit.options.placement
            inner = placement.param if placement.has_secondary_shard else None
            self._described.setdefault((tuple(placement.compared), inner), []).append((wrapper, described))

    def compare_units(self) -> None:
        """Compare the units over the new ranks, and take their ids there. A collective call of these ranks."""
        for (groups, inner), found in self._described.items():
            said = [entry for _, described in found for entry in described]
            numbers = check_same_unit(said, list(groups), inner, dict, ("", "")).numbers
            for i, (wrapper, _) in enumerate(found):
                self._numbers[wrapper] = {ids: ids.of_built() for ids in numbers} if i else numbers

    def commit(self) -> None:
        """Finish the load, and drop the old shards."""
        self._undo.clear()
        for core in self._replaced:
            core.retire()
        for wrapper, numbers in self._numbers.items():
            assign(wrapper._unit, numbers)
        if self.loading is not None:
            self.loading.finish()

    def raise_first(self) -> None:
        """Raise the first of ``problems``, and forget them: their tracebacks refer to this object."""
        problems, self.problems = self.problems[:1], []
        while problems:
            raise problems.pop()

    def undo(self) -> None:
        """Bind all units and states as they were. Does nothing once ``commit`` has begun."""
        if self.loading is not None:
            self.loading.undo()
        while self._undo:
            self._undo.pop()()


def _restore(kept: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, value in kept:
        tensor.detach().copy_(value)
