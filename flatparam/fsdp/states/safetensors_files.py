"""Read files in the safetensors format: check the header first, then read ranges of elements into tensors.

A file has three parts: eight bytes with the length of the header (little-endian); the header, JSON that maps each name
to dtype, shape and byte range after the header; the data, row-major, without holes. An index is a JSON file whose
``weight_map`` maps each name to its file. Files come from anywhere: no number in them is used before it is checked.
This knows no models and no ranks. Loads of safetensors and checkpoints call it.
"""

import collections
import hashlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.tensors import bytes_of, row_major, span_of
from ..errors import FileError

INDEX_NAME, FILE_NAME = "model.safetensors.index.json", "model.safetensors"
MOST_HEADER_BYTES = 100_000_000  # the format's own limit
MOST_DIMS = 64  # torch's limit
CHUNK_BYTES = 2**20
SLAB_BYTES = 2**22  # read at most so many bytes at once for a box whose elements are not contiguous in the file
_SAMPLES, _SAMPLE_BYTES = 5, 1024  # digested of each tensor, to compare the files of ranks
PACKED = "F4"  # two numbers a byte: a file's shape counts numbers, torch's shape counts bytes
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu},
    PACKED: torch.float4_e2m1fn_x2,
}


class Entry(NamedTuple):
    """One tensor in an open file. ``dtype``: None if torch does not know ``dtype_name``.

    ``begin``: the position of its first byte in the file. ``descriptor``: borrowed from the ``Files`` or the stack that
    opened it.
    """

    path: Path
    descriptor: int
    dtype: torch.dtype | None
    dtype_name: str
    shape: tuple[int, ...]
    begin: int

    def read(self, start: int, out: Tensor) -> None:
        """Read elements ``[start, start + out.numel())`` into ``out``, 1-D, converted to its dtype a MiB at a time.

        Raises: FileError, OSError.
        """
        assert self.dtype is not None
        raw = torch.uint8 if self.dtype is torch.bool else self.dtype  # a byte of 2 is no bool
        direct = raw == out.dtype and out.is_cpu and out.is_contiguous()
        step = CHUNK_BYTES // raw.itemsize
        buffer = out if direct else torch.empty(min(step, out.numel()), dtype=raw, device="cpu")
        for done in range(0, out.numel(), step):
            count = min(step, out.numel() - done)
            into = out.narrow(0, done, count) if direct else buffer.narrow(0, 0, count)
            self._read_bytes(self.begin + (start + done) * raw.itemsize, into)
            if not direct:
                out.narrow(0, done, count).copy_(into if raw is self.dtype else into != 0)

    def read_box(self, begin: int, out: Tensor) -> None:
        """Read the box of ``out``'s shape whose first element is element number ``begin`` of the tensor, row-major.

        Raises: FileError, OSError.
        """
        strides = row_major(self.shape)
        span = span_of(out.shape, strides)
        if span == out.numel() and out.is_contiguous():
            self.read(begin, out.view(-1))
        elif span * out.itemsize <= SLAB_BYTES:
            buffer = torch.empty(span, dtype=out.dtype, device="cpu")
            self.read(begin, buffer)
            out.copy_(buffer.as_strided(out.shape, strides))
        else:
            d = next(d for d, size in enumerate(out.shape) if size > 1)
            step = max(1, SLAB_BYTES // (strides[d] * out.itemsize))
            for i in range(0, out.shape[d], step):
                self.read_box(begin + i * strides[d], out.narrow(d, i, min(step, out.shape[d] - i)))

    def _read_bytes(self, position: int, into: Tensor) -> None:
        memory, done = bytes_of(into), 0
        while done < len(memory):
            count = os.preadv(self.descriptor, [memory[done:]], position + done)
            if count == 0:
                raise FileError(f"{self.path}: ended at byte {position + done} while it was read")
            done += count


class Files:
    """The tensors of one or more files: ``entries`` maps names to them. The files stay open until ``close()``.

    Args: ``where``: a file, an index, a folder with one of them under its usual name, or several files.
    Raises: FileError naming the file, if it is not in the format; OSError. No file is left open then.
    """

    def __init__(self, where: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]):
        self.entries: dict[str, Entry] = {}
        self._headers: list[bytes] = []
        with ExitStack() as opened:
            paths, mapped = _find(where)
            for path in paths:
                names = None if mapped is None else {name for name, file in mapped.items() if file == path}
                self._add(path, names, opened)
            self._open = opened.pop_all()

    def close(self) -> None:
        self._open.close()

    @property
    def digest(self) -> str:
        """A hash of the headers and of the names in ``entries``, whatever the order of the files. No values."""
        parts = [*sorted(self._headers), *sorted(name.encode("utf-8", "surrogatepass") for name in self.entries)]
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()

    def _add(self, path: Path, names: set[str] | None, closing: ExitStack) -> None:
        header, found = open_entries(path, closing)
        self._headers.append(hashlib.sha256(header).digest())
        for name in sorted(names or ()):
            if name not in found:
                raise FileError(f"{path}: the index says that `{name}` is in it, it is not")
        for name, entry in found.items():
            if names is not None and name not in names:
                continue
            if name in self.entries:
                raise FileError(f"{path}: `{name}` is in {self.entries[name].path}, too")
            self.entries[name] = entry


def sample_of(entry: Entry) -> str:
    """Return a digest of up to five samples of one KiB. Raises: OSError."""
    size = math.prod(entry.shape) * (entry.dtype.itemsize if entry.dtype is not None else 1)
    last = max(0, size - _SAMPLE_BYTES)
    digest = hashlib.sha256()
    for begin in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
        digest.update(os.pread(entry.descriptor, min(_SAMPLE_BYTES, size - begin), entry.begin + begin))
    return digest.hexdigest()


def open_file(path: Path) -> int:
    """Return a new descriptor. Raises: FileError if ``path`` is no regular file (a pipe would block); OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileError(f"{path}: expected a file")
    return descriptor


def usual_file(folder: Path) -> Path | None:
    """Return the index, or else the file, that ``folder`` has under its usual name; None: it has neither."""
    return next((folder / name for name in (INDEX_NAME, FILE_NAME) if (folder / name).exists()), None)


def _find(where: Any) -> tuple[list[Path], dict[str, Path] | None]:
    """Return ``(files, name -> file)``; None for the second if there is no index."""
    if not isinstance(where, str | os.PathLike):
        return [Path(path) for path in where], None
    path = Path(where)
    if path.is_dir():
        usual = usual_file(path)
        if usual is None:
            raise FileError(f"{path}: has neither {INDEX_NAME} nor {FILE_NAME}; name the files")
        path = usual
    if path.suffix != ".json":
        return [path], None
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_HEADER_BYTES:
        raise FileError(f"{path}: expected a file of at most {MOST_HEADER_BYTES} bytes")
    index = json_object(path, path.read_bytes())
    mapping = index.get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(file, str) for file in mapping.values()):
        raise FileError(f"{path}: expected `weight_map` to map names to files")
    for file in mapping.values():
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file or not _is_file_name(file):
            raise FileError(f"{path}: expected files of the same folder, got {file!r}")
    files = {name: path.parent / file for name, file in mapping.items()}
    return sorted(set(files.values())), files


def _is_file_name(text: str) -> bool:
    """Whether ``text`` can be a file name: the file system may have no bytes for a lone surrogate."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def json_object(path: Path, text: bytes | str) -> dict[str, Any]:
    """Parse ``text``, the content of ``path``. Raises: FileError unless it is a JSON object without duplicate names."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
            raise FileError(f"{path}: `{twice}` is in it twice")
        return found

    def unknown(constant: str) -> None:
        raise FileError(f"{path}: {constant} is no value of JSON")

    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        found = json.loads(text, object_pairs_hook=unique, parse_constant=unknown)
    except (ValueError, RecursionError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path}: expected JSON: {error}") from error
    if not isinstance(found, dict):
        raise FileError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def open_entries(path: Path, closing: ExitStack) -> tuple[bytes, dict[str, Entry]]:
    """Open a file; return its header and its tensors. ``closing`` owns the descriptor.

    Raises: FileError for a wrong header, or unless the tensors fill the file without holes and overlaps; OSError.
    """
    descriptor = open_file(path)
    closing.callback(os.close, descriptor)
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
        raise FileError(f"{path}: expected a safetensors file: a header of {length} bytes in a file of {size}")
    header = os.pread(descriptor, length, 8)
    if len(header) != length:
        raise FileError(f"{path}: ended while its header was read")
    found, ranges, begin = {}, [], 8 + length
    for name, told in json_object(path, header).items():
        if name == "__metadata__":
            continue
        fields = told if isinstance(told, dict) else {}
        shape, offsets = _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
        dtype_name = fields.get("dtype")
        if shape is None or offsets is None or len(offsets) != 2 or not isinstance(dtype_name, str):
            raise FileError(f"{path}: `{name}` has {reprlib.repr(told)} where dtype, shape and data_offsets should be")
        dtype = DTYPES.get(dtype_name)
        if dtype_name == PACKED:
            if not shape or shape[-1] % 2:
                raise FileError(f"{path}: `{name}` of shape {shape} has an odd number of {PACKED} in a row")
            shape = (*shape[:-1], shape[-1] // 2)
        if dtype is not None and offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
            raise FileError(
                f"{path}: `{name}` of shape {shape} and dtype {dtype_name} should have "
                f"{math.prod(shape) * dtype.itemsize} bytes, its data_offsets are {offsets}"
            )
        if not is_shape(shape):
            raise FileError(f"{path}: `{name}` has shape {shape}, and no tensor of torch can")
        ranges.append((offsets[0], offsets[1], name))
        found[name] = Entry(path, descriptor, dtype, dtype_name, shape, begin + offsets[0])
    end = 0
    for first, last, name in sorted(ranges):
        if first != end or last < first:
            raise FileError(
                f"{path}: the data of `{name}` should begin at byte {end}, its data_offsets are {first, last}"
            )
        end = last
    if begin + end != size:
        raise FileError(f"{path}: expected {begin + end} bytes, it has {size}")
    return header, found


def _sizes(values: Any) -> tuple[int, ...] | None:
    """Return ``values`` as a tuple, if it is a list of at most 64 sizes (see ``is_size``); else None."""
    fits = isinstance(values, list) and len(values) <= MOST_DIMS and all(map(is_size, values))
    return tuple(values) if fits else None


def is_size(value: Any) -> bool:
    """Whether ``value`` is an int (no bool) in [0, 2**63)."""
    return type(value) is int and 0 <= value < 2**63


def is_shape(sizes: Sequence[Any]) -> bool:
    """Whether a tensor can have these sizes. torch counts bytes, and strides of empty tensors too, in 64 bits."""
    return len(sizes) <= MOST_DIMS and all(map(is_size, sizes)) and math.prod(size or 1 for size in sizes) < 2**59
