"""The index of a checkpoint: every file, box and checksum, and the values that are no tensors.

The first rank writes it last: a folder without an index is no checkpoint. The file has two lines: the first has a
checksum of the second. ``read_index`` checks all types and ranges (`schema.py`), so that its users need not.
"""

import json
import math
import os
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..fsdp.errors import FileError
from ..fsdp.states.safetensors_files import DTYPES, MOST_HEADER_BYTES, json_object, open_file
from .boxes import lies_in
from .errors import CheckpointError
from .files import SUM_BYTES, Chunk, naming, sync_folder
from .schema import INDEX, misfit

NAME = "checkpoint.json"
FORMAT, VERSION = "flatparam checkpoint", 1
MODEL, OPTIMIZER, RANKS = "model", "optimizer", "ranks"  # folders in a checkpoint
_AS_THEY_ARE = ("id", "world_size", "about", "units", "optimizer", "ranks")  # fields that are JSON
_FILE = re.compile(rf"({MODEL}|{OPTIMIZER}|{RANKS})/[\w-]+\.safetensors")


@dataclass
class Index:
    """The content of an index.

    | field | content |
    |---|---|
    | ``files`` | file -> (bytes, crc32 of its header) |
    | ``tensors`` | folder -> name -> boxes |
    | ``about`` | versions; rank 0's ``aliases``, ``modules``, ``given``, ``metadata``; ``base`` (`base.py`) |
    | ``optimizer`` | None, or ``groups``, ``optimizers``, ``classes``, ``states`` |
    | ``optimizers`` | the label of each group's optimizer |
    | ``classes`` | label -> class; absent in older checkpoints |
    | ``states`` | FQN -> key -> the form of the value, see below |
    | ``ranks`` | for each rank ``extra``, ``kept``; if unlike rank 0's, ``own``, ``own_states``, ``modules`` |
    | ``kept`` | FQN -> (first element, numel, frozen share) of the accumulated gradient |
    | ``own``, ``own_states`` | name of a tensor that no unit manages, or of its state -> name in the rank's file |
    | ``units`` | how each unit was sharded, for display |

    | form | meaning |
    |---|---|
    | ``"box"`` | a tensor like the parameter, in boxes |
    | ``"one"`` | another tensor, whole in a file of ``optimizer`` |
    | ``[value, rank]`` | an encoded value, its tensors in the file of ``rank`` |
    | ``[value, rank, True]`` | the same, and equal for all ranks' pieces of the parameter |
    | ``{"pieces": {layout: [value, rank]}}`` | one value for each layout of a piece |
    """

    id: str
    world_size: int
    about: dict[str, Any]
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    tensors: dict[str, dict[str, list[Chunk]]] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    ranks: list[dict[str, Any]] = field(default_factory=list)
    units: list[dict[str, Any]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(size for size, _ in self.files.values())

    def add_files(self, files: dict[str, Any]) -> None:
        """Add the files of one rank, from its table as JSON. Raises: ValueError naming the entry that does not fit."""
        for file, told in files.items():
            if not _FILE.fullmatch(file):
                raise ValueError(f"{file!r} is no name of a file of a checkpoint")
            self.files[file] = (told["bytes"], told["header"])
            folder = self.tensors.setdefault(file.split("/")[0], {})
            for key, (dtype, shape, offsets, sizes, begin, sums) in told["tensors"].items():
                chunk = Chunk(file, dtype, tuple(shape), tuple(offsets), tuple(sizes), begin, sums)
                _check_chunk(key, chunk, self.files[file][0])
                folder.setdefault(key, []).append(chunk)

    def files_as_json(self) -> dict[str, Any]:
        """Return all files as one table, the inverse of ``add_files``."""
        told: dict[str, Any] = {
            file: {"bytes": size, "header": header, "tensors": {}} for file, (size, header) in self.files.items()
        }
        for folder in self.tensors.values():
            for key, chunks in folder.items():
                for chunk in chunks:
                    told[chunk.file]["tensors"][key] = chunk.as_json()
        return told

    def write(self, folder: Path) -> None:
        """Write the index into ``folder`` and sync both. Raises: OSError."""
        body = {name: getattr(self, name) for name in _AS_THEY_ARE}
        write_sealed(folder / NAME, body | {"files": self.files_as_json()})
        sync_folder(folder)


def _check_chunk(key: str, chunk: Chunk, size: int) -> None:
    """Raises: ValueError for a box that exceeds its tensor or its file of ``size`` bytes, or lacks a checksum."""
    if not lies_in(chunk.shape, chunk.offsets, chunk.sizes):
        raise ValueError(f"`{key}` of shape {chunk.shape} has a box at {chunk.offsets} of sizes {chunk.sizes}")
    dtype = DTYPES.get(chunk.dtype)
    count = 0 if dtype is None else math.prod(chunk.sizes) * dtype.itemsize
    if chunk.begin + count > size:
        raise ValueError(f"`{key}` ends at byte {chunk.begin + count} of {chunk.file}, which has {size}")
    if dtype is not None and len(chunk.sums or ()) != -(-count // SUM_BYTES):
        raise ValueError(f"`{key}` has {len(chunk.sums or ())} checksums for {count} bytes")


def read_index(folder: Path) -> Index:
    """Read and check the index of ``folder``. Raises: CheckpointError naming the file and the misfit, OSError."""
    path = folder / NAME
    body = read_sealed(path)
    try:
        _check_body(body)
        index = Index(**{name: body[name] for name in _AS_THEY_ARE})
        index.add_files(body["files"])
    except ValueError as error:
        raise CheckpointError(f"{path}: expected a checkpoint's index: {error}") from error
    return index


def _check_body(body: dict[str, Any]) -> None:
    """Raises: ValueError naming the field that is missing or of another type, or lists of different lengths."""
    why = misfit(body, INDEX)
    if why is not None:
        raise ValueError(why)
    if not len(body["ranks"]) == body["world_size"] > 0:
        raise ValueError(f"it is of {body['world_size']} ranks, and has values of {len(body['ranks'])}")
    optimizer = body["optimizer"] or {"groups": []}
    labels = optimizer.get("optimizers", optimizer["groups"])
    if labels is not None and len(labels) != len(optimizer["groups"] or ()):
        raise ValueError(f"it has {len(labels)} labels of optimizers for {len(optimizer['groups'] or ())} groups")


def write_sealed(path: Path, body: Any) -> int:
    """Write a line with a checksum, then ``body`` as JSON; sync the file. Returns: the checksum. Raises: OSError."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    seal = zlib.crc32(text)
    with naming(path), open(path, "wb") as file:
        file.write(json.dumps({"format": FORMAT, "version": VERSION, "crc32": seal}).encode() + b"\n" + text + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return seal


def read_sealed(path: Path, expected: int | None = None) -> dict[str, Any]:
    """Read a file of ``write_sealed``. ``expected``: the checksum that it returned; None: not known.

    Raises: CheckpointError naming the file, OSError.
    """
    with open(open_file(path), "rb") as file:
        first = file.readline(1000)
        try:
            seal = json.loads(first)
            known = isinstance(seal, dict) and seal.get("format") == FORMAT
        except (ValueError, RecursionError):
            known = False
        if not known:
            raise CheckpointError(
                f"{path}: expected the index of a flatparam checkpoint, it begins with {first[:60]!r}"
            )
        if seal.get("version") != VERSION:
            raise CheckpointError(f"{path}: is of version {seal.get('version')!r}, this flatparam reads {VERSION}")
        size = os.fstat(file.fileno()).st_size
        text = file.read() if size <= MOST_HEADER_BYTES * 16 else b""
    if not text.endswith(b"\n") or zlib.crc32(text[:-1]) != seal.get("crc32"):
        raise CheckpointError(f"{path}: is damaged: its checksum does not fit")
    if expected not in (None, seal["crc32"]):
        raise CheckpointError(f"{path}: is another file than was written: the file system shows an old one")
    try:
        return json_object(path, text)
    except FileError as error:
        raise CheckpointError(str(error)) from error
