"""What the commands with options have in common."""

import argparse
from typing import Any, NoReturn


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Tells a default where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        there_is_none = action.default is None or action.default is False
        return action.help if there_is_none else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser of ``python -m flatparam COMMAND``: defaults are in its help, errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=Formatter, **options)

    def error(self, message: str) -> NoReturn:
        command = self.prog.split()[3]
        self.exit(2, f"flatparam {command}: {message}; try --help\n")
