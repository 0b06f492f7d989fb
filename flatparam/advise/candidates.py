"""The candidates: combinations of strategy, inner group, units and micro-batches, each with its memory and time.

``cli.py`` asks for them. Models are on the meta device. No process group is needed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import nn

from .. import _C
from ..fsdp.sharding.placement import is_grid
from ..fsdp.unit.memory_plan import MemoryPlan
from ..inspect.planning import SUPPORTED, BadInput, Settings, Unit, dtypes_of, plan_of, units_of
from .timing import Cluster, step_seconds
from .traffic import micro_batches, sent_in_a_step

MOST_TOGETHER = 8
NO_UNITS = (nn.ModuleList, nn.ModuleDict)  # containers without a forward of their own


class Together(nn.Sequential):
    """A run of modules in one unit."""


class Boundary(NamedTuple):
    """The choice of units. ``wrap``: classes whose modules become units; empty: the whole model is one unit.

    ``together``: the number of successive modules in one unit.
    """

    wrap: tuple[str, ...]
    together: int = 1

    @property
    def name(self) -> str:
        each = "" if self.together == 1 else f"{self.together} x "
        return each + ", ".join(self.wrap) if self.wrap else "whole model"


@dataclass(frozen=True)
class Question:
    """The options of the command, checked.

    - ``settings``: what all candidates have in common.
    - ``gpu_memory``: bytes that a rank may use.
    - ``tokens``: tokens of a rank in one step.
    - ``flops``: operations a rank does in a second.
    - ``activations``: bytes of activations that a token keeps from forward to backward; None: they are not counted.
    - ``strategies``, ``micro_batches``: the values to try. ``inner`` (sizes of inner groups), ``wrap`` (classes): the
      same; empty: all that are possible.
    """

    settings: Settings
    gpu_memory: int
    cluster: Cluster
    tokens: int
    flops: float
    activations: int | None
    strategies: tuple[str, ...] = tuple(SUPPORTED)
    inner: tuple[int, ...] = ()
    wrap: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Candidate:
    """One combination, with the bytes and seconds of a rank in one step.

    - ``inner``: size of the inner group; None: the strategy has none.
    - ``compute_dtypes``, ``reduce_dtypes``: of forward and backward, and of the gradients while they are reduced.
    - ``reduce_each``: every micro-batch reduces its gradients; else the last one alone, after ``no_sync()``.
    - ``sent``: bytes by (kind of collective, group). ``intra`` of them stay in the node, ``inter`` leave it.
    - ``seconds``: of the step; ``computing``: of its compute alone.
    """

    strategy: str
    inner: int | None
    boundary: Boundary
    compute_dtypes: tuple[torch.dtype, ...]
    reduce_dtypes: tuple[torch.dtype, ...]
    micro_batches: int
    reduce_each: bool
    plan: MemoryPlan
    activations: int
    sent: dict[tuple[str, str], float]
    intra: float
    inter: float
    seconds: float
    computing: float

    @property
    def peak(self) -> int:
        """The peak of parameters, gradients and optimizer state on a rank, in bytes."""
        if self.micro_batches == 1:
            return self.plan.peak_alone
        return self.plan.peak if self.reduce_each else self.plan.peak_no_sync

    @property
    def memory(self) -> int:
        """``peak`` and the activations, in bytes."""
        return self.peak + self.activations


def boundaries(module: nn.Module, wrap: tuple[str, ...]) -> list[Boundary]:
    """Return the choices of units: the whole model, each repeated class, and runs of 2, 4 or 8 modules of such a class.

    A repeated class has at least two modules, and these have at least half of the elements. With ``wrap`` only its
    classes are used.
    """
    found = [Boundary(wrap)] if wrap else [Boundary(()), *(Boundary((name,)) for name in _repeated(module))]
    for (name,) in [one.wrap for one in found if len(one.wrap) == 1]:
        longest = max((len(run) for _, runs in _lists(module, name) for is_it, run in runs if is_it), default=0)
        sizes = (k for k in (2, 4, MOST_TOGETHER) if 2 * k <= longest)
        found += [Boundary((name,), k) for k in sizes]
    return found


def _repeated(module: nn.Module) -> list[str]:
    numels: dict[str, list[int]] = {}
    for inner in module.modules():
        leaf = not any(True for _ in inner.children())
        if inner is module or isinstance(inner, NO_UNITS) or (leaf and type(inner).__module__.startswith("torch.nn")):
            continue
        numels.setdefault(type(inner).__name__, []).append(sum(param.numel() for param in inner.parameters()))
    half = sum(param.numel() for param in module.parameters()) / 2
    return [name for name, sizes in numels.items() if len(sizes) > 1 and sum(sizes) >= half]


Runs = list[tuple[bool, list[nn.Module]]]  # (are of the class, successive children)


def _lists(module: nn.Module, name: str) -> Iterator[tuple[nn.Module, Runs]]:
    """Yield ``(list, its runs)`` for each ModuleList or Sequential that contains modules of class ``name``."""
    for parent in list(module.modules()):
        if isinstance(parent, (nn.ModuleList, nn.Sequential)):
            grouped = groupby(parent.children(), lambda child: type(child).__name__ == name)
            runs = [(is_it, list(run)) for is_it, run in grouped]
            if any(is_it for is_it, _ in runs):
                yield parent, runs


def put_together(module: nn.Module, boundary: Boundary) -> _C.Block:
    """Return a context in which each run of ``boundary.together`` modules is one. It gives the classes of units."""
    before: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []

    def begin() -> tuple[str, ...]:
        if boundary.together == 1:
            return boundary.wrap
        for parent, runs in list(_lists(module, boundary.wrap[0])):
            before.append((parent, dict(parent._modules)))
            children = [child for is_it, run in runs for child in (_cut(run, boundary.together) if is_it else run)]
            parent._modules.clear()
            parent._modules.update((str(i), child) for i, child in enumerate(children))
        return (f"{Together.__module__}.{Together.__qualname__}",)

    def end() -> None:
        for parent, modules in before:
            parent._modules.clear()
            parent._modules.update(modules)

    return _C.Block(begin, end)


def _cut(run: Sequence[nn.Module], size: int) -> list[nn.Module]:
    return [Together(*run[i : i + size]) for i in range(0, len(run), size)]


def inner_sizes(world: int, node: int) -> list[int]:
    """Return the possible sizes of inner groups: divisors of ``world`` that divide ``node`` or are a multiple of it."""
    small = [n for n in range(1, math.isqrt(world) + 1) if world % n == 0]
    divisors = sorted({*small, *(world // n for n in small)})
    return [n for n in divisors[1:-1] if node % n == 0 or n % node == 0]


def candidates(module: nn.Module, question: Question) -> Iterator[Candidate]:
    """Yield all candidates. Raises: the first BadInput, if no choice of units is possible."""
    refused: BadInput | None = None
    made = False
    for boundary in boundaries(module, question.wrap):
        known: dict[tuple[int, bool], list[Unit]] = {}
        with put_together(module, boundary) as wrap:
            for settings in _settings(question, wrap):
                key = settings.shards, settings.row.full_precision
                try:
                    if key not in known:
                        known[key] = units_of(module, settings)
                except BadInput as error:
                    refused = refused or error
                    continue
                made = True
                yield from _micro_batches(known[key], settings, boundary, question)
    if refused is not None and not made:
        raise refused


def _settings(question: Question, wrap: tuple[str, ...]) -> Iterator[Settings]:
    world, node = question.settings.world_size, question.cluster.node
    sizes = inner_sizes(world, node)
    for n in question.inner:
        if n not in sizes:
            raise BadInput(f"--inner must divide {world} ranks, and divide or be nodes of {node}: {sizes}, got {n}")
    inner = question.inner or sizes
    for name in question.strategies:
        for size in inner if is_grid(SUPPORTED[name]) else [None]:
            yield replace(question.settings, wrap=wrap, strategy=SUPPORTED[name], shard_size=size)


def _micro_batches(
    units: list[Unit], settings: Settings, boundary: Boundary, question: Question
) -> Iterator[Candidate]:
    plan = plan_of(units, settings)
    compute_dtypes, reduce_dtypes = dtypes_of(units)
    for count in question.micro_batches:
        tokens = -(-question.tokens // count)
        for reduce_each in (False, True) if count > 1 else (False,):
            step = list(micro_batches(count, reduce_each))
            by_group = sent_in_a_step(plan.units, settings, step)
            links = [question.cluster.split(size, group, settings) for (_, group), size in by_group.items()]
            forward = tokens / question.flops
            seconds, computing = step_seconds(units, plan.units, settings, question.cluster, step, forward)
            yield Candidate(
                strategy=settings.strategy.name,
                inner=settings.shard_size,
                boundary=boundary,
                compute_dtypes=compute_dtypes,
                reduce_dtypes=reduce_dtypes,
                micro_batches=count,
                reduce_each=reduce_each,
                plan=plan,
                activations=(question.activations or 0) * tokens,
                sent=by_group,
                intra=sum(inside for inside, _ in links),
                inter=sum(out for _, out in links),
                seconds=seconds,
                computing=computing,
            )
