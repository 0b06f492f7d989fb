"""Read checkpoints that flatparam did not write, as a ``Source`` (`reading.py`).

| kind | class |
|---|---|
| safetensors files with whole tensors | ``WholeFiles`` |
| torch's distributed checkpoint in safetensors files | ``Boxes`` |
| torch's distributed checkpoint with a pickled ``.metadata``; only if the user trusts it | ``Pickled`` |

There are no checksums. Nothing in a file is believed before it is checked.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import reprlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.tensors import row_major
from ..fsdp.errors import FileError
from ..fsdp.states.safetensors_files import (
    Entry,
    Files,
    is_shape,
    is_size,
    json_object,
    open_entries,
    open_file,
    sample_of,
    usual_file,
)
from .boxes import Read, lies_in
from .errors import CheckpointError
from .files import NAMES, Chunk
from .reading import Look, Source
from .schema import OPTIMIZER, misfit
from .values import encode

METADATA = ".metadata"  # torch's, a pickle
_MODEL, _OPTIMIZER = ("model.",), ("optim.", "optimizer.")  # prefixes in checkpoints that have both


def open_foreign(path: Path, trusted: bool) -> Source:
    """Open ``path``. Raises: CheckpointError, if it is no checkpoint, or has a pickle without ``trusted``; OSError."""
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder")
    if not path.is_dir():
        return WholeFiles(path)
    if (path / METADATA).exists():
        if not trusted:
            raise CheckpointError(
                f"{path / METADATA}: is a pickle, and reading a pickle can run any code: pass trusted=True if you "
                "trust its author, or save with torch's HuggingFaceStorageWriter"
            )
        return Pickled(path)
    files = sorted(path.glob("*.safetensors"))
    if files and usual_file(path) is None:
        return Boxes(path, files)
    if not files:
        raise CheckpointError(f"{path}: is no checkpoint: it has no checkpoint.json, and no safetensors files")
    return WholeFiles(path)


class Foreign(Source):
    """Tensors of model and optimizer, told apart by the prefixes of their names. There are no checksums."""

    _closing: Files | ExitStack | None = None  # owns the open files

    def close(self) -> None:
        if self._closing is not None:
            self._closing.close()

    def take(self, tensors: dict[str, list[Chunk]]) -> None:
        """Sort ``tensors`` into ``model`` and ``optimizer``, without prefixes.

        A prefix ``model.`` is removed if there is an optimizer or if all names have it; ``fit`` may undo that.
        """
        model = {name: chunks for name, chunks in tensors.items() if not name.startswith(_OPTIMIZER)}
        self.optimizer = {name.partition(".")[2]: chunks for name, chunks in tensors.items() if name not in model}
        is_cut = bool(self.optimizer) or all(name.startswith(_MODEL) for name in model)
        self.model = {name.removeprefix(*_MODEL) if is_cut else name: chunks for name, chunks in model.items()}
        self.digest = _digest(tensors)
        self._given = tensors

    def entry(self, chunk: Chunk) -> Entry:
        assert isinstance(chunk, InFile)
        assert chunk.opened is not None
        return chunk.opened

    def fit(self, names: set[str]) -> None:
        if len(names & self._given.keys()) > len(names & self.model.keys()):
            self.model, self.optimizer = self._given, {}

    def told_of_optimizer(self) -> dict[str, Any] | None:
        states: dict[str, dict[str, Any]] = {}
        for name, chunks in self.optimizer.items():
            prefix, _, rest = name.partition(".")
            param, _, key = rest.rpartition(".")
            if prefix == "state":
                whole = self.model.get(param)
                same = whole is not None and whole[0].shape == chunks[0].shape
                states.setdefault(param, {})[key] = "box" if same and (chunks[0].shape or key != "step") else "one"
        return {"groups": None, "states": states} if states else None


@dataclass(slots=True)
class InFile(Chunk):
    """A box in an open safetensors file. ``opened``: borrowed from the source."""

    opened: Entry | None = None

    @classmethod
    def of(cls, entry: Entry, offsets: tuple[int, ...]) -> InFile:
        return cls(str(entry.path), entry.dtype_name, entry.shape, offsets, entry.shape, entry.begin, None, entry)


def whole_tensors(files: Files) -> dict[str, list[Chunk]]:
    """Map each name in ``files`` to its tensor as one box."""
    return {name: [InFile.of(entry, (0,) * len(entry.shape))] for name, entry in files.entries.items()}


class WholeFiles(Foreign):
    """Safetensors files with whole tensors."""

    def __init__(self, path: Path):
        files = self._closing = Files(path)
        self.take(whole_tensors(files))
        self.digest += _digest_of(files.entries.values()) + files.digest


class Boxes(Foreign):
    """A folder that torch's HuggingFaceStorageWriter has written, with boxes of tensors."""

    def __init__(self, folder: Path, files: Iterable[Path]):
        tensors: dict[str, list[Chunk]] = {}
        with ExitStack() as closing:
            for path in files:
                self._add(path, closing, tensors)
            for name, chunks in tensors.items():
                if len({len(chunk.sizes) for chunk in chunks}) > 1:
                    raise FileError(f"{folder}: the boxes of `{name}` have different numbers of dimensions")
                extents = [[o + s for o, s in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
                shape = tuple(max(ends) for ends in zip(*extents, strict=True))
                if not is_shape(shape):
                    what = f"of a tensor of shape {shape}, which none can have"
                    raise FileError(f"{folder}: the boxes of `{name}` are {what}")
                for chunk in chunks:
                    chunk.shape = shape
            self._closing = closing.pop_all()
        self.take(tensors)
        self.digest += _digest_of(self.entry(chunk) for chunks in tensors.values() for chunk in chunks)

    def _add(self, path: Path, closing: ExitStack, tensors: dict[str, list[Chunk]]) -> None:
        header, entries = open_entries(path, closing)
        places = _places(path, header)
        for name, entry in entries.items():
            told = [0] * len(entry.shape) if places is None else places.get(name)
            offsets = tuple(told) if isinstance(told, list) else ()
            fits = isinstance(told, list) and len(offsets) == len(entry.shape)
            if not fits or not all(map(is_size, offsets)):
                raise FileError(f"{path}: `{name}` has no offsets for its shape {entry.shape}")
            tensors.setdefault(name, []).append(InFile.of(entry, offsets))


def _places(path: Path, header: bytes) -> dict[str, Any] | None:
    """Return name -> offsets of its box, from the header; None: the tensors are whole. Raises: FileError."""
    told = json.loads(header).get("__metadata__") or {}
    if not isinstance(told, dict):
        raise FileError(f"{path}: its __metadata__ is {reprlib.repr(told)}, expected an object")
    text = told.get("DCP_SHARDING_INFO")
    if text is None:
        return None
    places = json_object(path, text) if isinstance(text, str) else {"": text}
    for name, place in places.items():
        if not isinstance(place, dict) or "saved_offsets" not in place:
            raise FileError(
                f"{path}: its DCP_SHARDING_INFO is not what torch writes: `{name}` has {reprlib.repr(place)}, expected "
                "saved_offsets"
            )
    return {name: place["saved_offsets"] for name, place in places.items()}


class Place(NamedTuple):
    """The range of bytes in a file where torch.save has written one value."""

    file: str
    begin: int
    length: int


def _place(name: str, info: Any) -> Place:
    """Convert an entry of torch's metadata. Raises: ValueError if it does not fit; AttributeError if it is no entry."""
    place = Place(info.relative_path, info.offset, info.length)
    if not (isinstance(place.file, str) and is_size(place.begin) and is_size(place.length)):
        raise ValueError(f"`{name}` is at {tuple(place)}, expected a file, a byte and a number of bytes")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"`{name}` was transformed by {info.transform_descriptors}: save it without")
    return place


@dataclass(slots=True)
class Stored(Chunk):
    """A box that torch.save has written as one object: ``length`` bytes from ``begin`` on."""

    length: int = 0


class Pickled(Foreign):
    """A folder that torch's FileSystemWriter has written. Unpickling its metadata can run code.

    The values themselves are read with ``weights_only=True``. Files are opened for each read.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._last: tuple[Chunk, Tensor] | None = None
        self._groups: dict[int, dict[str, Any]] = {}
        self._values: dict[str, dict[str, Place]] = {}  # FQN -> key -> place of a state that is no tensor
        self._nested = ""  # the name of a state in a list or dict, which is refused
        try:
            with open(folder / METADATA, "rb") as file:
                tensors = self._tensors_of(pickle.load(file))
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # a pickle can raise anything
            what = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{folder / METADATA}: is not what torch writes: {what}") from error
        self.take(tensors)

    def _tensors_of(self, metadata: Any) -> dict[str, list[Chunk]]:
        tensors: dict[str, list[Chunk]] = {}
        storage = {(index.fqn, index.offset): _place(index.fqn, info) for index, info in metadata.storage_data.items()}
        for name, told in metadata.state_dict_metadata.items():
            boxes = getattr(told, "chunks", ())  # a value that is no tensor has none
            if not isinstance(name, str):
                raise TypeError(f"a name is {name!r}")
            first = storage.get((name, boxes[0].offsets if boxes else None))
            path = metadata.planner_data.get(name, ())
            if name.startswith(_OPTIMIZER):
                if len(path) > 4 and path[1] == "state":
                    self._nested = name
                if first is not None and self._take_value(path, first, bool(boxes)):
                    continue
            for box in boxes:
                place = storage[name, box.offsets]
                dtype = NAMES[told.properties.dtype]
                shape, offsets, sizes = tuple(told.size), tuple(box.offsets), tuple(box.sizes)
                fits = is_shape(shape) and is_shape(sizes) and all(map(is_size, offsets))
                if not (fits and lies_in(shape, offsets, sizes)):
                    raise ValueError(f"`{name}` of shape {shape} has a box at {offsets} of sizes {sizes}")
                chunk = Stored(place.file, dtype, shape, offsets, sizes, place.begin, None, place.length)
                tensors.setdefault(name, []).append(chunk)
        return tensors

    def _take_value(self, path: tuple[Any, ...], place: Place, is_tensor: bool) -> bool:
        """Load a setting of an optimizer's group, or note the place of a state that is no tensor.

        Returns: whether ``path`` is one of both, in torch's nested form or in its flat form ``state.<FQN>.<key>``.
        """
        if len(path) not in (2, 4):
            return False
        kind, name, key = path[1], path[-2], str(path[-1])
        if len(path) == 2:
            kind, _, rest = key.partition(".")
            name, _, key = rest.rpartition(".")
        if not key:  # an empty dict
            return False
        if kind == "param_groups":
            self._groups.setdefault(name, {"params": [name]} if len(path) == 2 else {})[key] = self._load(place)
        elif kind == "state" and not is_tensor:
            self._values.setdefault(str(name), {})[key] = place
        else:
            return False
        return True

    def told_of_optimizer(self) -> dict[str, Any] | None:
        if self._nested:
            raise CheckpointError(
                f"{self._folder}: `{self._nested}` is in a list or dict of an optimizer's state, which is not read "
                "from torch's files: load the model alone, or save with flatparam.checkpoint"
            )
        told = super().told_of_optimizer() or {"groups": None, "states": {}}
        for name, places in self._values.items():
            for key, place in places.items():
                tensors: dict[str, Tensor] = {}
                value = encode(self._load(place), f"state.{name}.{key}", tensors)
                if tensors:
                    raise CheckpointError(f"{self._folder}: `{min(tensors)}` is pickled together with other values")
                told["states"].setdefault(name, {})[key] = [value, 0]
        if not told["states"]:
            return None
        groups = list(self._groups.values())
        if groups and all("params" in group for group in groups):
            left_out = ("params", "param_names")
            told["groups"] = [
                [{key: value for key, value in group.items() if key not in left_out}, group["params"]]
                for group in groups
            ]
        why = misfit(told, OPTIMIZER)
        if why is not None:
            raise CheckpointError(f"{self._folder / METADATA}: is not what torch writes: the optimizer's state{why}")
        return told

    def _load(self, place: Place) -> Any:
        path = self._folder / place.file
        with open(open_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if place.begin + place.length > size:
                raise CheckpointError(
                    f"{path}: expected {place.length} bytes from {place.begin} on, it has {size} bytes"
                )
            file.seek(place.begin)
            content = io.BytesIO(file.read(place.length))
        try:
            return torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:  # the bytes decide its class
            raise CheckpointError(
                f"{path}: the value that torch.save has written at byte {place.begin} cannot be read: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error

    def _tensor(self, chunk: Chunk) -> Tensor:
        if self._last is None or self._last[0] is not chunk:
            assert isinstance(chunk, Stored)
            found = self._load(Place(chunk.file, chunk.begin, chunk.length))
            if not isinstance(found, Tensor) or found.layout != torch.strided:
                raise CheckpointError(
                    f"{self.path_of(chunk)}: expected the tensor `{self.name_of(chunk)}` at byte {chunk.begin}, got a "
                    f"{type(found).__name__}"
                )
            self._last = chunk, found.detach().contiguous()
        return self._last[1]

    def check(self, chunk: Chunk, begin: int, end: int, look: Look | None) -> int:
        tensor = self._tensor(chunk)
        if tuple(tensor.shape) != chunk.sizes or NAMES.get(tensor.dtype) != chunk.dtype:
            raise CheckpointError(
                f"{self._folder / chunk.file}: `{self.name_of(chunk)}` has shape {tuple(tensor.shape)} and dtype "
                f"{tensor.dtype} there, the metadata say {chunk.sizes} and {chunk.dtype}"
            )
        if look is not None:
            look(chunk, tensor)
        return end - begin

    def path_of(self, chunk: Chunk) -> Path:
        return self._folder / chunk.file

    def read(self, read: Read) -> None:
        strides = row_major(read.chunk.sizes)
        tensor = self._tensor(read.chunk)
        read.out.copy_(tensor.as_strided(read.out.shape, strides, tensor.storage_offset() + read.begin))


def _digest_of(entries: Iterable[Entry]) -> str:
    """Return a digest of samples of all tensors, whatever the names of the files."""
    return hashlib.sha256("".join(sorted(map(sample_of, entries))).encode()).hexdigest()


def _digest(tensors: dict[str, list[Chunk]]) -> str:
    told = sorted((name, sorted((c.offsets, c.sizes, c.dtype) for c in chunks)) for name, chunks in tensors.items())
    return hashlib.sha256(repr(told).encode()).hexdigest()
