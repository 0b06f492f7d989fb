"""``python -m flatparam checkpoint``: show, verify or export a checkpoint, without a model and without processes."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from ..common.parsing import Parser
from ..common.tables import aligned, human, in_order, many, merged, one_name_of, without_numbers
from ..fsdp.errors import FileError
from ..fsdp.names import printable
from ..fsdp.states.safetensors_files import DTYPES
from .errors import CheckpointError
from .exporting import TIED, export, opened, other_names, target_of, tensors_of, verify
from .files import Chunk
from .index import Index


def parser() -> Parser:
    made = Parser(
        prog="python -m flatparam checkpoint",
        description="Look at a checkpoint without a model and without processes. Exit status: 0, 1 for one that is "
        "damaged or none, 2 for bad input.",
        allow_abbrev=False,
    )
    commands = made.add_subparsers(dest="command", required=True, parser_class=Parser)
    show = commands.add_parser("show", help="print its tensors, where they lie, and how it was saved")
    show.add_argument("--all", action="store_true", help="each tensor and unit, also those that are equal")
    check = commands.add_parser("verify", help="read all of it, compare it with its checksums if it has any")
    check.add_argument("--finite", action="store_true", help="refuse NaN and infinities, too")
    write = commands.add_parser("export", help="write its model as one safetensors file")
    for command in (show, check, write):
        command.add_argument("path", type=Path, metavar="PATH", help="a folder, a safetensors file or an index")
        command.add_argument("--trusted", action="store_true", help="read torch's .metadata, a pickle: it can run code")
    write.add_argument("file", type=_target, metavar="FILE", help="the file to write; one that is there is replaced")
    write.add_argument("--tied", choices=TIED, default="one", help="names of a tied parameter in the file")
    write.add_argument("--quiet", action="store_true", help="no progress bar on a terminal")
    return made


def _target(file: str) -> Path:
    """Return the file to write. Raises: argparse's error, for the status of bad input."""
    try:
        return target_of(file)
    except CheckpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def gathered_over(unit: dict[str, Any]) -> str:
    """Return over how many ranks a unit with a secondary shard is gathered in forward and backward; else empty."""
    over = unit["parameters_over"]
    return f"{over}{', nested' if unit['nested'] else ''}" if over > 1 else ""


def show(path: Path, trusted: bool, every: bool = False) -> str:
    """Return the printed description. ``every``: one line for each unit and tensor; else equal ones share a line.

    Equal: they differ only in a number in their names. Raises: CheckpointError, FileError, OSError.
    """
    with opened(path, trusted) as source:
        lines = [str(path)]
        if source.index is not None:
            lines += of_index(source.index, every)
        lines += ["", table_of_tensors(list(tensors_of(source)), every)]
    return printable("\n".join(lines))


def mib(size: int) -> str:
    return f"{size / 2**20:,.3f}"


def of_index(index: Index, every: bool) -> list[str]:
    """Return the lines about a checkpoint of flatparam: ranks, versions, optimizers, base and units."""
    about = ", ".join(f"{key} {index.about[key]}" for key in ("flatparam", "torch"))
    lines = [f"saved by {many(index.world_size, 'rank')} ({about}), {human(index.bytes)}, id {index.id}"]
    optimizer = index.optimizer or {}
    classes = optimizer.get("classes", {})
    if classes:
        named = ", ".join(f"{label}: {kind}" if label else kind for label, kind in classes.items())
        lines.append(f"optimizer {named}, {many(len(optimizer['groups']), 'group')} of parameters")
    base = index.about.get("base")
    if base is not None:
        lines.append(f"trained parameters alone: needs a base of {many(len(base), 'parameter')}, which is not in it")
        of_base = [(name, base[name][0], str(base[name][1])) for name in sorted(base, key=in_order)]
        lines += ["", aligned([("base", "tensors", "dtype", "shape"), *merged(of_base, every)], 1, 1)]
    if index.units:
        rows = [
            (
                *(unit["name"] or "(root)", unit["strategy"] or "", str(unit["shards"]), str(unit["replicas"])),
                *(gathered_over(unit), " ".join(unit["dtypes"]), f"{sum(unit['shard_numels']):,}"),
            )
            for unit in index.units
        ]
        heading = ("unit", "units", "strategy", "shards", "replicas", "gathered over", "dtypes", "elements of a shard")
        lines += ["", aligned([heading, *merged(rows, every)], 1, 1)]
    return lines


def table_of_tensors(tensors: list[tuple[str, str, list[Chunk]]], every: bool) -> str:
    """Return a table of tensors by name: count, dtype, shape, size, and the number of boxes and files."""
    groups: dict[tuple[Any, ...], list[tuple[str, list[Chunk]]]] = {}
    for folder, name, chunks in sorted(tensors, key=lambda tensor: (tensor[0], in_order(tensor[1]))):
        kind = name if every else without_numbers(name)
        groups.setdefault((folder, kind, chunks[0].dtype, chunks[0].shape), []).append((name, chunks))
    rows = [("tensors", "", "count", "dtype", "shape", "MiB", "boxes", "files")]
    sizes, all_boxes, files = [], 0, set()
    for (folder, _, dtype, shape), members in groups.items():
        boxes = [chunk for _, chunks in members for chunk in chunks]
        here = {chunk.file for chunk in boxes}
        known = DTYPES.get(dtype)
        size = 0 if known is None else len(members) * math.prod(shape) * known.itemsize
        name = one_name_of([name for name, _ in members])
        counts = (mib(size), f"{len(boxes):,}", f"{len(here):,}")
        rows.append((folder, name, f"{len(members):,}", dtype, str(list(shape)), *counts))
        sizes.append(size)
        all_boxes += len(boxes)
        files |= here
    total = (f"{len(tensors):,}", "", "", mib(sum(sizes)), f"{all_boxes:,}", f"{len(files):,}")
    return aligned([*rows, ("total", "", *total)], 2, 1, 1)


def do(options: argparse.Namespace) -> tuple[str, int]:
    """Return the text to print and the exit status. Raises: CheckpointError, FileError, OSError."""
    path, trusted = options.path, options.trusted
    if options.command == "show":
        return show(path, trusted, options.all), 0
    if options.command == "verify":
        summary = verify(path, check_finite=options.finite, trusted=trusted)
        without_sums = "every byte can be read; it has no checksums, so whether a value has changed is not known"
        return f"{summary}: {without_sums if summary.id is None else 'as it was saved'}", 0
    on_terminal = sys.stderr is not None and sys.stderr.isatty()  # None: the process was started without one
    progress = on_terminal and not options.quiet
    written = export(path, options.file, tied=options.tied, trusted=trusted, progress=progress)
    with opened(path, trusted) as source:
        left_out = other_names(source) if options.tied == "one" else {}
    names = ", ".join(f"{name} as {kept}" for name, kept in left_out.items())
    told = f"\ntied, in it once: {names}. Load it by safetensors.torch.load_model(), or export with --tied all"
    return f"{written}{told if names else ''}", 0


def main(arguments: list[str]) -> int:
    """Run the command line. Returns: the exit status."""
    return parser().run(arguments, do, (CheckpointError, FileError, OSError), 1)
