"""What the commands with options have in common."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser of ``python -m flatparam COMMAND`` whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        command = self.prog.split()[3]
        self.exit(2, f"flatparam {command}: {message}; try --help\n")
