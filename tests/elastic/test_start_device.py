"""Elastic training of a model on the simulated device. tests/gpu/test_elastic.py loses ranks, on a real GPU, too.

Promises:
- a commit is a copy of what the optimizer's step has made, in pinned memory, whichever streams of the device are late;
  the state that all go back to is that one, with the device's random numbers: `test_all_go_back_to_the_commit`
- a rank that skips a step alone is told with all others, before a loss and after it:
  `test_a_rank_that_skips_a_step_on_a_device_is_told`
- errors of NCCL that the loss of a rank causes are taken for a loss: `test_errors_of_nccl_are_known`
- after such an error nothing is committed: `test_nothing_is_committed_after_an_error_of_nccl`
- a backend without gloo is refused: `test_a_backend_without_gloo_is_refused`
"""

import datetime
import time
import types

import accelerator
import pytest
import torch
import torch.distributed as dist
from gloo import leave_world, meet_in_a_server, run_ranks

from flatparam import elastic
from flatparam.elastic import training
from flatparam.fsdp.desync.stores import store_of_world
from flatparam.fsdp.desync.trace import TRANSPORT
from flatparam.fsdp.errors import OrderError
from tests.gpu import bodies


def begun(library):
    """Return the device, and a session as ``start`` leaves it."""
    here = accelerator.use(library)
    drawn = [torch.tensor([7], dtype=torch.uint8)]  # the state of the device's random numbers
    torch.sim.get_rng_state = lambda device: drawn[-1].clone()
    torch.sim.set_rng_state = lambda state, device: drawn.append(state)
    meet_in_a_server()
    store, rank = store_of_world(), dist.get_rank()
    leave_world()
    session = training.Session(store, f"{rank}.0", 2, "parity", 1, datetime.timedelta(seconds=60))
    training.begin_session(session, lambda: bodies.adam_of(here.device, None))
    return here, session, drawn


def goes_back(library, late):
    here, session, drawn = begun(library)
    here.module.late(late)
    model, optimizer = session.model, session.optimizer
    assert {one.type for one in dist.group.WORLD._device_types} == {"cpu", "sim"}
    bodies.steps_of(model, optimizer, here.device, 0)
    session.step = 3
    session.commit()
    assert session.generations[-1].data.is_pinned()
    wanted = bodies.steps_of(model, optimizer, here.device, 1)
    session.complete()
    drawn.append(torch.tensor([8], dtype=torch.uint8))
    session.go_to(session.epochs.without(session.epoch, []))
    assert session.step == 3
    assert drawn[-1].tolist() == [7]
    assert bodies.steps_of(model, optimizer, here.device, 1) == wanted


@pytest.mark.multiprocess
@pytest.mark.parametrize("late", ["others", "computing"])
def test_all_go_back_to_the_commit(late):
    run_ranks(goes_back, 2, accelerator.build(), late)


def skips(library, losses):
    here, session, _ = begun(library)
    session.commit()
    for _ in range(losses):
        session.go_to(session.epochs.without(session.epoch, []))
    try:
        if dist.get_rank():
            bodies.steps_of(session.model, session.optimizer, here.device, 0)
        session.commit()
    except OrderError as error:
        return str(error)


@pytest.mark.multiprocess
@pytest.mark.parametrize("losses", [0, 1])
def test_a_rank_that_skips_a_step_on_a_device_is_told(losses):
    begin = time.monotonic()
    for told in run_ranks(skips, 2, accelerator.build(), losses):
        assert "rank 0 commits a step" in told
        assert "rank 1 gathers the unit of" in told
    assert time.monotonic() - begin < 40.0  # the time-out is 60 s


@pytest.mark.parametrize(
    "text",
    [
        "NCCL communicator was aborted on rank 1. ",
        "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error, NCCL version 2.27.7",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
    ],
)
def test_errors_of_nccl_are_known(text):
    assert TRANSPORT.search(text)


def test_nothing_is_committed_after_an_error_of_nccl(monkeypatch):
    said = types.SimpleNamespace(name="SUCCESS")
    backends = [object(), types.SimpleNamespace(get_error=lambda: said)]
    monkeypatch.setattr(training, "all_groups", lambda: ["a group"])
    monkeypatch.setattr(training, "backends_of", lambda group: backends)
    training._check_communicators()
    said.name = "REMOTE_ERROR"
    with pytest.raises(RuntimeError, match=r"after an error of NCCL \(REMOTE_ERROR\)") as raised:
        training._check_communicators()
    assert TRANSPORT.search(str(raised.value))


def test_a_backend_without_gloo_is_refused():
    with pytest.raises(ValueError, match="expected backend to have gloo, as 'cpu:gloo,cuda:nccl' has, got 'nccl'"):
        elastic.start(None, backend="nccl")
