"""Storages that a user has freed or resized: whoever reads or writes such memory is told, by name, and nobody dies."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import flatparam

SUPPORT = pathlib.Path(__file__).parents[2] / "support"
SAID = re.compile(r"(ValueError|CheckpointError): .*freed or resized")
NAMED = re.compile(r"weight|the unit of Net|the flat parameter of Net|offset")


@pytest.mark.multiprocess
def test_memory_that_a_user_has_resized_is_not_touched():
    """Shards, weights in forward, gradients, optimizer states, buffers; strategies, the drop-in, LayerZero's handle."""
    package = str(pathlib.Path(flatparam.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, SUPPORT / "resized_storages.py"],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        timeout=240,
    )
    results = json.loads(done.stdout)
    assert len(results) == 16
    assert all(len(tried) >= (7 if "by hand" in model else 11) for model, tried in results.items())
    texts = {(model, what): text for model, tried in results.items() for what, text in tried.items()}
    assert not {key: text for key, text in texts.items() if not SAID.match(text)}
    unnamed = {key for key, text in texts.items() if not NAMED.search(text)}
    handles = ("drop-in", "by hand")  # some of whose callers give no name
    assert all(model.startswith(handles) for model, _ in unnamed), unnamed
