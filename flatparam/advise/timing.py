"""Predict the time of a step by a model of latency and bandwidth. It has not been fitted to any machine.

A collective over n ranks is a ring: it takes n - 1 steps of a latency, and (n - 1) / n of its bytes at the bandwidth of
the slowest link; an all-reduce takes both twice. Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005, section 4; the factors are those of the bus bandwidth that nccl-tests print
(their PERFORMANCE.md). Where a group spans nodes, the ring leaves each node once, so as many of the steps have the
latency between nodes as there are nodes, less one: as in NCCL's own model, ``src/graph/tuning.cc``, whose figures for
its Simple protocol are the latencies assumed.

Each rank has its own network card, and there is a ring for each card, so a group of k ranks in each of several nodes
sends 1 / k of its bytes between nodes and the rest within, both at once.

Compute: 2 operations an element and token in forward, 4 in backward (2 if frozen), so 6 in all (Kaplan et al., "Scaling
Laws for Neural Language Models", 2020, section 2.1), at a constant rate. The products of attention, recomputing and the
optimizer are not in it, and an embedding counts as if it were multiplied.

Overlap: one collective at a time, beside the compute. A unit's gather is asked for as the unit before begins to
compute, its reduction as its backward has ended. The root is gathered first and computes last in forward and first in
backward; it is reduced last.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..fsdp.unit.memory_plan import UnitPlan
from ..inspect.planning import Settings, Unit
from .traffic import MicroBatch, Transfer, parts_of, sent


@dataclass(frozen=True)
class Cluster:
    """The machine. ``node``: the number of ranks of a node; they are successive.

    ``intra``, ``inter``: bytes that a rank sends in a second, within its node and between nodes. ``intra_latency``,
    ``inter_latency``: seconds.
    """

    node: int
    intra: float
    inter: float
    intra_latency: float
    inter_latency: float

    def shape(self, group: str, settings: Settings) -> tuple[int, int]:
        """Return the number of ranks of a group, and the number of them in one node.

        An inner group has successive ranks. Its size divides ``node`` or is a multiple of it.
        """
        ranks = settings.sizes[group]
        stride = settings.sizes["inner"] if group == "outer" else 1
        return ranks, min(ranks, max(1, self.node // stride))

    def split(self, size: float, group: str, settings: Settings) -> tuple[float, float]:
        """Return ``size``, the bytes that a rank sends to a group, in two parts: within its node, and out of it."""
        ranks, local = self.shape(group, settings)
        out = size / local if ranks > local else 0.0
        return size - out, out

    def seconds(self, transfer: Transfer, settings: Settings) -> float:
        """Return the seconds of a collective without others beside it."""
        ranks, local = self.shape(transfer.group, settings)
        inside, out = self.split(sent(transfer, ranks), transfer.group, settings)
        hops = ranks // local - 1
        latency = (ranks - 1 - hops) * self.intra_latency + hops * self.inter_latency
        rounds = 2 if transfer.kind == "all_reduce" else 1
        return rounds * latency + max(inside / self.intra, out / self.inter)


class Load(NamedTuple):
    """Seconds of one unit in one micro-batch: compute, and collectives before and after it."""

    forward: float
    backward: float
    gather: float
    gather_again: float
    reduction: float


def operations(unit: Unit) -> tuple[int, int]:
    """Return the operations of forward and of backward for one token."""
    sizes = [(sum(flat.layout.numels), flat.is_trained) for flat in unit.flats]
    return sum(2 * n for n, _ in sizes), sum((4 if trained else 2) * n for n, trained in sizes)


def seconds_of(loads: Sequence[Load]) -> float:
    """Return the seconds of a forward and backward. The first of ``loads`` is the root."""
    root, *others = loads
    link = 0.0  # the time at which the collectives so far have ended

    def ask(when: float, seconds: float) -> float:
        """Issue a collective of ``seconds`` at time ``when``. Returns: the time of its end; 0 if ``seconds`` is 0."""
        nonlocal link
        link = max(link, when) + seconds if seconds else link
        return link if seconds else 0.0

    begin, done = 0.0, ask(0.0, root.gather)
    for load in others:
        there = ask(begin, load.gather)
        begin = max(done, there)
        done = begin + load.forward
    begin = done + root.forward
    done = begin + root.backward
    ahead = [load.gather_again for load in reversed(others)]
    there = ask(begin, ahead[0]) if others else 0.0
    for load, next_gather in zip(reversed(others), [*ahead[1:], 0.0], strict=False):
        begin = max(done, there)
        there = ask(begin, next_gather)
        done = begin + load.backward
        ask(done, load.reduction)
    ask(done, root.reduction)
    return max(link, done)


def step_seconds(
    units: Sequence[Unit],
    plans: Sequence[UnitPlan],
    settings: Settings,
    cluster: Cluster,
    step: Iterable[MicroBatch],
    forward_of_one: float,
) -> tuple[float, float]:
    """Return the seconds of a step, and of its compute alone.

    ``forward_of_one``: tokens of a micro-batch, divided by operations in a second.
    """

    def collectives(transfers: Iterable[Transfer]) -> float:
        return sum(cluster.seconds(one, settings) for one in transfers)

    total = computing = 0.0
    work = [tuple(forward_of_one * number for number in operations(unit)) for unit in units]
    for micro_batch in step:
        parts = parts_of(plans, settings, micro_batch)
        times = {part: tuple(map(collectives, part)) for part in set(parts)}
        loads = [Load(*own, *times[part]) for own, part in zip(work, parts, strict=True)]
        total += micro_batch.times * seconds_of(loads)
        computing += micro_batch.times * sum(map(sum, work))
    return total, computing
