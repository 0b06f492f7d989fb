"""Loading safetensors files into a wrapped model: each rank reads what its own shards hold."""

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

    A collective call. Each rank reads the bytes of its own pieces and converts them a MiB at a time; parameters
    that no unit manages, and buffers, are read whole. All ranks load, or none: files are checked and read before
    anything is changed, for which a model that has values needs its shards a second time, in host memory, and one made
    with ``defer_init`` nothing. Hooks and overrides of modules that load run as in ``module.load_state_dict()``; no
    parameter is gathered for them.

    Args: ``files``: a file, an index of several (``*.index.json``), a folder that holds one under its usual name, or
    several files. Names are those of the bare model, without units, compiled modules and DDP; one of a tied parameter's
    is enough. A tensor is converted from a floating dtype to another, never from or to another kind. ``strict``: every
    name of the model must be there, and no other.
    Returns: ``missing_keys`` and ``unexpected_keys``.
    Raises: RuntimeError on every rank, naming the rank and its error: missing or unexpected names, another shape or
    kind of dtype, a file that is not in the format or cannot be read, other files on other ranks, a model in the
    middle of a step, a hook that computes with a parameter.
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
        error = None  # it has this frame, which has the model
        loading.close()
    return loading.commit()


class _Given(Foreign):
    """The tensors of some files under their own names."""

    def __init__(self, files: Files):
        self._files = files
        self.model, self.optimizer = whole_tensors(files), {}


class _Loading:
    """``values``: what all ranks must have alike."""

    def __init__(self, module: nn.Module):
        self.values: Values = {}
        self._module = module
        self._bare = bare_names(module)
        self._read: list[tuple[LocalParam, Tensor]] = []  # what was read, where it goes, or beside it
        self._reader: Files | None = None
        self._taken: Taken | None = None
        self._found = _IncompatibleKeys([], [])

    def plan(self, files: Paths, strict: bool) -> None:
        """Read what is here. Raises: FileError, CheckpointError, ValueError, RuntimeError, OSError; see ``undo``."""
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
        for one, mine in entries.items():  # into its place, if there are no values that a failure could take
            self._read.append((one, torch.empty_like(one.flat, device="cpu") if one.has_values else one.flat))
            _read_piece(one, mine, self._read[-1][1])
            if one.unit is not None:
                self.values |= {name: (one.unit, sample_of(entry)) for name, entry in mine.items()}
        for one, whole in taken.values.items() if taken is not None else ():
            if one.unit is not None:
                self.values[one.name] = (one.unit, f"{whole.dtype} {digest_of(whole)}")

    @torch.no_grad()
    def commit(self) -> _IncompatibleKeys:
        """Let the module have what was read."""
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
        """Let the module be as it was."""
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
    """Check every tensor that is to be read against its file. Raises: ValueError, RuntimeError."""
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
    """Elements of a file, which is row-major, in the order of the model's memory.

    Raises: ValueError if two names of one parameter have different values in the files.
    """
    first, *_ = entries
    for name, entry in entries.items():
        into = out if name == first else torch.empty_like(out, device="cpu")
        for box in one.dense.boxes(one.start, one.start + out.numel()):
            begin = sum(at * stride for at, stride in zip(box.offsets, row_major(one.shape), strict=True))
            entry.read_box(begin, one.dense.view(into, one.start, box))
        if into is not out and not same_bytes(into, out.to(into.device)):
            raise ValueError(f"`{first}` and `{name}` are one parameter, and have different values in the files")
