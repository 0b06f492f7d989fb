"""``save`` and ``async_save``: each rank writes its boxes into a folder beside the target, which one rename publishes.

| step | done by | thread |
|---|---|---|
| plan (`planning.py`) and agree | all ranks | the caller's |
| copy to host memory, for ``async_save`` | each rank | the caller's |
| write files and a table of them | each rank | the caller's, or its own for ``async_save`` |
| merge the tables into the index, check it, rename the folder | first rank | the same |

After a failure on any rank all raise, the first rank removes the folder, and an older checkpoint stays in its place.
"""

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._version import __version__
from ..common.patches import FOR_GOOD, note
from ..fsdp.desync import liveness
from ..fsdp.desync.checked_collectives import settle
from ..fsdp.desync.events import SetupCollective
from ..fsdp.unit.unit import units_of
from .base import with_sums
from .errors import CheckpointError
from .files import Part, sync_folder, write_file
from .index import MODEL, NAME, OPTIMIZER, RANKS, Index, read_sealed, write_sealed
from .optimizers import labelled
from .planning import ALIKE, SavePlan, describe_units, plan_save
from .progress import Meter, Summary, note_newest
from .rendezvous import Rendezvous

_ABOUT = ("aliases", "modules", "given", "metadata", "base")  # taken from the first rank's table
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# Folder that is written -> its save. Weak: after a KeyboardInterrupt nothing here may remove the entry.
_under_way: weakref.WeakValueDictionary[Path, _Saving] = weakref.WeakValueDictionary()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads of async_save
_unheard: dict[Pending, BaseException] = {}  # failed saves without a wait() so far


class Pending:
    """A save that goes on in another thread. The values are copied already: training may change the model."""

    def __init__(self, saving: _Saving):
        self._saving = saving
        self._result: Future[Summary] = Future()
        self._thread = threading.Thread(target=self._run, name="flatparam checkpoint")
        _threads.add(self._thread)
        liveness.before_silence(_end_all)
        try:
            self._thread.start()
        except RuntimeError as error:  # too many threads: tell the other ranks, which wait
            saving.error = error
            saving.write()

    def _run(self) -> None:
        try:
            self._result.set_result(self._saving.write())
        except BaseException as error:
            _unheard[self] = error
            self._result.set_exception(error)

    @property
    def path(self) -> Path:
        """The path of the checkpoint, which exists once the save has ended."""
        return self._saving.path

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return not self._thread.is_alive()

    def wait(self) -> Summary:
        """Wait until the checkpoint is published. Raises: as ``save``."""
        self._thread.join()
        _unheard.pop(self, None)
        return self._result.result()


def _take_unheard() -> str | None:
    """Return the errors of failed saves without a ``wait()`` as one text, and forget them; None: there are none."""
    said = [f"the save to {pending.path} in the background has failed: {error}" for pending, error in _unheard.items()]
    _unheard.clear()
    return "; ".join(said) or None


@atexit.register
def _tell_unheard() -> None:
    said = _take_unheard()
    if said is not None:
        warnings.warn(f"{said}; nobody has called wait()", RuntimeWarning, stacklevel=1)


note(
    FOR_GOOD,
    ["atexit:register"],
    "Warn of saves in the background that have failed, and whose error no `wait()` has raised.",
    "tests/checkpoint/test_checkpoint_warnings.py",
    "None is needed: the function does nothing without such a save.",
)


def _end_all() -> None:
    """In a child of multiprocessing: join the threads of saves while the child still answers the other ranks.

    It joins threads itself only after that, when the ranks take it for dead, and it does not run atexit.
    """
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
    """Save a checkpoint in the folder ``path``. The folder appears when all ranks have written, or never.

    All ranks of ``process_group`` must call it, in one order with other calls over these ranks: from one thread. Each
    rank writes the boxes of parameters in its shards; no tensor is communicated. All ranks must see the same file
    system. With ``optimizer``, gradients are saved too.

    Args:
        path: a new folder, or with ``overwrite`` an existing checkpoint.
        model: wrapped or plain, the same on all ranks.
        optimizer: one, or a list or dict of several with different parameters.
        extra: this rank's own values: tensors, numbers, str, bool, None, and lists, tuples and dicts of those.
        process_group: the ranks that hold the model; None: the world.
        overwrite: replace an existing checkpoint, in one step.
        trainable_only: leave out the base: parameters that are frozen and have no optimizer state. A load keeps the
            model's base, and refuses another base, naming a parameter. Buffers are saved.
        progress: show a bar on rank 0.

    Raises:
        CheckpointError: on every rank, naming the rank and the cause. Nothing is saved then, and an existing checkpoint
            stays.
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
    """Copy this rank's boxes to host memory (pinned, if they are on an accelerator), and ``save`` them in a thread.

    All ranks must call it; it returns after the copy. Raises: CheckpointError as ``save``, for arguments and values.
    ``wait()`` of the result raises a later error of the save. Without a ``wait()`` the next save raises it, or a
    warning at the end of the program shows it.
    """
    saving = _Saving(path, model, optimizer, extra, process_group, overwrite, trainable_only, progress)
    saving.copy()
    return Pending(saving)


class _Saving:
    """One save. ``__init__`` plans it and agrees with all ranks; ``write`` does the rest, in any thread."""

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
        self.rendezvous = rendezvous = Rendezvous(group, SetupCollective.SAVES_CHECKPOINT, model)
        self.path = Path()
        self._model: Callable[[], nn.Module | None] = lambda: None
        self.plan = SavePlan()
        self.units: list[dict[str, Any]] = []
        self.error: BaseException | None = None  # of the copy, which write() raises on all ranks
        own = ""
        self.id = secrets.token_hex(16)

        def plan() -> list[Any]:
            nonlocal own
            self.path = Path(os.path.realpath(path))
            unheard = _take_unheard()
            if unheard is not None:
                raise CheckpointError(f"{unheard}. wait() says this; nothing is saved to {self.path} now, save again")
            self.plan = plan_save(model, optimizer, extra, rendezvous.rank, trainable_only)
            self._model = weakref.ref(model)
            settle(flat_param for unit in units_of(model.modules()) for flat_param in unit.flat_params)
            if rendezvous.is_first:
                self.units = list(describe_units(model))
            own = self.plan.alone.digest() if rendezvous.size > 1 else ""
            labels = None if optimizer is None else list(labelled(optimizer))
            return [str(self.path), self.id, own, labels, trainable_only]

        try:
            self.id, first = rendezvous.agree(plan, self._begin)
            self.plan.keep_alone(rendezvous.rank, first != own)
            self.folder = self._partial(self.id)
            self.meter = Meter(f"save {self.path.name}", progress and rendezvous.is_first)
        except BaseException:
            _under_way.pop(self._partial(self.id), None)
            raise

    def _check_path(self) -> None:
        """Raises: CheckpointError if something at ``path`` may not be replaced."""
        if self.path.exists() and not self.overwrite:
            raise CheckpointError(f"{self.path}: is there already; pass overwrite=True, or another path")
        if self.path.exists() and not (self.path / NAME).is_file():
            raise CheckpointError(f"{self.path}: is no checkpoint, so it is not overwritten: save to another path")

    def _partial(self, name: str) -> Path:
        return self.path.parent / f".{self.path.name}.partial-{name}"

    def _begin(self, said: list[Any]) -> list[Any]:
        """On the first rank: compare arguments, remove leftovers, make the folder. Returns: id and digest of rank 0."""
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
            shutil.rmtree(left, ignore_errors=True)  # left by a save that was killed
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
        """Replace the plan's tensors with copies on the host. ``write`` raises an error of this, on all ranks."""
        try:
            devices = {part.tensor.device for parts in self.plan.parts.values() for part in parts}
            for parts in self.plan.parts.values():
                parts[:] = [part._replace(tensor=_on_host(part)) for part in parts]
            for device in devices - {torch.device("cpu")}:
                torch.accelerator.current_stream(device).synchronize()
        except Exception as error:
            self.error = error
        except BaseException:
            _under_way.pop(self.folder, None)
            raise
        self.plan.held = []

    def write(self) -> Summary:
        """Write this rank's files; the first rank then writes the index and renames the folder. Raises: as ``save``."""
        mine = self.plan.bytes
        self.meter.expect(mine)
        try:
            total = self.rendezvous.agree(self._write, self._finish, is_last=True)
        except BaseException:
            if self.rendezvous.is_first:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise
        finally:
            _under_way.pop(self.folder, None)
            self.plan = SavePlan()  # free the copies: the user may keep the Pending
            seconds = self.meter.close()
        note_newest(self._model(), str(self.path))
        return Summary(str(self.path), self.id, total, mine, seconds)

    def _write(self) -> int:
        """Write this rank's files and their table. Returns: the checksum of the table."""
        if self.error is not None:
            raise self.error
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.path.parent} is not the same folder on all ranks: save to one that is")
        told = self.plan.told
        told["files"] = {
            name: write_file(self.folder, name, parts, self.meter.add) for name, parts in self.plan.parts.items()
        }
        seal = write_sealed(self._table(self.rendezvous.rank), told)
        told.clear()
        self.plan.parts.clear()  # free memory before the index, which is as large
        for folder in (MODEL, OPTIMIZER, RANKS):
            sync_folder(self.folder / folder)
        return seal

    def _table(self, rank: int) -> Path:
        return self.folder / RANKS / f"rank-{rank:05}.json"

    def _finish(self, seals: list[int]) -> int:
        """On the first rank, after all have written: merge and check the tables, write the index, publish it."""
        about = {"flatparam": __version__, "torch": torch.__version__}
        index = Index(self.id, len(seals), about, units=self.units)

        def tables() -> Iterator[dict[str, Any]]:
            for rank, seal in enumerate(seals):
                told = read_sealed(self._table(rank), seal)
                index.add_files(told["files"])
                yield told

        merge(index, tables())
        index.write(self.folder)
        for rank in range(len(seals)):
            self._table(rank).unlink()
        for folder in (RANKS, "."):
            sync_folder(self.folder / folder)
        self._publish()
        return index.bytes

    def _publish(self) -> None:
        """Rename the folder to ``path``. An existing checkpoint is exchanged in one step, and then removed."""
        if not self.path.exists():
            os.rename(self.folder, self.path)
            sync_folder(self.path.parent)
            return
        self._check_path()  # it may have appeared since
        _exchange(self.folder, self.path)
        sync_folder(self.path.parent)
        shutil.rmtree(self.folder, ignore_errors=True)  # the old checkpoint, after the exchange


def merge(index: Index, tables: Iterable[Mapping[str, Any]]) -> None:
    """Put into ``index`` the values that ranks told, and compare them. ``tables``: ``SavePlan.told`` by rank.

    ``index`` has the boxes of a rank when its table comes. Raises: CheckpointError naming a value that differs.
    """
    states: dict[str, Any] = {}
    pieces: dict[tuple[str, str], list[tuple[int, list[Any]]]] = {}
    alike: dict[str, dict[str, str]] = {}
    keys: dict[str, tuple[int, list[str]]] = {}
    sums: list[dict[str, int]] = []
    for rank, told in enumerate(tables):
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
        index.about["base"] = with_sums({n: one for n, one in of_base if n not in index.tensors.get(MODEL, {})}, sums)
    _merge_pieces(states, pieces, index.tensors.get(OPTIMIZER, {}))
    if index.optimizer is not None:
        of_groups = {key: index.optimizer[key] for key in ("optimizers", "classes", "groups")}
        index.optimizer = of_groups | {"states": states}
    _check_covered(index)


def _merge_pieces(
    states: dict[str, Any], pieces: Mapping[tuple[str, str], list[tuple[int, list[Any]]]], boxes: Mapping[str, Any]
) -> None:
    """Put into ``states`` the entry of each optimizer value that ranks described by pieces.

    ``pieces``: (parameter, key) -> [(rank, description)]; ``boxes``: the values that files have in boxes.
    """
    for (name, key), said in pieces.items():
        if any(has_dims for _, (*_, has_dims, _) in said) and f"state.{name}.{key}" in boxes:
            raise CheckpointError(
                f"the optimizer's `{key}` of `{name}` has the shape of the piece on some ranks, and another shape "
                f"on rank {said[0][0]}. Expected the piece's shape on all ranks or on none"
            )
        entry = _entry_of_pieces(name, key, said)
        if entry is not None:
            states[name][key] = entry


def _entry_of_pieces(name: str, key: str, said: list[tuple[int, list[Any]]]) -> Any:
    """Return the index's entry for a value of the optimizer that may describe only a piece of a parameter.

    ``said``: (rank, result of ``_piece`` in `planning.py`). Returns: ``{"pieces": ...}`` if it differs between pieces,
    ``[value, rank, True]`` if it is a tensor that all pieces share; None: keep the entry of the first piece.
    Raises: CheckpointError, if plain numbers differ, or if ranks with the same piece have different values.
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
    """Raises: CheckpointError naming the first value of ``ALIKE`` that differs from rank 0's."""
    for kind, (what, why) in ALIKE.items():
        here, there = told.get(kind, {}), first.get(kind, {})
        for name in {**there, **here}:
            if here.get(name) != there.get(name):
                raise CheckpointError(f"{what} `{name}` differs on rank 0 and rank {rank}, {why}")


def _check_keys(name: str, one: tuple[int, list[str]], other: tuple[int, list[str]]) -> None:
    """Raises: CheckpointError for a key of parameter ``name`` that one of two ranks lacks. ``one``: (rank, keys)."""
    for (rank, keys), (without, fewer) in ((one, other), (other, one)):
        for key in keys:
            if key not in fewer:
                raise CheckpointError(
                    f"the optimizer has `{key}` of `{name}` on rank {rank}, and not on rank {without}, which has a "
                    "part of that parameter too"
                )


def _on_host(part: Part) -> torch.Tensor:
    """Return a copy on the host; pinned and asynchronous for an accelerator: the caller synchronizes the device."""
    tensor = part.tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=not tensor.is_cpu)
    return copy.copy_(tensor, non_blocking=True)


def _check_covered(index: Index) -> None:
    """Raises: CheckpointError naming a tensor whose boxes have more or fewer elements than its shape."""
    for folder, tensors in index.tensors.items():
        for key, chunks in tensors.items() if folder != RANKS else ():
            found = sum(math.prod(chunk.sizes) for chunk in chunks)
            told = f"`{key}` of shape {chunks[0].shape} was written with {found} elements"
            if found < math.prod(chunks[0].shape):
                raise CheckpointError(
                    f"{told}: not all ranks have it, or its unit is over more ranks than the save: pass process_group= "
                    "with the ranks of the unit"
                )
            if found > math.prod(chunks[0].shape):
                raise CheckpointError(
                    f"{told}, more than it has: several ranks have the same ones, so its unit is over other groups "
                    "than the save: pass process_group= with the ranks of the unit, and another path for each group"
                )


def _exchange(a: Path, b: Path) -> None:
    """Swap the names of two folders in one step. Raises: CheckpointError if the file system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    rename = getattr(library, "renameat2", None)
    arguments = (_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    if rename is None or rename(*arguments) != 0:
        reason = os.strerror(ctypes.get_errno() or errno.ENOSYS)
        raise CheckpointError(
            f"{b}: cannot be replaced in one step here ({reason}): save to a new path, then remove it"
        )
