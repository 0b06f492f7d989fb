"""A command whose reader ends, as in ``python -m flatparam ... | head -1``, ends too, and prints no traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
MODEL = "examples.demo.model:default_model"
COMMANDS = {
    "commands": ["--help"],
    "advise": ["advise", MODEL, "--world-size", "2", "--gpu-memory", "1GB"],
    "advise --help": ["advise", "--help"],
    "inspect": ["inspect", MODEL],
    "checkpoint show": ["checkpoint", "show", "one.safetensors"],
    "doctor": ["doctor"],
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", COMMANDS)
def test_a_closed_pipe_ends_a_command_quietly(tmp_path, name):
    save_file({"weight": torch.ones(3)}, tmp_path / "one.safetensors")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "flatparam", *COMMANDS[name]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == ""
    if "--help" not in name:  # argparse ignores errors of its output
        assert done.returncode == 128 + signal.SIGPIPE  # as a shell shows it of other tools
