"""Loading: each rank reads the bytes that overlap what it holds; nothing changes until all ranks have checked them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from .. import _C
from ..fsdp.names import bare_names
from ..fsdp.states.loading import note_filled
from ..fsdp.states.optimizer_loading import piece_of
from .base import check_sums, sums_of_samples
from .converting import Convert
from .errors import CheckpointError, naming_checkpoint
from .exporting import open_source
from .files import Chunk
from .gradients import Sums, sums_of
from .index import Index
from .modules import Taken, take
from .optimizers import Named
from .pieces import InHandle, all_held
from .planning import check_idle
from .progress import Meter, Summary
from .reading import Checkpoint, OfRank, Source, check_reads, refuse_not_finite
from .rendezvous import Rendezvous
from .targets import Targets, check_tied, into_model, into_optimizer, values_of_modules
from .values import decode


@dataclass
class Loaded:
    """``extra``: what this rank has saved, or, where there were fewer ranks, the one of its number modulo theirs;
    ``world_size``: theirs; ``missing`` and ``unexpected``: names, if it was not strict; ``base``:
    names of what was saved with ``trainable_only`` left out, and is as the model had it."""

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
    """Load a checkpoint into ``model`` and ``optimizer``, at any number of ranks, strategy and units.

    A call that all ranks of ``process_group`` (the world) make. First everything is checked: names, shapes, dtypes, and
    the checksums of all bytes that this rank will read. When all ranks have done that, each reads into its shards.
    With ``optimizer``, gradients are those of the checkpoint, or None.

    Args:
        path: a checkpoint; a folder of torch's distributed checkpoint; one safetensors file, or an index.
        model: wrapped or plain, the same on all ranks.
        optimizer: one, or a list or dict of several, as they were saved.
        strict: every name of the model must be there, and no other.
        convert: what to take of the state of an optimizer of another class: its keys there, and what they are called
            here. Other keys are dropped, and the settings of the groups stay. ``{}``: the state starts anew.
        check_finite: refuse NaN and infinities.
        trusted: read torch's ``.metadata``, a pickle that can run anything.
        process_group: the ranks that hold the model.
        progress: show a bar on rank 0.

    Raises:
        CheckpointError: on every rank alike, naming rank, file and tensor; model and optimizer are as before. Where
            reading fails after all checks, or a ``set_extra_state`` raises, it says that the model is loaded in part.
    """
    rendezvous = Rendezvous(process_group, "checkpoint.load")
    meter = Meter(f"load {path}", progress and rendezvous.is_first)
    loading = _Loading(model, optimizer, rendezvous)
    try:
        error: BaseException | None = None
        try:
            loading.path = Path(os.path.abspath(path))
            loading.plan(strict, trusted, check_finite, convert)
            loading.check(meter)
        except Exception as caught:
            error = caught
        rendezvous.agree([loading.digest, loading.base_sums], error, loading.compare)
        error = None
        try:
            loading.commit()
        except Exception as caught:
            error = CheckpointError(f"{caught}; the model is loaded in part: load it again")
            error.__cause__ = caught
        read = rendezvous.agree(loading.bytes, error, sum, is_last=True)
    finally:
        error = None  # it has this frame, which has the model
        loading.close()
        seconds = meter.close()
    if loading.into[0].rounded and rendezvous.is_first:
        name, stored, dtype = loading.into[0].rounded[0]
        warnings.warn(
            f"{path}: {len(loading.into[0].rounded)} tensors were rounded to the model's dtype: `{name}` is {stored} "
            f"there, and {dtype} here",
            stacklevel=2,
        )
    for why in loading.into[-1].without_state if rendezvous.is_first else ():
        warnings.warn(f"{path}: the optimizer's state in the checkpoint {why}", stacklevel=2)
    index = loading.index
    loaded = Loaded(Summary(str(loading.path), index.id if index else None, read, loading.bytes, seconds))
    loaded.missing, loaded.unexpected = loading.into[0].missing, loading.into[0].unexpected
    loaded.base = list(loading.into[0].base.values())
    if index is not None:
        loaded.world_size, loaded.extra = index.world_size, loading.extra
    return loaded


def read_extra(path: str | os.PathLike[str], rank: int = 0) -> Any:
    """The ``extra`` that one rank has saved. No collective call. Raises: CheckpointError, OSError."""
    source = Checkpoint(Path(os.path.abspath(path)))
    try:
        with naming_checkpoint(source.folder):
            if not 0 <= rank < source.index.world_size:
                raise CheckpointError(f"{source.folder}: has ranks 0 to {source.index.world_size - 1}, not {rank}")
            return read_extra_of(source, source.index, rank)
    finally:
        source.close()


def read_extra_of(source: Source, index: Index, rank: int) -> Any:
    """The same of an open one."""
    return decode(index.ranks[rank].get("extra"), OfRank(source, rank))


class _Loading:
    def __init__(self, model: nn.Module, optimizer: Any, rendezvous: Rendezvous):
        self.path, self.model, self.optimizer, self.rendezvous = Path(), model, optimizer, rendezvous
        self.source: Source | None = None
        self.into: list[Targets] = []
        self.named: Named | None = None
        self.sums: Sums | None = None
        self.extra: Any = None
        self.digest = ""
        self.base_sums: dict[str, int] = {}  # of what is not in the checkpoint, and is here
        self._of_modules: list[tuple[Any, Any]] = []
        self._taken: Taken | None = None  # what modules have loaded so far, which is undone unless all ranks go on

    @property
    def index(self) -> Index | None:
        return None if self.source is None else self.source.index

    @property
    def bytes(self) -> int:
        """That this rank reads."""
        return sum(read.out.numel() * read.out.itemsize for targets in self.into for read in targets.reads)

    @torch.inference_mode(False)
    def plan(self, strict: bool, trusted: bool, check_finite: bool, convert: Convert) -> None:
        """Open the files and find out what goes where."""
        check_idle(self.model, "checkpoint.load")
        source = self.source = open_source(self.path, trusted)
        self.digest = source.digest
        index = source.index
        about = {} if index is None else index.about
        base = about.get("base")
        held = list(all_held(self.model, trainable_only=base is not None))
        source.fit({name for one in held for name in one.names})
        with naming_checkpoint(self.path):
            values = self._plan_modules(strict)
            if index is not None:
                self.extra = read_extra_of(source, index, self.rendezvous.rank % index.world_size)
            source.look = partial(refuse_not_finite, source) if check_finite else None
            self._taken = taken = take(self.model, held, source, self._own("own"), values, about)
            self.into = [into_model(held, source, strict, self._own("own"), taken, base)]
        if base is not None and strict:
            self.base_sums = sums_of_samples(self.into[0].base, self.rendezvous.rank)
        if strict and taken is None and values:
            raise CheckpointError(f"the model has no module for `{min(values)}`")
        if self.optimizer is not None:
            self.named = Named(self.optimizer, held)
            told = source.told_of_optimizer()
            if told is None:
                raise CheckpointError(f"{self.path}: has no optimizer state")
            with naming_checkpoint(self.path):
                own = self._own("own_states")
                self.into.append(into_optimizer(self.named, told, source, strict, own, convert))
            self.sums = sums_of(held, index, source, self.rendezvous.rank, self.rendezvous.size)

    def _plan_modules(self, strict: bool) -> dict[str, Any]:
        """Find what modules take by ``set_extra_state``. Returns by name what else they gave that is no tensor."""
        index, source = self.index, self.source
        if index is None or source is None:
            return {}
        rank, told = 0, index.about.get("modules", {})
        if self._is_as_saved and "modules" in index.ranks[self.rendezvous.rank]:
            rank, told = self.rendezvous.rank, index.ranks[self.rendezvous.rank]["modules"]
        extra = {name: value for name, value in told.items() if name.rpartition(".")[2] == "_extra_state"}
        self._of_modules = values_of_modules(self.model, extra, OfRank(source, rank), strict)
        return {name: decode(value, OfRank(source, rank)) for name, value in told.items() if name not in extra}

    @property
    def _is_as_saved(self) -> bool:
        """Whether this rank is one of those that have saved."""
        return self.index is not None and self.index.world_size == self.rendezvous.size

    def _own(self, kind: str) -> Mapping[str, list[Chunk]]:
        """What this rank alone has saved: tensors that no unit manages, or states of those."""
        if self.source is None or self.index is None or not self._is_as_saved:
            return {}
        own = OfRank(self.source, self.rendezvous.rank)
        return {name: own.chunks(key) for name, key in self.index.ranks[self.rendezvous.rank].get(kind, {}).items()}

    def check(self, meter: Meter) -> None:
        """Compare all bytes that will be read with their checksums."""
        assert self.source is not None
        meter.expect(self.bytes)
        with naming_checkpoint(self.path):
            for targets in self.into:
                check_reads(self.source, targets.reads, self.source.look, meter.add)
            for held, name, other in self.into[0].tied:
                check_tied(self.source, held, name, other)

    @torch.inference_mode(False)
    @torch.no_grad()
    def commit(self) -> None:
        """Read into the shards; tell the units. Raises: FileError, OSError."""
        assert self.source is not None
        for targets in self.into:
            for read in targets.reads:
                self.source.read(read)
        computed = {} if self._taken is None else self._taken.values
        self._taken = None  # from here on the model is loaded, if in part
        for held, whole in computed.items():
            held.flat.copy_(piece_of(held, whole))
        for held in self.into[0].touched:
            torch.autograd.graph.increment_version(held.owner)
            if isinstance(held, InHandle):
                held.handle._forget_what_was_gathered()
        names = {*self.source.model, *(name for one in self.into[0].touched for name in one.names)}
        note_filled(self.model, names, bare_names(self.model))
        for module, value in self._of_modules:
            module.set_extra_state(value)
        if self.named is not None:
            _, targets = self.into
            for param, values in targets.state:
                self.named.set_state(param, values)
            for group, values in zip(self.named.param_groups, targets.groups, strict=False):
                group.update(values)
            assert self.sums is not None
            self.sums.put()
            for param, grad in targets.gradients:
                _C.set_grad(param, grad)
            self.sums.show()

    def compare(self, said: list[Any]) -> None:
        """On the first rank: ``said`` by all. Raises: CheckpointError for other checkpoints, and for another base."""
        for rank, (other, _) in enumerate(said):
            if other != self.digest:
                raise CheckpointError(
                    f"nothing was loaded: rank {rank} has another checkpoint than rank 0 under this path"
                )
        if self.index is not None and "base" in self.index.about:
            check_sums(self.index.about["base"], [sums for _, sums in said])

    def close(self) -> None:
        if self._taken is not None:
            self._taken.before.restore()
        if self.source is not None:
            self.source.close()
