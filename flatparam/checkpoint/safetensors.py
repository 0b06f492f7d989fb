"""``load_safetensors``: load safetensors files into a wrapped model. Each rank reads the elements of its own shards.

Plan and check on each rank, agree over the units' groups by a collective, then commit: see `loading.py` for the same
order. A model without values is read into directly, and blanked again if the load fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from ..common.tensors import row_major
from ..common.torch_private import _IncompatibleKeys
from ..fsdp.names import bare_names
from ..fsdp.sharding.deferred import blank
from ..fsdp.sharding.parameters import same_bytes
from ..fsdp.sharding.unit_description import digest_of
from ..fsdp.states.loading import Values, agree_on_loading, may_become, note_filled
from ..fsdp.states.optimizer_loading import piece_of
from ..fsdp.states.safetensors_files import Entry, Files, sample_of
from ..fsdp.unit.base import Wrapper
from ..fsdp.unit.local_params import LocalParam, local_params_of, refuse_forms
from ..fsdp.unit.unit import units_of
from .errors import naming_checkpoint
from .foreign import Foreign, whole_tensors
from .modules import Taken, take

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def load_safetensors(module: nn.Module, files: Paths, *, strict: bool = True) -> _IncompatibleKeys:
    """Load parameters and buffers from safetensors files straight into the shards of the units in ``module``.

    A collective call. Each rank reads the bytes of its own slices, and converts them a MiB at a time; parameters that
    no unit manages, and buffers, are read whole. All ranks load, or none: files are checked and read before the model
    changes. For that a model with values needs a second copy of its shards in host memory; a model that ``defer_init``
    made needs none. Hooks and overrides for loading run as in ``module.load_state_dict()``, without gathers.

    Args: ``files``: a file, an index of several (``*.index.json``), a folder with one of them under its usual name, or
    several files. Names are those of the model without wrappers, ``torch.compile`` and DDP; a tied parameter needs one
    of its names. A floating dtype is converted to another floating one; other kinds are not converted. ``strict``: the
    files must have every name of the model, and no other.
    Returns: ``missing_keys`` and ``unexpected_keys``.
    Raises: RuntimeError on every rank, naming the rank and its error: missing or unexpected names; another shape or
    kind of dtype; a file that is not in the format or cannot be read; different files on other ranks; a model in the
    middle of a step; a hook that computes with a parameter. The model is then as before.
    """
    units = list(units_of(module.modules()))
    loading = _Loading(module)
    error: Exception | None = None
    try:
        try:
            for inner in module.modules():
                if isinstance(inner, Wrapper):
                    inner._check_idle_here("load_safetensors")
            loading.plan(files, strict)
        except Exception as caught:
            error = caught
        said = None if error is None else f"{type(error).__name__}: {error}"
        agree_on_loading("load_safetensors", units, said, loading.values)
    except BaseException as failure:
        loading.undo()
        raise failure from error
    finally:
        error = None  # its traceback holds this frame, and with it the model
        loading.close()
    return loading.commit()


class _Given(Foreign):
    """The tensors of ``files`` under their own names. The files stay the caller's."""

    def __init__(self, files: Files):
        self._files = files
        self.model, self.optimizer = whole_tensors(files), {}


class _Loading:
    """One load on this rank. ``values``: digests that must be equal on all ranks. Owns the open files."""

    def __init__(self, module: nn.Module):
        self.values: Values = {}
        self._module = module
        self._bare = bare_names(module)
        self._read: list[tuple[LocalParam, Tensor]] = []  # (target, the elements read: in place, or in a copy)
        self._reader: Files | None = None
        self._taken: Taken | None = None
        self._found = _IncompatibleKeys([], [])

    def plan(self, files: Paths, strict: bool) -> None:
        """Check all names and read this rank's elements. Raises: an exception; the caller then calls ``undo``."""
        wanted = list(local_params_of(self._module, name_of=self._bare))
        refuse_forms(wanted, "load_safetensors", "load it before it is parallelized, or by a state dict")
        reader = self._reader = Files(files)
        with naming_checkpoint(Path(files)) if isinstance(files, str | os.PathLike) else nullcontext():
            taken = self._taken = take(self._module, wanted, _Given(reader), {}, {}, {})
        entries: dict[LocalParam, dict[str, Entry]] = {}
        for one in wanted:
            names = one.names if taken is None else taken.names.get(one, [])
            if any(name in reader.entries for name in names):
                entries[one] = {name: reader.entries[name] for name in names if name in reader.entries}
        self._found = _match(wanted, entries, reader, strict, taken)
        self.values["the header"] = (None, reader.digest)
        for one, mine in entries.items():  # in place, if the model has no values that a failure could lose
            self._read.append((one, torch.empty_like(one.flat, device="cpu") if one.has_values else one.flat))
            _read_piece(one, mine, self._read[-1][1])
            if one.unit is not None:
                self.values |= {name: (one.unit, sample_of(entry)) for name, entry in mine.items()}
        for one, whole in taken.values.items() if taken is not None else ():
            if one.unit is not None:
                self.values[one.name] = (one.unit, f"{whole.dtype} {digest_of(whole)}")

    @torch.no_grad()
    def commit(self) -> _IncompatibleKeys:
        """Copy the elements read into the module, and tell the units."""
        computed = {} if self._taken is None else self._taken.values
        for one, value in self._read:
            if value is not one.flat:
                one.flat.copy_(value)
        for one, whole in computed.items():
            one.flat.copy_(piece_of(one, whole))
        loaded = (*(one for one, _ in self._read), *computed)
        note_filled(self._module, {name for one in loaded for name in one.names}, self._bare)
        return self._found

    def undo(self) -> None:
        """Restore the module."""
        for one, value in self._read:
            if value is one.flat:
                blank(value)
        if self._taken is not None:
            self._taken.before.restore()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


def _match(
    wanted: list[LocalParam],
    entries: dict[LocalParam, dict[str, Entry]],
    reader: Files,
    strict: bool,
    taken: Taken | None,
) -> _IncompatibleKeys:
    """Compare names, shapes, dtypes with the files; return the names that differ. Raises: ValueError, RuntimeError."""
    if taken is not None:
        missing, unexpected = taken.missing, taken.unexpected
    else:
        missing = [one.name for one in wanted if one not in entries]
        known = {name for one in wanted for name in one.names}
        unexpected = [name for name in reader.entries if name not in known]
    for one, mine in entries.items():
        for name, entry in mine.items():
            _check(name, one, entry)
    if strict and (missing or unexpected):
        lines = []
        for kind, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                lines.append(f"{kind} key(s) in the files: " + ", ".join(f'"{name}"' for name in names) + ".")
        raise RuntimeError(" ".join(lines))
    return _IncompatibleKeys(missing, unexpected)


def _check(name: str, one: LocalParam, entry: Entry) -> None:
    if entry.shape != one.shape:
        raise ValueError(f"{entry.path}: `{name}` has shape {entry.shape}, the model's has {one.shape}")
    dtype = one.flat.dtype
    if not may_become(entry.dtype, dtype):
        raise ValueError(f"{entry.path}: `{name}` has dtype {entry.dtype_name}, which cannot be loaded into {dtype}")


def _read_piece(one: LocalParam, entries: dict[str, Entry], out: Tensor) -> None:
    """Read this rank's elements of ``one`` into ``out``, in the model's memory order; the file is row-major.

    ``entries``: name -> entry; several for a tied parameter. Raises: ValueError if their values differ.
    """
    first, *_ = entries
    for name, entry in entries.items():
        into = out if name == first else torch.empty_like(out, device="cpu")
        for box in one.dense.boxes(one.start, one.start + out.numel()):
            begin = sum(at * stride for at, stride in zip(box.offsets, row_major(one.shape), strict=True))
            entry.read_box(begin, one.dense.view(into, one.start, box))
        if into is not out and not same_bytes(into, out.to(into.device)):
            raise ValueError(f"`{first}` and `{name}` are one parameter, and have different values in the files")
