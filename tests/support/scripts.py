"""Run a script of examples/ on the ranks of a gloo world, as torchrun does, and compare its output with its head.

The head, the docstring, ends with the last lines that the script prints, indented. In them `...` stands for any text,
and a number with a point for one within a tenth of it: losses depend on the machine's arithmetic.
"""

import ast
import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from gloo import run_ranks
from trainers import look_like_torchrun

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUMBER = r"\d+\.\d+"


def head_of(script):
    """Return the docstring of an example."""
    return ast.get_docstring(ast.parse((EXAMPLES / script).read_text()))


def check_help(script, capsys):
    """Fail unless ``script --help`` prints each option."""
    with mock.patch.object(sys, "argv", [script, "--help"]), pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    options = re.findall(r"add_argument\(\s*\"(?:--)?([\w-]+)", (EXAMPLES / script).read_text())
    assert options
    assert all(option in printed for option in options)


def check_last_lines(printed, promised):
    """Fail unless the last lines are the promised ones, with numbers near those: Python's text differs by version."""
    expected = [line.strip() for line in promised.splitlines()]
    found = [line.strip() for line in printed.splitlines()][-len(expected) :]
    assert len(found) == len(expected), printed
    for line, wanted in zip(found, expected, strict=True):
        pattern = re.sub(r"\d+\\\.\d+", lambda _: f"({NUMBER})", re.escape(wanted)).replace(r"\.\.\.", ".*")
        match = re.fullmatch(pattern, line)
        assert match, f"expected {wanted!r}, got {line!r}"
        for number, near in zip(match.groups(), re.findall(NUMBER, wanted), strict=True):
            assert abs(float(number) - float(near)) <= 0.15 * float(near) + 0.02, (wanted, line)


def printed_on_ranks(script, world_size, folder, *arguments, prepare=look_like_torchrun):
    """Return what rank 0 prints of ``script``, run in ``folder``.

    Args: ``script``: a name in examples/, or an absolute path; ``prepare``: called on each rank before it.
    """
    return run_ranks(_run, world_size, script, str(folder), list(arguments), prepare)[0]


def _run(script, folder, arguments, prepare):
    prepare()
    os.chdir(folder)
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [script, *arguments]),
        mock.patch.object(dist, "init_process_group"),  # the rank has its group already, and ends it
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()
