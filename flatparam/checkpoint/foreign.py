"""Checkpoints of others: safetensors files, and torch's distributed checkpoints, in safetensors or behind a pickle."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.tensors import row_major
from ..fsdp.safetensors_files import (
    FILE_NAME,
    INDEX_NAME,
    Entry,
    FileError,
    Files,
    open_entries,
    sample_of,
)
from .boxes import Read
from .errors import CheckpointError
from .files import NAMES, Chunk
from .reading import Look, Source
from .values import encode

METADATA = ".metadata"  # torch's, a pickle
_MODEL, _OPTIMIZER = ("model.",), ("optim.", "optimizer.")  # what is before names where a program saved both


def open_foreign(path: Path, trusted: bool) -> Source:
    """What is at ``path``. Raises: CheckpointError for what is no checkpoint, FileError, OSError."""
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder")
    if not path.is_dir():
        return WholeFiles(path)
    if (path / METADATA).exists():
        if not trusted:
            raise CheckpointError(
                f"{path / METADATA}: is a pickle, which can run anything when it is read: pass trusted=True if you "
                "know who has made it, or save with torch's HuggingFaceStorageWriter"
            )
        return Pickled(path)
    files = sorted(path.glob("*.safetensors"))
    if files and not any((path / name).exists() for name in (INDEX_NAME, FILE_NAME)):
        return Boxes(path, files)
    if not files:
        raise CheckpointError(f"{path}: is no checkpoint: it has no checkpoint.json, and no safetensors files")
    return WholeFiles(path)


class Foreign(Source):
    """Names that a program has given to model and optimizer, told apart. There are no checksums."""

    def take(self, tensors: dict[str, list[Chunk]]) -> None:
        """Sort them into ``model`` and ``optimizer``."""
        prefixed = any(name.startswith(_OPTIMIZER) for name in tensors)
        self.model, self.optimizer = {}, {}
        for name, chunks in tensors.items():
            if prefixed and name.startswith(_OPTIMIZER):
                self.optimizer[name.partition(".")[2]] = chunks
            else:
                self.model[name.removeprefix(*_MODEL) if prefixed else name] = chunks
        if not prefixed and self.model and all(name.startswith(_MODEL) for name in self.model):
            self.model = {name.removeprefix(*_MODEL): chunks for name, chunks in self.model.items()}
        self.digest = _digest(tensors)
        self._given = tensors

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


class WholeFiles(Foreign):
    """Safetensors files that have each tensor whole."""

    def __init__(self, path: Path):
        self._files = Files(path)
        entries = self._files.entries.items()
        self.take({n: [Chunk(n, e.dtype_name, e.shape, (0,) * len(e.shape), e.shape, e.begin)] for n, e in entries})
        self.digest += _digest_of(self._files.entries.values()) + self._files.digest

    def entry(self, chunk: Chunk) -> Entry:
        return self._files.entries[chunk.file]

    def close(self) -> None:
        self._files.close()


class Boxes(Foreign):
    """A folder that torch's HuggingFaceStorageWriter has written: each file has boxes of tensors."""

    def __init__(self, folder: Path, files: Iterable[Path]):
        self._closing = ExitStack()
        self._entries: dict[tuple[str, int, tuple[int, ...], str], Entry] = {}  # empty ones begin where others do
        tensors: dict[str, list[Chunk]] = {}
        try:
            for path in files:
                self._add(path, tensors)
        except BaseException:
            self.close()
            raise
        for name, chunks in tensors.items():
            if len({len(chunk.sizes) for chunk in chunks}) > 1:
                self.close()
                raise FileError(f"{folder}: the boxes of `{name}` have different numbers of dimensions")
            extents = [[o + s for o, s in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
            shape = tuple(max(ends) for ends in zip(*extents, strict=True))
            for chunk in chunks:
                chunk.shape = shape
        self.take(tensors)
        self.digest += _digest_of(self._entries.values())

    def _add(self, path: Path, tensors: dict[str, list[Chunk]]) -> None:
        header, entries = open_entries(path, self._closing)
        places = _places(path, header)
        for name, entry in entries.items():
            told = [0] * len(entry.shape) if places is None else places.get(name)
            offsets = tuple(told) if isinstance(told, list) else ()
            fits = isinstance(told, list) and len(offsets) == len(entry.shape)
            if not fits or not all(type(at) is int and at >= 0 for at in offsets):
                raise FileError(f"{path}: `{name}` has no offsets for its shape {entry.shape}")
            self._entries[str(path), entry.begin, entry.shape, entry.dtype_name] = entry
            chunk = Chunk(str(path), entry.dtype_name, entry.shape, offsets, entry.shape, entry.begin)
            tensors.setdefault(name, []).append(chunk)

    def entry(self, chunk: Chunk) -> Entry:
        return self._entries[chunk.file, chunk.begin, chunk.sizes, chunk.dtype]

    def close(self) -> None:
        self._closing.close()


def _places(path: Path, header: bytes) -> dict[str, Any] | None:
    """The offsets of boxes by name; None where tensors are whole."""
    told = json.loads(header).get("__metadata__") or {}
    try:
        text = told.get("DCP_SHARDING_INFO")
        return None if text is None else {name: place["saved_offsets"] for name, place in json.loads(text).items()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: its DCP_SHARDING_INFO is not what torch writes: {error}") from error


class Pickled(Foreign):
    """A folder that torch's FileSystemWriter has written: reading its metadata runs what is in it."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._stored: dict[tuple[str, int], Any] = {}
        self._last: tuple[tuple[str, int], Tensor] | None = None
        self._groups: dict[int, dict[str, Any]] = {}
        self._values: dict[str, dict[str, Any]] = {}  # where states that are no tensors are, by parameter and key
        self._nested = ""  # a state in a container
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
        storage = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
        for name, told in metadata.state_dict_metadata.items():
            boxes = getattr(told, "chunks", ())  # another value has none
            first = storage.get((name, boxes[0].offsets if boxes else None))
            place = metadata.planner_data.get(name, ())
            if name.startswith(_OPTIMIZER):
                if len(place) > 4 and place[1] == "state":
                    self._nested = name
                if self._take_value(place, first) or (not boxes and self._take_state(place, first)):
                    continue
            for box in boxes:
                info = storage[name, box.offsets]
                dtype = NAMES[told.properties.dtype]
                chunk = Chunk(
                    info.relative_path, dtype, tuple(told.size), tuple(box.offsets), tuple(box.sizes), info.offset
                )
                self._stored[chunk.file, chunk.begin] = info
                tensors.setdefault(name, []).append(chunk)
        return tensors

    def _take_value(self, place: tuple[Any, ...], info: Any) -> bool:
        """Of a group of an optimizer, as ``get_optimizer_state_dict`` names it, flattened or not; else False."""
        if info is None or len(place) < 2:
            return False
        if len(place) == 4 and place[1] == "param_groups":
            self._groups.setdefault(place[2], {})[place[3]] = self._load(info)
            return True
        if len(place) == 2 and str(place[1]).startswith("param_groups."):
            name, _, key = place[1].partition(".")[2].rpartition(".")
            self._groups.setdefault(name, {"params": [name]})[key] = self._load(info)
            return True
        return False

    def _take_state(self, place: tuple[Any, ...], info: Any) -> bool:
        """The same for a value in a parameter's state."""
        if info is not None and len(place) == 4 and place[1] == "state":
            self._values.setdefault(place[2], {})[place[3]] = info
            return True
        if info is not None and len(place) == 2 and str(place[1]).startswith("state."):
            name, _, key = place[1].partition(".")[2].rpartition(".")
            self._values.setdefault(name, {})[key] = info
            return True
        return False

    def told_of_optimizer(self) -> dict[str, Any] | None:
        if self._nested:
            raise CheckpointError(
                f"{self._folder}: `{self._nested}` is in a list or dict of an optimizer's state, which is not read "
                "from torch's files: load the model alone, or save with flatparam.checkpoint"
            )
        told = super().told_of_optimizer() or {"groups": None, "states": {}}
        for name, infos in self._values.items():
            for key, info in infos.items():
                tensors: dict[str, Tensor] = {}
                value = encode(self._load(info), f"state.{name}.{key}", tensors)
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
        return told

    def _load(self, info: Any) -> Any:
        path = self._folder / info.relative_path
        with open(path, "rb") as file:
            file.seek(info.offset)
            content = file.read(info.length)
        if len(content) != info.length:
            raise CheckpointError(f"{path}: ended at byte {info.offset + len(content)} while it was read")
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)

    def _tensor(self, chunk: Chunk) -> Tensor:
        key = (chunk.file, chunk.begin)
        if self._last is None or self._last[0] != key:
            self._last = key, self._load(self._stored[key]).detach().contiguous()
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
    """The same for the same values, as far as samples tell; files may be named otherwise."""
    return hashlib.sha256("".join(sorted(map(sample_of, entries))).encode()).hexdigest()


def _digest(tensors: dict[str, list[Chunk]]) -> str:
    told = sorted((name, sorted((c.offsets, c.sizes, c.dtype) for c in chunks)) for name, chunks in tensors.items())
    return hashlib.sha256(repr(told).encode()).hexdigest()
