"""Open, verify and export a checkpoint of any kind, without a model and without other ranks. No collective calls.

The command line and loads use ``open_source``.
"""

import math
import os
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch

from .boxes import check_whole
from .errors import CheckpointError, naming_checkpoint
from .files import Chunk, Part, sync_folder, write_file
from .foreign import open_foreign
from .index import NAME
from .progress import Meter, Summary
from .reading import Checkpoint, Look, Source, refuse_not_finite

TIED = ("one", "all")


def open_source(path: str | os.PathLike[str], trusted: bool = False) -> Source:
    """Open a checkpoint of flatparam, of torch, or of safetensors files. The caller closes it.

    ``trusted``: allow torch's pickle. Raises: CheckpointError, FileError, OSError.
    """
    where = Path(os.path.abspath(path))
    return Checkpoint(where) if (where / NAME).exists() else open_foreign(where, trusted)


@contextmanager
def opened(path: str | os.PathLike[str], trusted: bool) -> Iterator[Source]:
    """Open a checkpoint for the block; its CheckpointErrors name ``path``. Raises: as ``open_source``."""
    with closing(open_source(path, trusted)) as source, naming_checkpoint(Path(path)):
        yield source


def tensors_of(source: Source) -> Iterator[tuple[str, str, list[Chunk]]]:
    """Yield ``(folder, name, boxes)`` of each tensor. Raises: CheckpointError unless its boxes cover it once."""
    for folder, tensors in (("model", source.model), ("optimizer", source.optimizer)):
        for name, chunks in tensors.items():
            check_whole(name, chunks)
            yield folder, name, chunks


def verify(path: str | os.PathLike[str], *, check_finite: bool = False, trusted: bool = False) -> Summary:
    """Read every byte of a checkpoint and compare it with its checksums. No collective call.

    Files that flatparam did not write have no checksums: they are only read, and the result's ``id`` is None.
    ``check_finite``: refuse NaN and infinities. Raises: CheckpointError naming file and tensor, FileError, OSError.
    """
    meter = Meter("verify", False)
    with opened(path, trusted) as source:
        only_read: Look | None = None if source.index else lambda chunk, values: None
        look = partial(refuse_not_finite, source) if check_finite else only_read
        of_all = ((name, chunks, look) for _, name, chunks in tensors_of(source))
        for name, chunks, seen_by in (*of_all, *((name, chunks, None) for name, chunks in source.own.items())):
            for chunk in chunks:
                size = math.prod(chunk.sizes) * chunk.torch_dtype(name).itemsize
                meter.add(source.check(chunk, 0, size, seen_by))
    return Summary(str(path), source.index.id if source.index else None, meter.bytes, meter.bytes, meter.close())


def export(
    path: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    tied: str = "one",
    trusted: bool = False,
    progress: bool = False,
) -> Summary:
    """Write the model of a checkpoint as one safetensors file of whole tensors, one tensor in memory at a time.

    No collective call. The data go to a file beside ``file``, which then takes its name and replaces an older one.
    If writing fails, ``file`` is as before.

    Args: ``tied``: ``"one"`` writes a tied parameter once, under the first of its sorted names; the header's metadata
    map its other names to that one, as safetensors' ``save_model`` does and ``load_model`` reads. ``"all"`` writes it
    under each of its names. ``trusted``: allow torch's pickle. ``progress``: show a bar.
    Raises: CheckpointError, FileError, OSError.
    """
    if tied not in TIED:
        raise CheckpointError(f"expected tied= to be one of {', '.join(map(repr, TIED))}, got {tied!r}")
    target = target_of(file)
    meter = Meter("export", progress)
    try:
        with opened(path, trusted) as source:
            parts, left_out = [], other_names(source) if tied == "one" else {}
            for name, chunks in source.model.items():
                if name in left_out:
                    continue
                check_whole(name, chunks)
                empty = torch.empty(chunks[0].shape, dtype=chunks[0].torch_dtype(name), device="meta")
                parts.append(Part.whole(name, empty))
            meter.expect(sum(part.tensor.nbytes for part in parts))
            beside = f".{target.name}.partial-{secrets.token_hex(16)}"
            try:
                write_file(
                    target.parent,
                    beside,
                    parts,
                    meter.add,
                    lambda part: source.whole(part.key, source.model[part.key]),
                    left_out,
                )
                os.replace(target.parent / beside, target)
            except BaseException:
                (target.parent / beside).unlink(missing_ok=True)
                raise
            sync_folder(target.parent)
    finally:
        seconds = meter.close()
    return Summary(str(target), source.index.id if source.index else None, meter.bytes, meter.bytes, seconds)


def target_of(file: str | os.PathLike[str]) -> Path:
    """Return the path of ``file``. Raises: CheckpointError if ``export`` cannot write it."""
    target = Path(os.path.abspath(file))
    if target.is_dir():
        raise CheckpointError(f"{target}: is a folder; name a file in it")
    if target.suffix != ".safetensors":
        raise CheckpointError(f"{target}: expected a name that ends in .safetensors, got {target.name}")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target.parent}: there is no such folder; make it first")
    return target


def other_names(source: Source) -> dict[str, str]:
    """Map each name of a tied parameter that is left out to the name that is written."""
    aliases: dict[str, str] = {} if source.index is None else source.index.about.get("aliases", {})
    groups: dict[str, list[str]] = {}
    for name, first in aliases.items():
        groups.setdefault(first, [first]).append(name)
    named = (sorted(name for name in names if name in source.model) for names in groups.values())
    return {name: names[0] for names in named for name in names[1:]}
