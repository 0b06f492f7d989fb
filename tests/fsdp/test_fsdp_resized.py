"""Storages that a user has freed or resized: whoever reads or writes such memory is told, by name, and nobody dies."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import flatparam

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
SAID = re.compile(r"(ValueError|CheckpointError): .*freed or resized")
NAMED = re.compile(r"weight|the unit of Net|the flat parameter of Net|offset")


@pytest.mark.multiprocess
def test_memory_that_a_user_has_resized_is_not_touched():
    """Shards, weights in forward, gradients, optimizer states and buffers; strategies, offloading and the drop-in."""
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
    assert len(results) == 14
    assert all(len(tried) >= 11 for tried in results.values())
    texts = {(model, what): text for model, tried in results.items() for what, text in tried.items()}
    assert not {key: text for key, text in texts.items() if not SAID.match(text)}
    unnamed = {key for key, text in texts.items() if not NAMED.search(text)}
    assert all("drop-in" in model for model, _ in unnamed), unnamed  # some of torch's callers tell the handle no name
