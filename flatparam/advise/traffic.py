"""The collectives of a step, by the rules of the runtime, and the bytes that a rank sends in them.

The consensus of ZERO_1 and LAYER_ZERO, a few bytes a unit once or twice in a backward, is not counted.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..fsdp.unit.memory_plan import UnitPlan
from ..inspect.planning import Settings


class Transfer(NamedTuple):
    """One collective. ``kind``: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.

    ``group``: a name of the table of strategies; ``whole``: bytes of the gathered result, or of the reduced input.
    """

    kind: str
    group: str
    whole: int


class Part(NamedTuple):
    """The collectives of one unit in a micro-batch: before forward, before backward, and after backward."""

    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]
    reduction: tuple[Transfer, ...]


class MicroBatch(NamedTuple):
    """``times`` micro-batches with equal collectives.

    ``first``: the shards have changed before it; ``synced``: it reduces gradients.
    """

    first: bool
    synced: bool
    times: int


def micro_batches(count: int, reduce_each: bool) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a step: all but the last in ``no_sync()``, or, with ``reduce_each``, each synced.

    A synced micro-batch changes the shards, so the next one gathers again.
    """
    if reduce_each or count == 1:
        yield MicroBatch(True, True, count)
        return
    yield MicroBatch(True, False, 1)
    if count > 2:
        yield MicroBatch(False, False, count - 2)
    yield MicroBatch(False, True, 1)


def parts_of(plans: Sequence[UnitPlan], settings: Settings, micro_batch: MicroBatch) -> list[Part]:
    """Return the collectives of each unit. The first is the root, which stays unsharded from forward to backward."""
    known: dict[tuple[int, int, bool], Part] = {}  # large models have many equal units
    keys = [(plan.full, plan.wire, plan is plans[0]) for plan in plans]
    for key, plan in zip(keys, plans, strict=True):
        if key not in known:
            known[key] = _part(plan, settings, plan is plans[0], micro_batch)
    return [known[key] for key in keys]


def _part(plan: UnitPlan, settings: Settings, root: bool, micro_batch: MicroBatch) -> Part:
    row, sizes = settings.row, settings.sizes
    forward: list[Transfer] = []
    # Frozen shards do not change: a secondary shard, or the whole parameter, is gathered before the first step alone
    first = micro_batch.first and (plan.wire > 0 or row.param == row.optim)
    reductions = tuple(_reductions(plan, settings, micro_batch.synced))
    if row.param is None:
        if row.optim is not None and first:  # the shards of ZERO_1 have changed
            forward.append(Transfer("all_gather", row.optim, plan.full))
        return Part(tuple(forward), (), reductions)
    again = Transfer("all_gather", row.param, plan.full)
    if row.nested:
        forward += [Transfer("all_gather", "outer", plan.full // sizes[row.param])] if first else []
        forward.append(again)
    elif first or plan.resharded:
        forward.append(again._replace(group=row.optim or row.param) if first else again)
    return Part(tuple(forward), (again,) if plan.resharded and not root else (), reductions)


def _reductions(plan: UnitPlan, settings: Settings, synced: bool) -> Iterator[Transfer]:
    row = settings.row
    if not plan.wire:  # all its parameters are frozen
        return
    if row.nested and row.param is not None:
        yield Transfer("reduce_scatter", row.param, plan.wire)
        if synced:
            yield Transfer("reduce_scatter", "outer", plan.wire // settings.sizes[row.param])
    elif synced:
        if row.grad is not None:
            yield Transfer("reduce_scatter", row.grad, plan.wire)
        if row.replicate is not None:
            yield Transfer("all_reduce", row.replicate, plan.wire // settings.shards)


def sent(transfer: Transfer, ranks: int) -> float:
    """Return the bytes that each of n ``ranks`` sends on a ring: (n - 1) / n of the whole, twice for an all-reduce."""
    return (2 if transfer.kind == "all_reduce" else 1) * (ranks - 1) * transfer.whole / ranks


def sent_in_a_step(
    plans: Sequence[UnitPlan], settings: Settings, step: Iterable[MicroBatch]
) -> dict[tuple[str, str], float]:
    """Return the bytes that a rank sends in a step, by (kind of collective, group)."""
    total: dict[tuple[str, str], float] = {}
    for micro_batch in step:
        for part, units in Counter(parts_of(plans, settings, micro_batch)).items():
            for one in itertools.chain(*part):
                key, size = (one.kind, one.group), sent(one, settings.sizes[one.group])
                total[key] = total.get(key, 0) + micro_batch.times * units * size
    return total
