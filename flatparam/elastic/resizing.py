"""``resize``: bind a model in place to other ranks of the world, and move its training state to them.

| step | done by | after a failure |
|---|---|---|
| plan: list the boxes of the old shards, as a save does | ranks that hold the model | nothing has changed |
| bind units to the new ranks, plan the reads, as a load does | ranks that will hold it | bound as before |
| move the bytes | all ranks | bound as before |
| commit: tell units, set the optimizers' states | ranks that will hold it | an error says so |

The old shards stay in memory until the commit.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from ..checkpoint.errors import CheckpointError
from ..checkpoint.loading import Loading
from ..checkpoint.modules import given_by
from ..checkpoint.optimizers import labelled
from ..checkpoint.pieces import InHandle
from ..checkpoint.planning import SavePlan, check_idle, plan_save
from ..checkpoint.rendezvous import Rendezvous
from ..common.torch_private import FakeProcessGroup
from ..fsdp.api import ShardingStrategy as S
from ..fsdp.desync.checked_collectives import gather_objects
from ..fsdp.desync.events import SetupCollective
from ..fsdp.desync.same_unit import Agreed, check_same_unit
from ..fsdp.desync.unit_ids import assign
from ..fsdp.errors import StateError
from ..fsdp.sharding.placement import Placement, place
from ..fsdp.sharding.unit_description import describe_unit
from ..fsdp.unit.base import Wrapper
from ..fsdp.unit.summon import refuse_unreduced
from .transport import Held, Pieces, described, move

_WHAT = "elastic.resize"
_WAY_OUT = "save a checkpoint, build the model on the other ranks, and load it there"
_CAN = (S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD, S.ZERO_1)


@dataclass
class Resized:
    """The result of ``resize``. ``sent``: bytes that this rank has sent.

    ``extra``: the one that the ``rank % old size``-th of the old ranks gave; None on a rank that holds nothing now.
    """

    sent: int
    extra: Any = None


def resize(model: nn.Module, optimizer: Any, ranks: Sequence[int], *, extra: Any = None) -> Resized:
    """Let ``ranks`` of the world hold ``model`` from now on. Parameters and optimizers stay the same objects.

    All ranks of the world must call it between steps, each with the same model. A rank that is not in ``ranks`` gives
    up its shards and optimizer states: its model raises StateError until a later call names the rank again.

    Args:
        model: wrapped, with a strategy over one group.
        optimizer: one, or a list or dict of several; None: none.
        ranks: ranks of the world, in ascending order.
        extra: this rank's own values, as in ``checkpoint.save``.

    Raises:
        CheckpointError, StateError: on every rank, naming the rank and the unit or parameter. Model and optimizer are
            as before, unless a module's ``set_extra_state`` raises, which is called last.
    """
    moving = _Moving(model, optimizer, list(ranks))
    rendezvous = Rendezvous(None, SetupCollective.RESIZES, model)
    holders = rendezvous.agree(lambda: moving.plan_old(extra), moving.compare)
    group = _group_of(list(ranks))
    here = {holders.index(dist.get_rank()): Held(described(moving.plan), moving.plan.parts)} if moving.holds else {}
    return moving.carry_out(rendezvous, here, group)


def check_model(model: nn.Module) -> None:
    """Raises: StateError naming a unit that cannot be bound to other ranks."""
    _Moving(model, None, []).check_units()


def leave(model: nn.Module) -> None:
    """Bind the units of ``model`` to no ranks, and drop their values. Not a collective call; also after a failure."""
    for wrapper in (inner for inner in model.modules() if isinstance(inner, Wrapper)):
        wrapper._forget_interrupted()
        wrapper._unit.bind(Placement(), False)
        wrapper._placement = Placement()


def enter(model: nn.Module, optimizer: Any, here: dict[int, Held]) -> Any:
    """Bind a model that has left its ranks to all ranks of the world, with the state that the ranks hold.

    All ranks of the world must call it. ``here``: the number of an old rank -> its boxes, on this rank.
    Returns: the ``extra`` of the ``rank % old size``-th of the old ranks. Raises: as ``resize``; then call ``leave``.
    """
    moving = _Moving(model, optimizer, list(range(_world().size())))
    return moving.carry_out(Rendezvous(None, SetupCollective.RESIZES, model), here, _world()).extra


def _world() -> Any:
    return dist.group.WORLD


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


def _group_of(ranks: list[int]) -> Any:
    """Return the group of ``ranks``, one for each list: the world itself, or a new one. A collective call."""
    world = _world()
    known = _groups.setdefault(world, {tuple(range(world.size())): world})
    if tuple(ranks) not in known:
        known[tuple(ranks)] = dist.new_group(ranks)
    return known[tuple(ranks)]


class _Moving:
    """One call on this rank. ``plan``: the boxes that it holds; ``loading``: the plan of its reads, None without."""

    source: Pieces

    def __init__(self, model: nn.Module, optimizer: Any, ranks: list[int]):
        self.model, self.optimizer, self.ranks = model, optimizer, ranks
        self.wrappers = [inner for inner in model.modules() if isinstance(inner, Wrapper)]
        self.plan, self.holds = SavePlan(), False
        self._undo: list[Callable[[], None]] = []
        self._agreed: list[Agreed] = []
        self.loading: Loading | None = None

    def plan_old(self, extra: Any) -> list[Any]:
        """Check the call, and plan the save of the shards here. Returns: for ``compare``."""
        world = _world()
        if isinstance(world, FakeProcessGroup):
            raise StateError(f"{_WHAT}: the world is a fake one, without other ranks")
        if (
            self.ranks != sorted(set(self.ranks))
            or not self.ranks
            or not 0 <= self.ranks[0] <= self.ranks[-1] < world.size()
        ):
            raise CheckpointError(f"expected ascending ranks from 0 to {world.size() - 1}, got {self.ranks}")
        self.check_units()
        labels = None if self.optimizer is None else list(labelled(self.optimizer))
        aways = {wrapper._unit.is_away for wrapper in self.wrappers}
        if aways == {True}:
            return [self.ranks, None, labels]
        self.holds = True
        held_by = {tuple(dist.get_process_group_ranks(wrapper.process_group)) for wrapper in self.wrappers}
        if len(held_by) > 1 or len(aways) > 1:
            raise StateError(f"{_WHAT}: the units of the model are over different ranks, {sorted(held_by)}: {_WAY_OUT}")
        [holders] = held_by
        self.plan = plan_save(self.model, self.optimizer, extra, holders.index(dist.get_rank()), shares=False)
        self.plan.keep_alone(holders.index(dist.get_rank()), False)
        for held in self.plan.held:
            if isinstance(held, InHandle):
                raise StateError(f"{_WHAT}: `{held.name}` is in a handle that is driven by hand: {_WAY_OUT}")
        if given_by(self.model, self.plan.held) is not None:
            raise StateError(f"{_WHAT}: a module of the model has its own code for state dicts: {_WAY_OUT}")
        return [self.ranks, list(holders), labels]

    def check_units(self) -> None:
        check_idle(self.model, _WHAT)
        if not self.wrappers:
            raise StateError(f"{_WHAT}: the model has no FullyShardedDataParallel")
        for wrapper in self.wrappers:
            name = wrapper._unit.name
            if wrapper._strategy not in _CAN:
                raise StateError(f"{_WHAT}: {name} has the strategy {wrapper._strategy.name}: {_WAY_OUT}")
            if wrapper._placement.mesh is not None or wrapper._unit.options.extensions:
                raise StateError(f"{_WHAT}: {name} is over a device mesh: {_WAY_OUT}")
            for flat_param in wrapper._unit.flat_params:
                if flat_param.device.type != "cpu":
                    raise StateError(
                        f"{_WHAT}: {name} is on {flat_param.device}, and only the CPU is supported: {_WAY_OUT}"
                    )
                if flat_param.is_deferred:
                    raise StateError(f"{_WHAT}: {name} has parameters without values: load or initialize them first")
        refuse_unreduced([wrapper._unit for wrapper in self.wrappers], _WHAT)

    def compare(self, said: list[list[Any]]) -> list[int]:
        """On the first rank: compare the ranks' arguments. Returns: the ranks that hold the model."""
        holders: list[int] = next((found for _, found, _ in said if found is not None), [])
        for rank, (ranks, found, labels) in enumerate(said):
            if ranks != said[0][0]:
                raise CheckpointError(f"rank {rank} resizes to the ranks {ranks}, rank 0 to {said[0][0]}")
            if labels != said[0][2]:
                raise CheckpointError(f"rank {rank} gives the optimizers {labels}, rank 0 {said[0][2]}")
            if found != (holders if rank in holders else None):
                raise CheckpointError(f"rank {rank} says that the model is on the ranks {found}, not on {holders}")
        return holders

    def carry_out(self, rendezvous: Rendezvous, here: dict[int, Held], group: Any) -> Resized:
        """Bind to ``group``, move, commit. ``here``: number of an old rank -> its boxes, on this rank."""
        told: dict[int, Any] = {}
        at: dict[int, int] = {}
        tables = {number: held.table for number, held in here.items()}
        for rank, theirs in enumerate(gather_objects(SetupCollective.RESIZES, tables, _world())):
            told |= theirs
            at |= dict.fromkeys(theirs, rank)
        parts = {file: boxes for held in here.values() for file, boxes in held.parts.items()}
        try:
            rendezvous.agree(lambda: self.bind([(told[i], at[i]) for i in sorted(told)], group), lambda said: None)
            rendezvous.agree(self.compare_units, lambda said: None)
            sent = move(self.source, self.reads, parts)
            rendezvous.agree(lambda: None, lambda said: None, is_last=True)
        except BaseException:
            self.undo()
            raise
        self.commit()
        return Resized(sent, None if self.loading is None else self.loading.extra)

    @torch.no_grad()
    def bind(self, told: list[Any], group: Any) -> None:
        """Bind the units to the new ranks, and plan what this rank reads. Raises: the caller then calls ``undo``."""
        self.source = Pieces(told, dist.get_rank())
        holds = dist.get_rank() in self.ranks
        kept = [(one.owner, one.owner.detach().clone()) for one in self.plan.held if not one.is_managed]
        self._undo.append(functools.partial(_restore, kept))
        for one in labelled(self.optimizer).values() if self.optimizer is not None else ():
            self._undo.append(_take_state(one))
        for wrapper in self.wrappers:
            placement = place(wrapper._strategy, {"wide": group}) if holds else Placement()
            self._undo.append(wrapper._unit.bind(placement, holds))
            self._undo.append(_set_placement(wrapper, placement))
            if wrapper._in_full:
                wrapper._unit.core.compute_in_full(True)
        if holds:
            self.loading = Loading(self.model, self.optimizer, *(group.rank(), group.size()))
            self.loading.prepare_from(self.source)

    def compare_units(self) -> None:
        """Compare each unit over the new ranks, which gives it its ids there. A collective call of these ranks."""
        for wrapper in self.wrappers if self.loading is not None else ():
            unit = wrapper._unit
            originals = [original for flat_param in unit.flat_params for original in flat_param.originals]
            described = describe_unit(unit.name, originals, unit.options)
            self._agreed.append(
                check_same_unit(described, unit.options.placement.compared, None, dict, (unit.name, ""))
            )

    @property
    def reads(self) -> list[Any]:
        return [] if self.loading is None else self.loading.reads

    def commit(self) -> None:
        """Finish the load, and drop the old shards."""
        self._undo.clear()
        for wrapper, agreed in zip(self.wrappers, self._agreed, strict=False):
            assign(wrapper._unit, agreed.numbers)
        if self.loading is not None:
            self.loading.finish()

    def undo(self) -> None:
        """Bind all units and states as they were. Nothing, once ``commit`` has begun."""
        if self.loading is not None:
            self.loading.undo()
        while self._undo:
            self._undo.pop()()


def _restore(kept: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, value in kept:
        tensor.detach().copy_(value)


def _take_state(optimizer: Any) -> Callable[[], None]:
    """Empty the state of ``optimizer``. Return a function that restores it."""
    before = dict(optimizer.state)
    optimizer.state.clear()

    def undo() -> None:
        optimizer.state.clear()
        optimizer.state.update(before)

    return undo


def _set_placement(wrapper: Wrapper, placement: Placement) -> Callable[[], None]:
    before = wrapper._placement
    wrapper._placement = placement

    def undo() -> None:
        wrapper._placement = before

    return undo
