"""``python -m flatparam COMMAND``: each command is a module with ``main(arguments) -> exit status``."""

import importlib
import os
import signal
import sys

from flatparam._version import __version__
from flatparam.common.parsing import suggestion

COMMANDS = {
    "advise": (
        "flatparam.advise.cli",
        "print strategies, units and micro-batches that fit in a rank's memory, by predicted step time",
    ),
    "checkpoint": ("flatparam.checkpoint.cli", "show, verify or export a checkpoint"),
    "doctor": ("flatparam.commands.doctor", "print versions, devices, the extension, and check torch's internals"),
    "inspect": (
        "flatparam.inspect.cli",
        "print and draw a model's units, shards and bytes per rank, without processes",
    ),
    "run": ("flatparam.commands.run", "run a script as python does, with flatparam under torch's FSDP or in its place"),
}


def usage() -> str:
    """One line for each command."""
    lines = [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    text = [
        "usage: python -m flatparam COMMAND [options]   (COMMAND --help for its options)",
        "       python -m flatparam --version",
        *lines,
    ]
    return "\n".join(text)


def main(arguments: list[str]) -> int:
    """Run the command that ``arguments`` begin with. Returns: the exit status.

    If the reader of its output has ended, as ``head`` does, the command ends too, quietly. ``run`` leaves that to its
    script.
    """
    if arguments[:1] == ["run"]:
        return command(arguments)
    try:
        try:
            return command(arguments)
        finally:
            if sys.stdout is not None:  # None: the process was started without one
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes at its end, too
        return 128 + signal.SIGPIPE


def command(arguments: list[str]) -> int:
    """Do the work of ``main``."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(usage())
        return 0
    if arguments[:1] == ["--version"]:
        print(f"flatparam {__version__}")
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        got = repr(arguments[0]) if arguments else "nothing"
        end = (suggestion(arguments[0], COMMANDS) if arguments else "") or "; try --help"
        print(f"flatparam: expected a command ({', '.join(COMMANDS)}), got {got}{end}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[arguments[0]]
    status: int = importlib.import_module(module).main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
