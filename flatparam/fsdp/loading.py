"""Loading safetensors files into a wrapped model: each rank reads what its own shards hold."""

import hashlib
import os
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from ..common.tensors import row_major
from ..common.torch_private import _IncompatibleKeys
from .deferred import blank
from .held import Held, held_by, refuse_forms, unit_paths
from .names import clean_tensor_name, join, printable
from .order import gather_objects
from .originals import same_bytes
from .posts import Exchange
from .safetensors_files import DTYPES, PACKED, Entry, Files, sample_of
from .unit import Unit, units_of
from .wrapper import Wrapper

Values = dict[str, tuple[Unit | None, str]]  # by name: what has it, and a digest of what is loaded into it
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def load_safetensors(module: nn.Module, files: Paths, *, strict: bool = True) -> _IncompatibleKeys:
    """Load parameters and buffers from safetensors files straight into the shards of the units in ``module``.

    A collective call. Each rank reads the bytes of its own pieces and converts them a MiB at a time; parameters
    that no unit manages, and buffers, are read whole. All ranks load, or none: files are checked and read before
    anything is changed, for which a model that has values needs its shards a second time, in host memory, and one made
    with ``defer_init`` nothing.

    Args: ``files``: a file, an index of several (``*.index.json``), a folder that holds one under its usual name, or
    several files. Names are those of the unwrapped model; one of a tied parameter's is enough. A tensor is converted
    from a floating dtype to another, never from or to another kind. ``strict``: every name of the model must be there,
    and no other.
    Returns: ``missing_keys`` and ``unexpected_keys``.
    Raises: RuntimeError on every rank, naming the rank and its error: missing or unexpected names, another shape or
    kind of dtype, a file that is not in the format or cannot be read, other files on other ranks, a model in the
    middle of a step.
    """
    units = list(units_of(module.modules()))
    found: _IncompatibleKeys | None = None
    read: list[tuple[Held, Tensor]] = []
    reader: Files | None = None
    values: Values = {}
    error: Exception | None = None
    try:
        try:
            for inner in module.modules():
                if isinstance(inner, Wrapper):
                    inner._check_idle_here("load_safetensors")
            wanted = list(held_by(module))
            refuse_forms(wanted, "load_safetensors", "load it before it is parallelized, or by a state dict")
            reader = Files(files)
            found = _match(wanted, reader, strict)
            for one in wanted:
                names = [name for name in one.names if name in reader.entries]
                if names:  # into its place, if there are no values that a failure could take
                    read.append((one, torch.empty_like(one.flat, device="cpu") if one.has_values else one.flat))
                    _read_piece(one, [reader.entries[name] for name in names], names, read[-1][1])
            shared = {name: unit for name, unit in units_by_name(wanted).items() if name in reader.entries}
            values["the header"] = (None, reader.digest)
            values |= {name: (unit, sample_of(reader.entries[name])) for name, unit in shared.items()}
        except Exception as caught:
            error = caught
        said = None if error is None else f"{type(error).__name__}: {error}"
        agree_on_loading("load_safetensors", units, said, values)
    except BaseException as failure:
        for one, value in read:
            if value is one.flat:
                blank(value)
        raise failure from error
    finally:
        error = None  # it has this frame, which has the model
        if reader is not None:
            reader.close()
    with torch.no_grad():
        for one, value in read:
            if value is not one.flat:
                one.flat.copy_(value)
    assert found is not None
    assert reader is not None
    note_filled(module, reader.entries)
    return found


def note_filled(module: nn.Module, names: Container[str], name_of: Callable[[str], str] = clean_tensor_name) -> None:
    """Let the units in ``module`` know that their parameters called ``names`` have values.

    ``name_of``: gives each name in ``module`` the one that it has in ``names``.
    """
    for unit, paths in unit_paths(module).items():
        others = unit.without(partial(_is_in, names, name_of, paths))
        unit.filled(others)
        unit.loaded(others)


def _is_in(names: Container[str], name_of: Callable[[str], str], paths: list[str], fqn: str) -> bool:
    return any(name_of(join(path, fqn)) in names for path in paths)


def _match(wanted: list[Held], files: Files, strict: bool) -> _IncompatibleKeys:
    """Check every tensor that is to be read against its file. Raises: ValueError, RuntimeError."""
    missing = [one.names[0] for one in wanted if not any(name in files.entries for name in one.names)]
    known = {name for one in wanted for name in one.names}
    unexpected = [name for name in files.entries if name not in known]
    for one in wanted:
        for name in one.names:
            if name in files.entries:
                _check(name, one, files.entries[name])
    if strict and (missing or unexpected):
        lines = []
        for kind, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                lines.append(f"{kind} key(s) in the files: " + ", ".join(f'"{name}"' for name in names) + ".")
        raise RuntimeError(" ".join(lines))
    return _IncompatibleKeys(missing, unexpected)


def _check(name: str, one: Held, entry: Entry) -> None:
    if entry.shape != one.shape:
        raise ValueError(f"{entry.path}: `{name}` has shape {entry.shape}, the model's has {one.shape}")
    dtype = one.flat.dtype
    if not may_become(entry.dtype, dtype):
        raise ValueError(f"{entry.path}: `{name}` has dtype {entry.dtype_name}, which cannot be loaded into {dtype}")


def _read_piece(one: Held, entries: list[Entry], names: list[str], out: Tensor) -> None:
    """Elements of a file, which is row-major, in the order of the model's memory.

    Raises: ValueError if two names of one parameter have different values in the files.
    """
    for entry, name in zip(entries, names, strict=True):
        into = out if name == names[0] else torch.empty_like(out, device="cpu")
        for box in one.dense.boxes(one.start, one.start + out.numel()):
            begin = sum(at * stride for at, stride in zip(box.offsets, row_major(one.shape), strict=True))
            entry.read_box(begin, one.dense.view(into, one.start, box))
        if into is not out and not same_bytes(into, out.to(into.device)):
            raise ValueError(f"`{names[0]}` and `{name}` are one parameter, and have different values in the files")


def kind_of(dtype: torch.dtype) -> str:
    """A value of one kind is never converted to another."""
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def may_become(source: torch.dtype | None, dtype: torch.dtype) -> bool:
    """Whether what a file has in ``source`` (None: torch has no such) may be loaded into ``dtype``.

    torch converts no packed numbers.
    """
    packed = DTYPES.get(PACKED)
    if source == dtype or source is None or packed in (source, dtype):
        return source == dtype
    return kind_of(source) == kind_of(dtype) != "integer"


def units_by_name(held: Iterable[Held]) -> dict[str, Unit]:
    """The unit of each parameter that has one, by its names in the unwrapped model."""
    return {name: one.unit for one in held if one.unit is not None for name in one.names}


def agree_on_loading(what: str, units: list[Unit], error: str | None, values: Values) -> None:
    """Raises: RuntimeError on every rank that shares a unit with one that has failed, or has read other ``values``."""
    me = dist.get_rank() if dist.is_initialized() else 0
    failed = (me, error, None) if error is not None else None
    groups: dict[int, tuple[Any, set[Unit]]] = {}
    for unit in units:
        for group in unit.options.placement.compared:
            groups.setdefault(id(group), (group, set()))[1].add(unit)
    for group, sharing in [*groups.values(), *groups.values()]:  # twice: what a rank learns in one it tells in the next
        here = {name: value for name, (unit, value) in values.items() if unit is None or unit in sharing}
        digest = hashlib.sha256(repr(sorted(here.items())).encode()).hexdigest()
        everyone = gather_objects(Exchange.LOADS, failed or (me, None, digest), group)
        failed = next((other for other in everyone if other[1] is not None), None)
        if failed is None and len({other[2] for other in everyone}) > 1:
            ranks = [other[0] for other in everyone]
            failed = _first_difference(ranks, gather_objects(Exchange.LOADS, here, group))
    if failed is not None:
        raise RuntimeError(printable(f"{what}: nothing was loaded: rank {failed[0]}: {failed[1]}"))


def _first_difference(ranks: list[int], everyone: list[dict[str, str]]) -> tuple[int, str, None]:
    first = everyone[0]
    for rank, other in zip(ranks, everyone, strict=True):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                said = f"`{name}` differs" if name != "the header" else "their headers differ"
                return rank, f"what it loads is not what rank {ranks[0]} loads: {said}", None
    raise AssertionError("the ranks load the same, but have other digests of it")
