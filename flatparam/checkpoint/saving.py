"""Saving: each rank writes what it owns into a folder beside the target, which becomes the checkpoint in one rename."""

from __future__ import annotations

import atexit
import ctypes
import errno
import glob
import math
import os
import secrets
import shutil
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from .._version import __version__
from ..fsdp.desync import liveness
from ..fsdp.desync.checked_collectives import settle
from ..fsdp.unit.unit import units_of
from .base import with_sums
from .errors import CheckpointError
from .files import Part, sync_folder, write_file
from .index import MODEL, NAME, OPTIMIZER, RANKS, Index, read_sealed, write_sealed
from .optimizers import labelled
from .planning import ALIKE, SavePlan, describe_units, plan_save
from .progress import Meter, Summary
from .rendezvous import Rendezvous

_ABOUT = ("aliases", "modules", "given", "metadata", "base")  # what the first rank says of the model
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# By the folder that it writes to. Weak: Ctrl-C may come where nothing here can catch it.
_under_way: weakref.WeakValueDictionary[Path, _Saving] = weakref.WeakValueDictionary()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of saves in the background
_unheard: dict[Pending, BaseException] = {}  # saves that have failed, and that nobody has waited for


class Pending:
    """A save that goes on in a thread: its values were taken already, and training may change them."""

    def __init__(self, saving: _Saving):
        self._saving = saving
        self._summary: Summary | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="flatparam checkpoint")
        _threads.add(self._thread)
        liveness.before_silence(_end_all)
        try:
            self._thread.start()
        except RuntimeError as error:  # there are too many: the other ranks wait to hear of it
            saving.error = error
            saving.write()

    def _run(self) -> None:
        try:
            self._summary = self._saving.write()
        except BaseException as error:
            self._error = _unheard[self] = error

    @property
    def path(self) -> Path:
        """Where the checkpoint will be."""
        return self._saving.path

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return not self._thread.is_alive()

    def wait(self) -> Summary:
        """Until the checkpoint is there. Raises: what ``save`` does."""
        self._thread.join()
        _unheard.pop(self, None)
        if self._error is not None:
            raise self._error
        assert self._summary is not None
        return self._summary


def _take_unheard() -> str | None:
    """Of saves in the background that have failed unheard: what to say, once."""
    said = [f"the save to {pending.path} in the background has failed: {error}" for pending, error in _unheard.items()]
    _unheard.clear()
    return "; ".join(said) or None


@atexit.register
def _tell_unheard() -> None:
    said = _take_unheard()
    if said is not None:
        warnings.warn(f"{said}; nobody has called wait()", RuntimeWarning, stacklevel=1)


def _end_all() -> None:
    """In a child: nobody joins its threads before the others take it for dead, and nobody may call what is above."""
    for thread in list(_threads):
        if thread.is_alive():
            thread.join()
    _tell_unheard()


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    extra: Any = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    overwrite: bool = False,
    trainable_only: bool = False,
    progress: bool = False,
) -> Summary:
    """Save a checkpoint in the folder ``path``, which is there when all ranks have written, or not at all.

    A call that all ranks of ``process_group`` (the world) make. Each rank writes the boxes of parameters that it owns;
    no tensor is communicated. The folder must be one that all ranks see. With ``optimizer``, gradients are saved too.

    Args:
        path: a folder that is not there yet, unless ``overwrite``.
        model: wrapped or plain, the same on all ranks.
        optimizer: one, or a list or dict of several, each of parameters of its own.
        extra: tensors, numbers, str, bool, None, and lists, tuples and dicts of those, of each rank its own.
        process_group: the ranks that hold the model.
        overwrite: take the place of a checkpoint there, in one step.
        trainable_only: leave out parameters that are frozen and were not trained, the base: a load keeps those that the
            model has, and refuses another base by name. Buffers are saved.
        progress: show a bar on rank 0.

    Raises:
        CheckpointError: on every rank alike, naming the rank and what is wrong; nothing is there then.
    """
    return _Saving(path, model, optimizer, extra, process_group, overwrite, trainable_only, progress).write()


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    extra: Any = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    overwrite: bool = False,
    trainable_only: bool = False,
    progress: bool = False,
) -> Pending:
    """``save`` in a thread, from a copy of this rank's boxes in host memory (pinned, if they are on an accelerator).

    Returns when the copy is made. ``wait()`` of the result, before the next save begins, raises what went wrong; else
    the next save does, or the end of the program warns of it.
    """
    saving = _Saving(path, model, optimizer, extra, process_group, overwrite, trainable_only, progress)
    saving.copy()
    return Pending(saving)


class _Saving:
    """One save: ``__init__`` plans it, on all ranks or on none; ``write`` does the rest, in any thread."""

    def __init__(
        self,
        path: Any,
        model: nn.Module,
        optimizer: Any,
        extra: Any,
        group: Any,
        overwrite: bool,
        trainable_only: bool,
        progress: bool,
    ):
        self.overwrite = overwrite
        self.rendezvous = rendezvous = Rendezvous(group, "checkpoint.save")
        self.path = Path()
        self.plan, self.units = SavePlan(), []
        self.error: BaseException | None = None  # on the way to the files
        error: BaseException | None = None
        own = ""
        self.id = secrets.token_hex(16)
        try:
            self.path = Path(os.path.realpath(path))
            unheard = _take_unheard()
            if unheard is not None:
                raise CheckpointError(f"{unheard}. wait() says this; nothing is saved to {self.path} now, save again")
            self.plan = plan_save(model, optimizer, extra, rendezvous.rank, trainable_only)
            settle(flat_param for unit in units_of(model.modules()) for flat_param in unit.flat_params)
            if rendezvous.is_first:
                self.units = describe_units(model)
            own = self.plan.alone.digest() if rendezvous.size > 1 else ""
        except Exception as caught:
            error = caught
        mine = [str(self.path), self.id, own, None if optimizer is None else list(labelled(optimizer)), trainable_only]
        try:
            self.id, first = rendezvous.agree(mine, error, self._begin)
            self.plan.keep_alone(rendezvous.rank, first != own)
            self.folder = self._partial(self.id)
            self.meter = Meter(f"save {self.path.name}", progress and rendezvous.is_first)
        except BaseException:
            _under_way.pop(self._partial(self.id), None)
            raise

    def _check_path(self) -> None:
        """Raises: CheckpointError for what is there and may not be replaced."""
        if self.path.exists() and not self.overwrite:
            raise CheckpointError(f"{self.path}: is there already; pass overwrite=True, or another path")
        if self.path.exists() and not (self.path / NAME).is_file():
            raise CheckpointError(f"{self.path}: is no checkpoint, so it is not overwritten: save to another path")

    def _partial(self, name: str) -> Path:
        return self.path.parent / f".{self.path.name}.partial-{name}"

    def _begin(self, said: list[Any]) -> list[Any]:
        """On the first rank: compare, and make the folder."""
        path, name, digest, labels, trainable_only = said[0]
        for rank, other in enumerate(said):
            if other[0] != path:
                raise CheckpointError(f"rank {rank} saves to {other[0]}, rank 0 to {path}")
            if (other[3] is None) != (labels is None):
                raise CheckpointError(f"rank {0 if labels is None else rank} saves no optimizer, another rank does")
            if other[3] != labels:
                raise CheckpointError(f"rank {rank} saves the optimizers {other[3]}, rank 0 {labels}")
            if other[4] != trainable_only:
                raise CheckpointError(f"rank {rank} saves with trainable_only={other[4]}, rank 0 with {trainable_only}")
        self._check_path()
        for left in self.path.parent.glob(f".{glob.escape(self.path.name)}.partial-*"):
            if left in _under_way:
                raise CheckpointError(f"{self.path}: another save to it goes on: wait() for that one first")
            shutil.rmtree(left, ignore_errors=True)  # of saves that were killed
        missing = [parent for parent in self.path.parents if not parent.exists()]
        try:
            for folder in (MODEL, OPTIMIZER, RANKS):
                (self._partial(name) / folder).mkdir(parents=True, exist_ok=True)
        except OSError:
            shutil.rmtree(self._partial(name), ignore_errors=True)
            raise
        for parent in missing:
            sync_folder(parent.parent)
        _under_way[self._partial(name)] = self
        return [name, digest]

    @torch.no_grad()
    def copy(self) -> None:
        """Take the values as they are now. An error is raised by ``write``, on all ranks alike."""
        try:
            devices = {part.tensor.device for parts in self.plan.parts.values() for part in parts}
            for parts in self.plan.parts.values():
                parts[:] = [part._replace(tensor=_on_host(part)) for part in parts]
            for device in devices - {torch.device("cpu")}:
                torch.accelerator.synchronize(device)
        except Exception as error:
            self.error = error
        except BaseException:
            _under_way.pop(self.folder, None)
            raise
        self.plan.held = []

    def write(self) -> Summary:
        """Write the files; on the first rank the index; rename. Raises: as ``save``."""
        mine = self.plan.bytes
        try:
            total = self._write(mine)
        finally:
            _under_way.pop(self.folder, None)
            self.plan = SavePlan()  # of async_save's, which the user may keep, the copies
            seconds = self.meter.close()
        return Summary(str(self.path), self.id, total, mine, seconds)

    def _write(self, mine: int) -> int:
        rendezvous = self.rendezvous
        error: BaseException | None = None
        seal = 0
        self.meter.expect(mine)
        try:
            if self.error is not None:
                raise self.error
            if not self.folder.is_dir():
                raise CheckpointError(f"{self.path.parent} is not the same folder on all ranks: save to one that is")
            told = self.plan.told
            told["files"] = {
                name: write_file(self.folder, name, parts, self.meter.add) for name, parts in self.plan.parts.items()
            }
            seal = write_sealed(self._table(rendezvous.rank), told)
            told.clear()
            self.plan.parts.clear()  # as much as the index, which is to be made
            for folder in (MODEL, OPTIMIZER, RANKS):
                sync_folder(self.folder / folder)
        except Exception as caught:
            error = caught
        try:
            total: int = rendezvous.agree(seal, error, self._finish, is_last=True)
        except BaseException:
            if rendezvous.is_first:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return total

    def _table(self, rank: int) -> Path:
        return self.folder / RANKS / f"rank-{rank:05}.json"

    def _finish(self, seals: list[int]) -> int:
        """On the first rank, when all have written: the index, and the name."""
        about = {"flatparam": __version__, "torch": torch.__version__}
        index = Index(self.id, len(seals), about, units=self.units)
        states: dict[str, Any] = {}
        pieces: dict[tuple[str, str], list[tuple[int, list[Any]]]] = {}
        alike: dict[str, dict[str, str]] = {}
        keys: dict[str, tuple[int, list[str]]] = {}
        sums: list[dict[str, int]] = []
        for rank, seal in enumerate(seals):
            told = read_sealed(self._table(rank), seal)
            index.add_files(told["files"])
            sums.append(told.get("base_sums", {}))
            if rank == 0:
                index.about |= {key: told[key] for key in _ABOUT if key in told}
                index.optimizer = told.get("optimizer")
                alike = told.get("alike", {})
            _check_alike(rank, told.get("alike", {}), alike)
            kinds = ("extra", "own", "own_states", "kept", *(["modules"] if rank else []))
            index.ranks.append({kind: told[kind] for kind in kinds if kind in told})
            of_optimizer = told.get("optimizer", {})
            for name, here in of_optimizer.get("keys", {}).items():
                _check_keys(name, keys.setdefault(name, (rank, here)), (rank, here))
            for name, values in of_optimizer.get("states", {}).items():
                states.setdefault(name, {}).update(values)
            for name, values in of_optimizer.get("pieces", {}).items():
                for key, value in values.items():
                    pieces.setdefault((name, key), []).append((rank, value))
        if "base" in index.about:
            of_base = index.about["base"].items()
            index.about["base"] = with_sums(
                {n: one for n, one in of_base if n not in index.tensors.get(MODEL, {})}, sums
            )
        boxes = index.tensors.get(OPTIMIZER, {})
        for (name, key), said in pieces.items():
            if any(has_dims for _, (*_, has_dims, _) in said) and f"state.{name}.{key}" in boxes:
                raise CheckpointError(
                    f"the optimizer's `{key}` of `{name}` has the shape of the piece there on some ranks, and another "
                    f"on rank {said[0][0]}: it cannot be told whether it has an element for each of the parameter"
                )
            entry = _entry_of_pieces(name, key, said)
            if entry is not None:
                states[name][key] = entry
        if index.optimizer is not None:
            of_groups = {key: index.optimizer[key] for key in ("optimizers", "classes", "groups")}
            index.optimizer = of_groups | {"states": states}
        _check_covered(index)
        index.write(self.folder)
        for rank in range(len(seals)):
            self._table(rank).unlink()
        for folder in (RANKS, "."):
            sync_folder(self.folder / folder)
        self._publish()
        return index.bytes

    def _publish(self) -> None:
        """Give the folder its name, in one step also where there was one."""
        if not self.path.exists():
            os.rename(self.folder, self.path)
            sync_folder(self.path.parent)
            return
        self._check_path()  # another may have made it since
        _exchange(self.folder, self.path)
        sync_folder(self.path.parent)
        shutil.rmtree(self.folder, ignore_errors=True)  # the one before


def _entry_of_pieces(name: str, key: str, said: list[tuple[int, list[Any]]]) -> Any:
    """What the index has for a value that ranks have beside their pieces of a parameter.

    By the layout of the piece, where it belongs to that; with True, where all pieces have the same; None: as any other.
    Raises: CheckpointError for numbers that differ, and for what replicas do not have alike.
    """
    by_layout: dict[str, tuple[int, list[Any]]] = {}
    first, (_, digest, value, _, has_dims, is_of_many) = said[0]
    for rank, told in said:
        for other_rank, other in (by_layout.setdefault(told[0], (rank, told)), said[0]):
            if other[1] != told[1] and (other[0] == told[0] or not (told[3] and other[3])):
                raise CheckpointError(
                    f"the optimizer's `{key}` of `{name}` differs on rank {other_rank} and rank {rank}: a number must "
                    "be the same on all ranks that have a part of the parameter, and a tensor where the parts are"
                )
    differ = any(told[1] != digest for _, told in said)
    if differ or (has_dims and (is_of_many or len(by_layout) == 1)):
        return {"pieces": {layout: [told[2], rank] for layout, (rank, told) in by_layout.items()}}
    return [value, first, True] if has_dims else None


def _check_alike(rank: int, told: dict[str, dict[str, str]], first: dict[str, dict[str, str]]) -> None:
    """Raises: CheckpointError naming what is not as rank 0 has it."""
    for kind, (what, why) in ALIKE.items():
        here, there = told.get(kind, {}), first.get(kind, {})
        for name in {**there, **here}:
            if here.get(name) != there.get(name):
                raise CheckpointError(f"{what} `{name}` differs on rank 0 and rank {rank}, {why}")


def _check_keys(name: str, one: tuple[int, list[str]], other: tuple[int, list[str]]) -> None:
    """Raises: CheckpointError for a key that the optimizer has for a parameter on one rank, and not on another."""
    for (rank, keys), (without, fewer) in ((one, other), (other, one)):
        for key in keys:
            if key not in fewer:
                raise CheckpointError(
                    f"the optimizer has `{key}` of `{name}` on rank {rank}, and not on rank {without}, which has a "
                    "part of that parameter too"
                )


def _on_host(part: Part) -> torch.Tensor:
    """A copy in memory of its own, which is pinned where the part is on an accelerator."""
    tensor = part.tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=not tensor.is_cpu)
    return copy.copy_(tensor, non_blocking=True)


def _check_covered(index: Index) -> None:
    """Raises: CheckpointError naming a tensor of which ranks have not written every element once."""
    for folder, tensors in index.tensors.items():
        for key, chunks in tensors.items() if folder != RANKS else ():
            found = sum(math.prod(chunk.sizes) for chunk in chunks)
            if found != math.prod(chunks[0].shape):
                raise CheckpointError(
                    f"`{key}` of shape {chunks[0].shape} was written with {found} elements: not all ranks have it"
                )


def _exchange(a: Path, b: Path) -> None:
    """Swap the names of two folders. Raises: CheckpointError where the file system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    rename = getattr(library, "renameat2", None)
    arguments = (_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    if rename is None or rename(*arguments) != 0:
        reason = os.strerror(ctypes.get_errno() or errno.ENOSYS)
        raise CheckpointError(
            f"{b}: cannot be replaced in one step here ({reason}): save to a new path, then remove it"
        )
