"""``python -m flatparam advise``: its options, output, files and exit status."""

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ..common.parsing import Parser
from ..inspect.cli import DTYPES, add_settings, classes, draw
from ..inspect.planning import SUPPORTED, BadInput, Settings, load
from . import report
from .candidates import Question, candidates
from .timing import Cluster

# Operations/s of a rank in dtypes of at most 16 bits, and in wider ones: H100 at 40 % of its peaks, which NVIDIA's data
# sheet gives as 989e12 in bf16 and 67e12 in fp32 without TF32
LOW_FLOPS, FULL_FLOPS = 400e12, 25e12
SCALES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def quantity(units: dict[str, float], example: str, scales: dict[str, float] = SCALES) -> Callable[[str], float]:
    """Return a parser of a positive number, a prefix and a unit, such as ``example``.

    ``units``: name -> size. ``scales``: prefix -> factor; upper and lower case are equal in prefixes.
    """

    def parse(text: str) -> float:
        found = re.fullmatch(r"(\d+\.?\d*(?:e[+-]?\d+)?) ?([a-zA-Z/]*)", text)
        name = "" if found is None else found[2]
        sizes = [scales.get(name.removesuffix(unit).lower(), 0) * units[unit] for unit in units if name.endswith(unit)]
        value = 0.0 if found is None else float(found[1]) * max(sizes, default=0)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a positive number and a unit, as in {example}, got {text!r}")
        return value

    return parse


def counts(text: str) -> tuple[int, ...]:
    """Parse positive integers, separated by commas."""
    try:
        found = tuple(map(int, text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected positive integers such as 1,2,4, got {text!r}")
    return found


def positive(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def strategies(text: str) -> tuple[str, ...]:
    """Parse names of strategies, separated by commas."""
    found = tuple(text.split(","))
    unknown = [name for name in found if name not in SUPPORTED]
    if unknown:
        raise argparse.ArgumentTypeError(f"no strategy {unknown[0]!r}; there are {', '.join(SUPPORTED)}")
    return found


_SECONDS = {"s": 1, "ms": 1e-3, "us": 1e-6}


def parser() -> Parser:
    made = Parser(
        prog="python -m flatparam advise",
        description="Print which strategies, units, inner groups and micro-batches fit in the memory of a rank, with "
        "predicted memory, bytes that a rank sends, and step time, the best first. The model is made on the meta "
        "device; nothing runs. Memory is inspect's plan. Step time is a model of latency, bandwidth and operations "
        "(flatparam.advise.timing says which): it ranks, and has been fitted to no machine. Exit status: 0, 1 when "
        "nothing fits, 2 for bad input.",
        allow_abbrev=False,
    )
    _add_question(made)
    _add_machine(made)
    _add_tries(made)
    add = made.add_argument_group("output").add_argument
    add("--all", action="store_true", help="print all that fit, not the best of each strategy")
    add("--json", type=Path, metavar="FILE", help="write all that was tried")
    picture = "draw all that was tried, and the Pareto front of time and memory, as a PNG (needs matplotlib)"
    add("--picture", type=Path, metavar="FILE", help=picture)
    return made


def _add_question(made: Parser) -> None:
    add = made.add_argument_group("model and machine").add_argument
    size, activations = (quantity({"B": 1, "b": 1}, example) for example in ("80GB", "4MB or 4456448B"))
    add("factory", metavar="package.module:factory", help="a function without arguments that makes the model")
    add("--world-size", type=positive, metavar="N", required=True, help="ranks")
    add("--gpu-memory", type=size, metavar="SIZE", required=True, help="memory that a rank may use, say 80GB or 74GiB")
    tokens = "tokens that a rank computes in a step, over all micro-batches"
    add("--tokens", type=positive, metavar="N", default=8192, help=tokens)
    add(
        "--activations",
        type=activations,
        metavar="SIZE",
        help="bytes of activations that a rank keeps for each token from forward to backward; a transformer in "
        "bf16 keeps about 34 x layers x width; flatparam.advise.activations.bytes_per_token measures a block",
    )
    add_settings(add)


def _add_machine(made: Parser) -> None:
    add = made.add_argument_group("the machine").add_argument
    rate, latency = quantity({"B/s": 1, "bit/s": 1 / 8}, "50GB/s or 400Gbit/s"), quantity(_SECONDS, "10us", {"": 1})
    add("--node-size", type=positive, metavar="N", default=8, help="ranks of a node; no more than the world size")
    reach, delay = "bytes or bits a second that a rank can send to ranks of", "latency of one step of a ring"
    add("--intra", type=rate, metavar="RATE", default="450GB/s", help=f"{reach} its node")
    add("--inter", type=rate, metavar="RATE", default="50GB/s", help=f"{reach} other nodes")
    add("--intra-latency", type=latency, metavar="TIME", default="3.4us", help=f"{delay} within a node")
    add("--inter-latency", type=latency, metavar="TIME", default="9.6us", help=f"{delay} between nodes")
    add(
        "--flops",
        type=quantity({"": 1, "FLOPS": 1}, "400T"),
        metavar="RATE",
        help="operations/s that a rank reaches, not its peak (default: 400T, and 25T for a plan that computes in fp32, "
        "which is without TF32)",
    )


def _add_tries(made: Parser) -> None:
    add = made.add_argument_group("plans to try").add_argument
    add("--strategies", type=strategies, metavar="NAME,...", help="try these strategies only")
    add("--inner", type=counts, metavar="N,...", help="try inner groups of these sizes only (hybrids)")
    add("--wrap", type=classes, metavar="CLASS,...", help="try units of these classes only, not of each repeated class")
    default = f"(default: {','.join(map(str, Question.micro_batches))}, up to the tokens)"
    add("--micro-batches", type=counts, metavar="N,...", help=f"numbers of micro-batches to try {default}")


def question_of(options: argparse.Namespace, module: nn.Module) -> Question:
    param_dtype = DTYPES.get(options.param_dtype)
    settings = Settings(
        world_size=options.world_size,
        param_dtype=param_dtype,
        reduce_dtype=DTYPES.get(options.reduce_dtype, None if param_dtype is None else torch.float32),
        optimizer=options.optimizer,
        use_orig_params=True,
        segments=options.segments,
    )
    node = min(options.node_size, options.world_size)
    if options.world_size % node:
        raise BadInput(
            f"--world-size must be a multiple of --node-size, got {options.world_size} ranks in nodes of {node}"
        )
    micro_batches = options.micro_batches or [n for n in Question.micro_batches if n <= options.tokens]
    if max(micro_batches) > options.tokens:
        raise BadInput(f"--tokens {options.tokens} are fewer than {max(micro_batches)} micro-batches")
    low = _itemsize(module, param_dtype) <= 2
    return Question(
        settings=settings,
        gpu_memory=int(options.gpu_memory),
        cluster=Cluster(node, options.intra, options.inter, options.intra_latency, options.inter_latency),
        tokens=options.tokens,
        flops=options.flops or (LOW_FLOPS if low else FULL_FLOPS),
        activations=None if options.activations is None else int(options.activations),
        strategies=options.strategies or tuple(SUPPORTED),
        inner=options.inner or (),
        wrap=options.wrap or (),
        micro_batches=tuple(sorted(set(micro_batches))),
    )


def _itemsize(module: nn.Module, param_dtype: torch.dtype | None) -> int:
    """Return the bytes of an element in the compute: of ``param_dtype``, or of the dtype that most elements have."""
    numels = Counter[int]()
    for param in module.parameters():
        numels[param.itemsize] += param.numel()
    return param_dtype.itemsize if param_dtype is not None else max(numels, key=numels.__getitem__, default=4)


def advise(options: argparse.Namespace) -> tuple[str, int]:
    """Return the text to print and the exit status; write the files of the options. Raises: BadInput, OSError."""
    module = load(options.factory)
    question = question_of(options, module)
    found = sorted(candidates(module, question), key=lambda one: (one.memory, one.seconds))
    if not found:
        raise BadInput(
            f"no inner group is possible among {options.world_size} ranks in nodes of {question.cluster.node}"
        )
    fitting = report.by_speed([one for one in found if one.memory <= question.gpu_memory])
    too_large = [one for one in found if one.memory > question.gpu_memory]
    name, numel = type(module).__name__, sum(param.numel() for param in module.parameters())
    head = report.title(name, numel, question, found[0].compute_dtypes)
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(name, numel, question, fitting, too_large), indent=1) + "\n")
    if options.picture is not None:
        draw("advise", "--picture", options.picture, head, fitting, too_large, question)
    in_full, assumed = report.in_full_precision(found[0], question), report.assumptions(question)
    if not fitting:
        last = [report.nothing_fits(found, question), in_full, assumed]
        return "\n".join([head, "", *filter(None, last)]), 1
    shown = fitting if options.all else report.best_of_each(fitting)
    best = report.call(fitting[0], question)
    last = [
        f"best: {best}",
        f"      {report.how_to_step(fitting[0], question)}",
        f"      {report.imports(best, fitting[0], module)}",
        f"{len(fitting)} of {len(found)} tried fit" + ("" if options.all else ", of each strategy the best is shown"),
        report.does_not_fit(found, fitting, question),
        in_full,
        report.with_elastic(fitting[0], question),
        assumed,
    ]
    return "\n".join([head, "", report.table(shown), "", report.LEGEND, "", *filter(None, last)]), 0


def main(arguments: list[str]) -> int:
    return parser().run(arguments, advise, (BadInput, OSError), 2)
