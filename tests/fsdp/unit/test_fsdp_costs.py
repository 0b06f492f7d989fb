"""No step runs Python for each parameter: counted are calls of Python functions in units of 100 and 200 parameters."""

import gc
import sys

import pytest
import torch
from gloo import fake_world

from benchmarks.models import SHAPE, Unit
from flatparam import FullyShardedDataParallel

FEWER, MORE = 100, 200


def calls_in(run):
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()  # a collection may call Python
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def actions(parameters, orig):
    model = FullyShardedDataParallel(Unit(parameters), use_orig_params=orig, device_id=torch.device("cpu"))

    def step():
        model(torch.ones(SHAPE)).sum().backward()

    def accumulate():
        with model.no_sync():
            step()
        step()

    def infer():
        with torch.no_grad():
            model(torch.ones(SHAPE))

    step()
    return {"step": step, "accumulate": accumulate, "infer": infer, "clip": lambda: model.clip_grad_norm_(1.0)}


@pytest.mark.parametrize("orig", [True, False])
def test_python_calls_for_a_parameter(orig):
    with fake_world(8):
        fewer, more = actions(FEWER, orig), actions(MORE, orig)
        added = {}
        for name, run in fewer.items():
            run()
            more[name]()
            added[name] = (calls_in(more[name]) - calls_in(run)) / (MORE - FEWER)
    # clipping: a generator gives each original parameter, once for the units and once for what they do not have
    assert added == {"step": 0, "accumulate": 0, "infer": 0, "clip": 2 if orig else 0}
