"""A command whose reader ends, as in ``python -m flatparam ... | head -1``, ends too, and prints no traceback.

Nor does one that is started without a standard output, as in ``python -m flatparam ... >&-``.
"""

import signal

import forked_scripts
import pytest
import torch
from safetensors.torch import save_file

MODEL = "examples.demo.model:default_model"
COMMANDS = {
    "commands": ["--help"],
    "advise": ["advise", MODEL, "--world-size", "2", "--gpu-memory", "1GB"],
    "advise --help": ["advise", "--help"],
    "inspect": ["inspect", MODEL],
    "checkpoint show": ["checkpoint", "show", "one.safetensors"],
    "doctor": ["doctor"],
}

PROGRAM = """
import os, runpy
read, write = os.pipe()
os.close(read)
os.dup2(write, 1)
runpy.run_module("flatparam", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    save_file({"weight": torch.ones(3)}, folder / "one.safetensors")
    found = forked_scripts.run([(PROGRAM, arguments) for arguments in COMMANDS.values()], folder)
    return dict(zip(COMMANDS, found, strict=True))


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", COMMANDS)
def test_a_closed_pipe_ends_a_command_quietly(ends, name):
    assert ends[name].err == ""
    if "--help" not in name:  # argparse ignores errors of its output
        assert ends[name].status == 128 + signal.SIGPIPE  # as a shell shows it of other tools


WITHOUT_OUTPUT = """
import runpy, sys
sys.stdout = None  # as Python starts if it is closed
runpy.run_module("flatparam", run_name="__main__", alter_sys=True)
"""


@pytest.mark.multiprocess
def test_a_command_without_an_output(tmp_path):
    save_file({"weight": torch.ones(3)}, tmp_path / "one.safetensors")
    names = ("commands", "checkpoint show", "doctor")
    for end in forked_scripts.run([(WITHOUT_OUTPUT, COMMANDS[name]) for name in names], tmp_path):
        assert (end.status, end.err) == (0, "")
