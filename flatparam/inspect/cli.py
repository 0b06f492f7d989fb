"""``python -m flatparam inspect``: its options, output, files and exit status."""

import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..common.parsing import Parser
from ..fsdp.unit.memory_plan import summary
from .planning import OPTIMIZERS, SUPPORTED, BadInput, Settings, load, plan_of, plans_by_strategy, units_of
from .report import as_json, table, title

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DPI = 150  # pixels of an inch of a picture: SMALL text is readable in a page of 800 pixels


def add_settings(add: Callable[..., object]) -> None:
    """Add the options that ``inspect`` and ``advise`` share. ``add``: ``add_argument`` of a parser or a group."""
    state = "state for each element, in its dtype: adam two, sgd (with momentum) one, none nothing"
    add("--param-dtype", choices=DTYPES, help="MixedPrecision's: of forward, backward and the wire")
    reduction = "MixedPrecision's: of the reduction of gradients (without it: --param-dtype's; in advise fp32 then)"
    add("--reduce-dtype", choices=DTYPES, help=reduction)
    add("--optimizer", choices=OPTIMIZERS, default="adam", help=state)
    add("--segments", action="store_true", help="segments=True: a flat parameter for each dtype, and for frozen ones")


def classes(text: str) -> tuple[str, ...]:
    """Parse names of classes, separated by commas."""
    return tuple(text.split(","))


def parser() -> Parser:
    made = Parser(
        prog="python -m flatparam inspect",
        description="Print the units, shards, padding and bytes per rank that flatparam.FullyShardedDataParallel gives "
        "a model, which is made on the meta device: no process group, no memory. Exit status: 0, or 2 for bad input.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("factory", metavar="package.module:factory", help="a function without arguments that makes the model")
    add("--world-size", type=int, metavar="N", default=8, help="ranks")
    add("--strategy", choices=SUPPORTED, default="FULL_SHARD", help="the groups over which a unit is sharded")
    add("--shard-size", type=int, metavar="N", help="hybrids: ranks that share a parameter, say those of a host")
    units = made.add_mutually_exclusive_group()
    units.add_argument(
        "--wrap", type=classes, metavar="CLASS[,CLASS...]", help="modules of these classes are units (ModuleWrapPolicy)"
    )
    units.add_argument(
        "--min-params", type=int, metavar="N", help="units of N parameters (size_based_auto_wrap_policy)"
    )
    add_settings(add)
    names = made.add_mutually_exclusive_group()
    names.add_argument("--use-orig-params", action="store_true", help="use_orig_params=True")
    names.add_argument("--flat", action="store_true", help="use_orig_params=False, which is assumed")
    aligned = "shard_alignment=BYTES: parameters and shards start aligned"
    add("--shard-alignment", type=int, metavar="BYTES", help=aligned)
    add("--atomic-rows", action="store_true", help='atomic="row": no row of a parameter is cut between ranks')
    add("--no-prefetch", action="store_true", help="backward_prefetch=None: no unit is gathered ahead")
    add("--min-unit-bytes", type=int, metavar="BYTES", default=0, help="min_unit_bytes: gather smaller units as one")
    add("--png", type=Path, metavar="FILE", help="draw the layout, a step and the other strategies (needs matplotlib)")
    add("--json", type=Path, metavar="FILE", help="write all numbers, and every parameter's place")
    return made


ONE_UNIT = "\nthe model is one unit: --wrap CLASS makes a unit of each module of a class, say of the blocks"


def draw(command: str, option: str, path: Path, *shown: Any) -> None:
    """Write the picture of ``shown`` that ``command`` makes for ``option``. Raises: BadInput without matplotlib."""
    try:
        picture = import_module(f"flatparam.{command}.picture")
    except ModuleNotFoundError as error:
        needed = (error.name or "matplotlib").partition(".")[0]
        raise BadInput(f"{option} needs {needed}: pip install 'matplotlib>=3.7'") from error
    picture.figure_of(*shown).savefig(path, format="png", dpi=DPI)


def inspect(options: argparse.Namespace) -> tuple[str, int]:
    """Return the text to print and the exit status; write the files of the options. Raises: BadInput, OSError."""
    given = vars(options) | {
        "strategy": SUPPORTED[options.strategy],
        "wrap": options.wrap or (),
        "param_dtype": DTYPES.get(options.param_dtype),
        "reduce_dtype": DTYPES.get(options.reduce_dtype),
        "prefetch": not options.no_prefetch,
    }
    settings = Settings(**{field.name: given[field.name] for field in fields(Settings)})
    module = load(options.factory)
    units = units_of(module, settings)
    plan = plan_of(units, settings)
    head = title(type(module).__name__, units, settings)
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(type(module).__name__, units, plan, settings), indent=1) + "\n")
    if options.png is not None:
        draw("inspect", "--png", options.png, head, units, settings, plans_by_strategy(module, settings))
    hint = "" if options.wrap or options.min_params else ONE_UNIT
    return f"{head}\n\n{table(units, plan)}\n\n{summary(plan)}{hint}", 0


def main(arguments: list[str]) -> int:
    return parser().run(arguments, inspect, (BadInput, OSError), 2)
