"""Starts of an elastic job that cannot survive all losses.

Promises:
- a warning says which loss ends the job, and how to start it so that it goes on: without the launcher, and with the
  store in rank 0: `test_a_start_that_cannot_survive_says_so`
- so does the launcher for a c10d rendezvous of several machines: `test_the_launcher_tells_of_a_c10d_rendezvous`
- a model with a module that `resize` cannot move is refused at the start, not at the first loss:
  `test_a_model_that_cannot_move_is_refused_at_the_start`
"""

import datetime
import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import elastic
from flatparam.elastic import __main__ as launcher
from flatparam.elastic import training
from flatparam.elastic.epochs import MEMBER
from flatparam.fsdp.desync.stores import in_memory
from flatparam.fsdp.errors import StateError

GOOD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "-", "MASTER_PORT": "0", "GROUP_WORLD_SIZE": "2"}
GOOD |= {"TORCHELASTIC_USE_AGENT_STORE": "True", MEMBER: "0.0"}


def told(monkeypatch, environment, start):
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        start()
    return [str(one.message) for one in found]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, None),
        ({MEMBER: None}, "torchrun ends the job when a rank is lost, unless it is started with "),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, "the store is in rank 0, so the job ends if that rank is lost"),
    ],
)
def test_a_start_that_cannot_survive_says_so(monkeypatch, changed, text):
    monkeypatch.setattr(training, "store_of_job", lambda serves: None)
    monkeypatch.setattr(training, "Session", lambda *_: None)
    monkeypatch.setattr(training, "begin_session", lambda *_: None)
    found = told(monkeypatch, GOOD | changed, lambda: elastic.start(None))
    assert len(found) == bool(text)
    assert not text or found[0].startswith(f"elastic.start: {text}")


@pytest.mark.parametrize(
    ("given", "changed", "is_told"),
    [
        (["--rdzv-backend=c10d"], {}, True),
        (["--rdzv_backend", "c10d"], {}, True),
        (["--rdzv-backend=c10d"], {"RANK": "1"}, False),
        (["--rdzv-backend=c10d"], {"GROUP_WORLD_SIZE": "1"}, False),
        (["--rdzv-backend=static"], {}, False),
        ([], {"PET_RDZV_BACKEND": "c10d"}, True),
    ],
)
def test_the_launcher_tells_of_a_c10d_rendezvous(monkeypatch, given, changed, is_told):
    command = [
        sys.executable,
        "-c",
        "print(flush=True); input()",
        *given,
        "-m",
        "flatparam.elastic",
        "train.py",
        "c10d",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        agent.stdout.readline()  # its command line can be read now
        monkeypatch.setattr(os, "getppid", lambda: agent.pid)
        monkeypatch.setattr(launcher._Slot, "run", lambda *_: 0)
        found = told(monkeypatch, GOOD | changed, lambda: launcher.main(["train.py"]))
        agent.communicate("\n")
    assert len(found) == is_told
    assert not is_told or "torchrun ends the job when a machine is lost, as its rendezvous is c10d" in found[0]


def test_a_model_that_cannot_move_is_refused_at_the_start():
    def build():
        model = FSDP(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
        return model, torch.optim.SGD(model.parameters())

    session = training.Session(in_memory(), "0.1", 2, "parity", 1, datetime.timedelta(seconds=60))
    try:
        with pytest.raises(StateError, match="a module of the model has its own code for state dicts"):
            session.ask_to_join(build)
    finally:
        dist.destroy_process_group()
        del training._here.session  # the model with it
