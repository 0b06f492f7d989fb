"""``python -m examples.demo``: its options, the run, its output and files, the exit status."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import tempfile
import time
from pathlib import Path

from flatparam.common.parsing import Parser

from .config import DEVICES, PARTIAL, PRECISIONS, RUNTIMES, STRATEGIES, BadSetting, Config
from .processes import DemoFailed, Stopped, Team, stop_on_signals

DEFAULTS = Config()
FILES = ("demo.png", "report.txt")
QUICK = Config(
    steps=12, width=32, depth=2, context=32, batch=4, block=3, validate_every=6, host_rounds=2, host_repeats=5
)
KILL = Config(steps=240, width=64, depth=4, validate_every=40, kill=True)


STRATEGY_HELP = (
    "what FSDP shards, and when; hybrids shard over pairs of ranks, layer-zero gathers parameters within each half of "
    "the ranks (of two: within one), as on two machines; torch, which lacks it and zero-1, then trains with full-shard"
)


def parser(defaults: Config) -> Parser:
    """Return the parser. ``defaults``: the values of options that are not given."""
    made = Parser(
        prog="python -m examples.demo",
        description="Train a byte-level GPT on the language reference that CPython carries, three ways on the same "
        "batches: one unsharded process, torch FSDP1, flatparam. Compare losses, parameters, time and memory. Kill "
        "flatparam's processes in training, and go on from their last checkpoint. Exit status: 0 when every check "
        "holds, 1 when one fails, 2 for a bad option.",
        allow_abbrev=False,
    )
    add = made.add_argument
    kinds = made.add_mutually_exclusive_group()
    kinds.add_argument("--quick", action="store_true", help="other defaults: a tiny model and few steps, half a minute")
    kill_help = (
        "other defaults, and flatparam alone, with flatparam.elastic: kill a rank, time the others until they go on, "
        "let a new process join, and compare the losses with those without interruption; half a minute, no files"
    )
    kinds.add_argument("--kill", action="store_true", help=kill_help)
    add("--ranks", type=int, metavar="N", help="processes of each sharded run; on cuda no more than there are GPUs")
    add("--steps", type=int, metavar="N", help="training steps")
    add("--width", type=int, metavar="N", help="width of the model, a multiple of 32")
    add("--depth", type=int, metavar="N", help="blocks of the model, one FSDP unit each")
    add("--context", type=int, metavar="N", help="bytes that the model sees")
    add("--batch", type=int, metavar="N", help="rows of a micro-batch, for each rank")
    add("--micro-batches", type=int, metavar="N", help="micro-batches a step, all but the last in no_sync()")
    add("--device", choices=DEVICES, help="where the processes compute; cuda takes a GPU for each rank")
    add("--runtime", choices=RUNTIMES, help="flatparam's own FullyShardedDataParallel, or torch's on its handle")
    add("--strategy", choices=STRATEGIES, help=STRATEGY_HELP)
    add("--precision", choices=PRECISIONS, help="of forward, backward and gradients; the weights are kept in fp32")
    add("--orig-params", action=argparse.BooleanOptionalAction, help="FSDP's use_orig_params")
    add("--clip", type=float, metavar="NORM", help="clip gradients; equality to unsharded training is then inexact")
    add("--lr", dest="learning_rate", type=float, metavar="RATE", help="peak learning rate")
    add("--seed", type=int, metavar="N", help="of weights, batches and sample")
    add("--threads", type=int, metavar="N", help="torch threads, the same in every process")
    add("--out", type=Path, metavar="FOLDER", help="where the checkpoint, " + " and ".join(FILES) + " go")
    names = {field.name for field in dataclasses.fields(Config)}
    given = {action.dest for action in made._actions} & names
    made.set_defaults(**{name: getattr(defaults, name) for name in given})
    return made


def parse(arguments: list[str]) -> Config:
    """Return the settings of ``arguments``. Raises: BadSetting; SystemExit if argparse refuses them."""
    base = QUICK if "--quick" in arguments else KILL if "--kill" in arguments else DEFAULTS
    options = parser(base).parse_args(arguments)
    if options.device == "cuda":
        import torch

        found = torch.cuda.device_count()
        base = dataclasses.replace(base, ranks=min(base.ranks, found) or base.ranks)
        options = parser(base).parse_args(arguments)
        if options.ranks > found:
            raise BadSetting(f"--device cuda takes a GPU for each of {options.ranks} ranks, there are {found}")
    del options.quick
    return dataclasses.replace(base, **vars(options))


def demo(config: Config) -> int:
    """Run the demo and print its report; returns 0 when every check holds."""
    from . import plot
    from .experiment import run_experiment
    from .report import checks, report

    start = time.monotonic()
    checkpoint, picture, text_file = (config.out / name for name in (config.checkpoint_name, *FILES))
    scratch = Path(tempfile.mkdtemp(prefix="flatparam-demo-"))
    try:
        with Team(config, scratch) as team:
            results = run_experiment(config, team, scratch, checkpoint)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for path in (checkpoint, picture):
            path.with_name(path.name + PARTIAL).unlink(missing_ok=True)
        for left in config.out.glob(f".{checkpoint.name}{PARTIAL}-*"):
            shutil.rmtree(left, ignore_errors=True)
    found = checks(config, results)
    text = report(config, results, found)
    plot.draw(config, results, picture)
    text_file.write_text(text + "\n")
    print(f"\n{text}\n\nwrote {checkpoint}, {picture}, {text_file}; {time.monotonic() - start:.0f} s in all")
    return 0 if all(check.holds for check in found) else 1


def main(arguments: list[str]) -> int:
    """Run the command. Returns: the exit status."""
    try:
        config = parse(arguments)
        if not config.kill:
            config.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=config.out).close()  # may we write there? better asked now than at the end
    except (BadSetting, OSError) as error:
        return fail(str(error), 2)
    try:
        stop_on_signals()
        if config.kill:
            from .killed import demo_killed

            return demo_killed(config)
        return demo(config)
    except ModuleNotFoundError as error:
        return fail(f"the demo needs {error.name}: pip install 'matplotlib>=3.7' 'tqdm>=4.60'", 1)
    except DemoFailed as error:
        if error.details:
            print(error.details, file=sys.stderr)
        return fail(f"{error}; all processes ended", 1)
    except Stopped as stopped:
        return fail(f"stopped by {stopped}; all processes ended", 128 + stopped.signum)


def fail(message: str, status: int) -> int:
    """Print ``message`` as one line. Returns: ``status``."""
    print(f"examples.demo: {message}", file=sys.stderr)
    return status
