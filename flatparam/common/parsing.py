"""The argument parser of ``python -m flatparam COMMAND`` and the wording of its errors."""

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

Action = Callable[[argparse.Namespace], tuple[str, int]]  # options -> (text to print, exit status)
# (words in an exception's message, words for the user of a command)
_WORDS = (
    ("segments=True", "--segments"),
    ("trusted=True", "--trusted"),
    ("shard_alignment", "--shard-alignment"),
    ("ignore it (ignored_states)", "leave it out of the model that the factory makes"),
    ("ignore them (ignored_states)", "leave them out of the model that the factory makes"),
)


def in_a_command(error: BaseException) -> str:
    """Return the message of ``error`` with command-line options in the place of Python arguments."""
    message = str(error)
    for argument, option in _WORDS:
        message = message.replace(argument, option)
    return message


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return the question, for the end of a message, whether the user meant the one of ``names`` that is like ``name``.

    Empty if none is.
    """
    close = difflib.get_close_matches(name, [*names], 1)
    return f"; did you mean {close[0]}?" if close else ""


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows an option's default in its help, unless it is None or False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        there_is_none = action.default is None or action.default is False
        return action.help if there_is_none else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser of ``python -m flatparam COMMAND``: defaults are in its help, errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=Formatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self._command}: {message}; try --help\n")

    @property
    def _command(self) -> str:
        return " ".join(self.prog.split()[2:4])

    def run(self, arguments: list[str], do: Action, errors: tuple[type[Exception], ...], status: int) -> int:
        """Print the text that ``do(options)`` returns, and return its exit status.

        If ``do`` raises one of ``errors``, print its message on standard error, and return ``status``.
        """
        options = self.parse_args(arguments)
        try:
            text, done = do(options)
        except errors as error:
            print(f"{self._command}: {in_a_command(error)}", file=sys.stderr)
            return status
        print(text)
        return done
