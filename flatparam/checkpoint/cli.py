"""``python -m flatparam checkpoint``: look at a checkpoint, verify it, export it; the exit status."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ..common.parsing import Parser, in_a_command
from ..fsdp.safetensors_files import FileError
from .errors import CheckpointError
from .exporting import export, open_source, tensors_of, verify


def parser() -> Parser:
    made = Parser(
        prog="python -m flatparam checkpoint",
        description="Look at a checkpoint without a model and without processes. Exit status: 0, 1 for one that is "
        "damaged or none, 2 for bad input.",
        allow_abbrev=False,
    )
    commands = made.add_subparsers(dest="command", required=True, parser_class=Parser)
    show = commands.add_parser("show", help="print its tensors, where they lie, and how it was saved")
    check = commands.add_parser("verify", help="read all of it, compare it with its checksums if it has any")
    check.add_argument("--finite", action="store_true", help="refuse NaN and infinities, too")
    write = commands.add_parser("export", help="write its model as one safetensors file")
    for command in (show, check, write):
        command.add_argument("path", type=Path, metavar="PATH", help="a folder, a safetensors file or an index")
        command.add_argument("--trusted", action="store_true", help="read torch's .metadata, a pickle: it can run code")
    write.add_argument("file", type=Path, metavar="FILE", help="the file to write; one that is there is replaced")
    write.add_argument("--quiet", action="store_true", help="no progress bar")
    return made


def many(count: int, word: str, plural: str | None = None) -> str:
    return f"{count} {word if count == 1 else plural or word + 's'}"


def gathered_from(unit: dict[str, Any]) -> str:
    """Words for a unit whose forward and backward gather over other ranks than have its shards; else none."""
    over = unit["parameters_over"]
    return f", parameters over {many(over, 'rank')}{', nested' if unit['nested'] else ''}" if over > 1 else ""


def show(path: Path, trusted: bool) -> str:
    """What is printed of a checkpoint. Raises: CheckpointError, FileError, OSError."""
    source = open_source(path, trusted)
    try:
        lines = [str(path)]
        index = source.index
        if index is not None:
            about = ", ".join(f"{key} {index.about[key]}" for key in ("flatparam", "torch"))
            lines.append(f"saved by {index.world_size} ranks ({about}), {index.bytes} bytes, id {index.id}")
            lines += [
                f"unit {unit['name'] or '(root)'}: {unit['strategy']}, {many(unit['shards'], 'shard')}, "
                f"{many(unit['replicas'], 'replica')}{gathered_from(unit)}"
                for unit in index.units
            ]
        for folder, name, chunks in tensors_of(source):
            first, files = chunks[0], len({chunk.file for chunk in chunks})
            where = f"{many(len(chunks), 'box', 'boxes')} in {many(files, 'file')}"
            lines.append(f"{folder:<10}{name}  {first.dtype} {list(first.shape)}  {where}")
    finally:
        source.close()
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    try:
        if options.command == "show":
            print(show(options.path, options.trusted))
        elif options.command == "verify":
            summary = verify(options.path, check_finite=options.finite, trusted=options.trusted)
            without_sums = "every byte can be read; it has no checksums, so whether a value has changed is not known"
            print(f"{summary}: {without_sums if summary.id is None else 'as it was saved'}")
        else:
            print(export(options.path, options.file, trusted=options.trusted, progress=not options.quiet))
    except (CheckpointError, FileError, OSError) as error:
        print(f"flatparam checkpoint: {in_a_command(error)}", file=sys.stderr)
        return 1
    return 0
