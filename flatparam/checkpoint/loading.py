"""``load``: each rank reads the bytes that overlap its shards. No parameter changes before all ranks have checked all.

| step | done by | after a failure |
|---|---|---|
| plan: open files, compare names, shapes, dtypes; modules with their own code load buffers | each rank | restored |
| check: read the bytes of this rank and compare checksums | each rank | restored |
| agree: the same checkpoint on all ranks, no error on any | through the store | restored on all ranks |
| commit: read into shards, states and gradients | each rank | loaded in part, and the error says so |
"""

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..common.warned import warn_here
from ..fsdp.desync.events import SetupCollective
from .base import check_sums, sums_of_samples
from .boxes import forget_cuts
from .errors import CheckpointError, names_that_differ, naming_checkpoint
from .exporting import open_source
from .files import Chunk
from .gradients import Sums
from .index import Index
from .model_plan import ModelPlan
from .modules import values_of_modules
from .optimizer_plan import Convert, OptimizerPlan
from .optimizers import Named
from .pieces import all_held
from .planning import check_idle
from .progress import Meter, Summary, note_newest
from .reading import Checkpoint, OfRank, Source, check_reads, refuse_not_finite
from .rendezvous import Rendezvous
from .values import decode


@dataclass
class Loaded:
    """The result of ``load``.

    ``world_size``: the number of ranks that saved; None: not a checkpoint of flatparam. ``extra``: the one that rank
    ``rank % world_size`` saved. ``missing``, ``unexpected``: names, if the load was not strict. ``base``: names that a
    save with ``trainable_only`` left out; they keep the model's values.
    """

    summary: Summary
    extra: Any = None
    world_size: int | None = None
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    base: list[str] = field(default_factory=list)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    strict: bool = True,
    convert: Mapping[str, str] | None = None,
    check_finite: bool = False,
    trusted: bool = False,
    process_group: dist.ProcessGroup | None = None,
    progress: bool = False,
) -> Loaded:
    """Load a checkpoint into ``model`` and ``optimizer``. Ranks, strategy and units may differ from the save's.

    All ranks of ``process_group`` must call it. Each rank first checks names, shapes, dtypes, and the checksums of all
    bytes that it will read. When all ranks have checked, each reads into its shards. With ``optimizer``, ``.grad`` gets
    the checkpoint's gradients, or None.

    Args:
        path: a checkpoint of flatparam; a folder of torch's distributed checkpoint; a safetensors file, or an index.
        model: wrapped or plain, the same on all ranks.
        optimizer: one, or a list or dict of several, with the labels of the save.
        strict: the checkpoint must have every name of the model and of the optimizer, and no other. False: those that
            both have are loaded. A group of the optimizer of which nothing was saved keeps its settings.
        convert: for an optimizer of another class than the saved one: maps keys of the saved state to keys here. Other
            keys are dropped, and the groups keep their settings. ``{}``: the state starts anew.
        check_finite: refuse NaN and infinities.
        trusted: allow torch's ``.metadata``, a pickle that can run code.
        process_group: the ranks that hold the model; None: the world.
        progress: show a bar on rank 0.

    Raises:
        CheckpointError: on every rank, naming rank, file and tensor. Model and optimizer are as before, unless a read
            fails after all checks or a ``set_extra_state`` raises: then it says that the model is loaded in part.
    """
    rendezvous = Rendezvous(process_group, SetupCollective.LOADS_CHECKPOINT, model)
    meter = Meter(f"load {path}", progress and rendezvous.is_first)
    loading = Loading(model, optimizer, rendezvous.rank, rendezvous.size)

    @torch.inference_mode(False)
    def prepare() -> list[Any]:
        loading.path = Path(os.path.abspath(path))
        check_idle(model, "checkpoint.load")
        return loading.prepare_from(open_source(loading.path, trusted), strict, check_finite, convert, meter)

    try:
        rendezvous.agree(prepare, loading.compare)
        read = rendezvous.agree(loading.carry_out, sum, is_last=True)
    finally:
        loading.close()
        seconds = meter.close()
    note_newest(model, str(loading.path))
    index = loading.index
    if loading.rounded and rendezvous.is_first:
        name, stored, dtype = loading.rounded[0]
        warn_here(
            f"{path}: {len(loading.rounded)} tensors were rounded to the model's dtype: `{name}` is {stored} there, "
            f"and {dtype} here"
        )
    for why in loading.targets.without_state if loading.targets is not None and rendezvous.is_first else ():
        warn_here(f"{path}: the optimizer's state in the checkpoint {why}")
    summary = Summary(str(loading.path), index.id if index else None, read, loading.bytes, seconds)
    world_size = None if index is None else index.world_size
    base = list(loading.base.values())
    return Loaded(summary, loading.extra, world_size, loading.missing, loading.unexpected, base)


def read_extra(path: str | os.PathLike[str], rank: int = 0) -> Any:
    """Return the ``extra`` that ``rank`` saved. No collective call. Raises: CheckpointError, OSError."""
    with closing(Checkpoint(Path(os.path.abspath(path)))) as source, naming_checkpoint(source.folder):
        if not 0 <= rank < source.index.world_size:
            raise CheckpointError(f"{source.folder}: has ranks 0 to {source.index.world_size - 1}, not {rank}")
        return decode(source.index.ranks[rank].get("extra"), OfRank(source, rank))


class Loading(ModelPlan):
    """One load on rank ``rank`` of ``size``: owns the open files, and the copies of buffers until ``commit``.

    ``reads``: of the optimizer's states too. ``bytes``: the number of bytes that this rank reads.
    """

    def __init__(self, model: nn.Module, optimizer: Any, rank: int, size: int):
        super().__init__(model)
        self.path, self.optimizer, self.bytes = Path(), optimizer, 0
        self.rank, self.size = rank, size
        self.source: Source | None = None
        self.index: Index | None = None
        self.targets: OptimizerPlan | None = None
        self.extra: Any = None
        self._of_modules: list[tuple[Any, Any]] = []

    def prepare_from(
        self,
        source: Source,
        strict: bool = True,
        check_finite: bool = False,
        convert: Convert = None,
        meter: Any = None,
    ) -> list[Any]:
        """Plan all reads, and check their bytes if there is a ``meter``. Modules with own code load buffers already.

        Returns: what ``compare`` compares. Raises: Exception.
        """
        self.source = source
        index, base = source.index, source.about.get("base")
        self.index = index
        held = all_held(self.module, trainable_only=base is not None)
        source.fit({name for one in held for name in one.names})
        with naming_checkpoint(self.path):
            if index is not None:
                source.values, source.alone = self._plan_modules(source, index, strict), self._own("own")
                saved_by = self.rank % index.world_size
                self.extra = decode(index.ranks[saved_by].get("extra"), OfRank(source, saved_by))
            source.look = partial(refuse_not_finite, source) if check_finite else None
            self.plan(held, source, strict)
            if strict and (self.missing or self.unexpected):
                kinds = ("missing in the checkpoint", "not in the model")
                raise CheckpointError(names_that_differ(self.missing, self.unexpected, kinds))
            base_sums = sums_of_samples(self.base, self.rank) if base is not None and strict else {}
            if strict and self.taken is None and source.values.keys() - self.alike:
                raise CheckpointError(f"the model has no module for `{min(source.values.keys() - self.alike)}`")
        named = None if self.optimizer is None else Named(self.optimizer, held)
        with naming_checkpoint(self.path):
            if named is not None:
                of_optimizer = source.told_of_optimizer()
                if of_optimizer is None:
                    raise CheckpointError(f"{self.path}: has no optimizer state: load it without an optimizer")
                self.targets = OptimizerPlan(named, of_optimizer, source, self._own("own_states"))
                self.targets.plan(strict, convert)
                self.targets.sums = Sums(held, index, source, self.rank, self.size)
                self.reads += self.targets.reads
            self.bytes = sum(read.out.nbytes for read in self.reads)
            if meter is not None:
                meter.expect(self.bytes)
                check_reads(source, self.reads, meter.add)
                self.check_tied(source)
        return [source.digest, base_sums]

    def _plan_modules(self, source: Source, index: Index, strict: bool) -> dict[str, Any]:
        """Plan the calls of ``set_extra_state``. Returns: name -> other values that modules gave to the state dict."""
        rank, told = 0, index.about.get("modules", {})
        if "modules" in self._saved_here:
            rank, told = self.rank, self._saved_here["modules"]
        extra = {name: value for name, value in told.items() if name.rpartition(".")[2] == "_extra_state"}
        self._of_modules = values_of_modules(self.module, extra, OfRank(source, rank), strict)
        return {name: decode(value, OfRank(source, rank)) for name, value in told.items() if name not in extra}

    @property
    def _saved_here(self) -> Mapping[str, Any]:
        """The index's entry of this rank, if as many ranks saved: each then loads the values that it saved alone."""
        is_as_saved = self.index is not None and self.index.world_size == self.size
        return self.index.ranks[self.rank] if self.index is not None and is_as_saved else {}

    def _own(self, kind: str) -> Mapping[str, list[Chunk]]:
        """Return the boxes that this rank saved alone. ``kind``: "own" (tensors without a unit) or "own_states"."""
        assert self.source is not None
        own = OfRank(self.source, self.rank)
        return {name: own.chunks(key) for name, key in self._saved_here.get(kind, {}).items()}

    @torch.inference_mode(False)
    @torch.no_grad()
    def carry_out(self) -> int:
        """Read into the shards, tell the units, set states and gradients. Returns: ``bytes``.

        Raises: CheckpointError: the model is then loaded in part.
        """
        try:
            assert self.source is not None
            for read in self.reads:
                self.source.read(read)
            self.finish()
        except Exception as error:
            raise CheckpointError(f"{error}; the model is loaded in part: load it again") from error
        return self.bytes

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self) -> None:
        """After the reads: tell the units, set the optimizers' states and gradients, then extra states.

        ``set_extra_state`` is the user's code and may raise: all else is done then.
        """
        forget_cuts()
        self.commit()
        if self.targets is not None:
            self.targets.commit()
        for module, value in self._of_modules:
            module.set_extra_state(value)

    def compare(self, said: list[Any]) -> None:
        """On the first rank: compare the digests and base sums that all ranks ``said``.

        Raises: CheckpointError, if ranks have different checkpoints, or the model has another base.
        """
        for rank, (other, _) in enumerate(said):
            if self.source is not None and other != self.source.digest:
                raise CheckpointError(
                    f"nothing was loaded: rank {rank} has another checkpoint than rank 0 under this path"
                )
        if self.index is not None and "base" in self.index.about:
            check_sums(self.index.about["base"], [sums for _, sums in said])

    def close(self) -> None:
        """Restore the values that ``prepare_from`` has changed, unless ``commit`` has begun, and close the files."""
        self.undo()
        if self.source is not None:
            self.source.close()
