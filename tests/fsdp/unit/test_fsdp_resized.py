"""Storages that a user has freed or resized: a read or write raises an error that names the tensor; no crash."""

import re

import pytest
from gloo import printed_by

SAID = re.compile(r"(ValueError|CheckpointError): .*freed or resized")
NAMED = re.compile(r"weight|the unit of Net|the flat parameter of Net|offset")


@pytest.mark.multiprocess
def test_memory_that_a_user_has_resized_is_not_touched():
    """Shards, weights in forward, gradients, optimizer states, buffers; strategies, the drop-in, LayerZero's handle."""
    results = printed_by("resized_storages.py")
    assert len(results) == 16
    assert all(len(tried) >= (7 if "by hand" in model else 11) for model, tried in results.items())
    texts = {(model, what): text for model, tried in results.items() for what, text in tried.items()}
    assert not {key: text for key, text in texts.items() if not SAID.match(text)}
    unnamed = {key for key, text in texts.items() if not NAMED.search(text)}
    handles = ("drop-in", "by hand")  # some of whose callers give no name
    assert all(model.startswith(handles) for model, _ in unnamed), unnamed
