"""Values that an abort takes from a device are not saved, and a process that ignores it does not end with status 0.

The simulated device's collectives stand for NCCL's (simulated.py).
"""

import copy
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time

import forked_scripts
import pytest
import simulated
import torch
import torch.distributed as dist
from fsdp_models import wrap_blocks
from gloo import ends_of_ranks, meet_in_a_server, note, say, wait_until_said
from test_fsdp_order import ALL, Chosen
from torch.distributed.fsdp import StateDictType

import flatparam.checkpoint
from flatparam import FullyShardedDataParallel, ShardingStrategy
from flatparam.fsdp.errors import OrderError

pytestmark = pytest.mark.multiprocess

HYBRID = "HYBRID_SHARD"


def lose_the_last_gradients(strategy, end):
    """Rank 1 ends before a backward of rank 0, and nothing raises.

    There is one unit: the simulated device waits for a collective before it begins the next one.
    """
    sim, rank = torch.device("sim", 0), dist.get_rank()
    group = simulated.new_group()
    if strategy == HYBRID:  # shards of one rank, and copies on both
        group = [simulated.new_group([0]), simulated.new_group([1])][rank], group
    ways = {"device_id": sim, "process_group": group, "sharding_strategy": ShardingStrategy[strategy]}
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Chosen(), **ways)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        loss = model(torch.ones(2, 3, device=sim), ALL).sum()
        if rank == 1 and number == 3:
            wait_until_said("rank 0 has put all of its step to the device")
            time.sleep(1.0)  # it begins to wait
            end()
        loss.backward()
        optimizer.step()
    say("rank 0 has put all of its step to the device")
    return model, optimizer


def save_what_is_lost(library, strategy, save):
    """Without a collective; twice."""
    meet_in_a_server()
    simulated.use(library, late="computing")
    alone, folder = dist.new_group([0]), tempfile.mkdtemp()
    model, optimizer = lose_the_last_gradients(strategy, lambda: os.kill(os.getpid(), signal.SIGKILL))
    saves = {
        "state_dict": model.state_dict,
        "optim_state_dict": lambda: FullyShardedDataParallel.optim_state_dict(model, optimizer),
        "full_optim_state_dict": lambda: FullyShardedDataParallel.full_optim_state_dict(model, optimizer),
        "summon": lambda: FullyShardedDataParallel.summon_full_params(model).__enter__(),
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: model.__reduce_ex__(2),
        "checkpoint": lambda: flatparam.checkpoint.save(f"{folder}/saved", model, optimizer, process_group=alone),
        "async": lambda: flatparam.checkpoint.async_save(f"{folder}/saved", model, optimizer, process_group=alone),
    }
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    begin = time.monotonic()
    for _ in range(2):
        try:
            saves[save]()
        except RuntimeError as error:
            left = os.listdir(folder)
            note(json.dumps([type(error).__name__, str(error), time.monotonic() - begin, left]))
        else:
            os._exit(4)
    os.rmdir(folder)
    os._exit(3)


@pytest.mark.parametrize(
    ("strategy", "save"),
    [
        ("FULL_SHARD", "state_dict"),
        (HYBRID, "state_dict"),
        ("NO_SHARD", "state_dict"),
        ("NO_SHARD", "optim_state_dict"),
        ("NO_SHARD", "full_optim_state_dict"),
        ("NO_SHARD", "summon"),
        ("FULL_SHARD", "deepcopy"),
        ("FULL_SHARD", "pickle"),
        ("NO_SHARD", "checkpoint"),
        ("NO_SHARD", "async"),
    ],
)
def test_what_came_of_values_that_are_lost_is_not_saved(strategy, save):
    library = str(simulated.build())
    (code, _, said), _ = ends_of_ranks(save_what_is_lost, 2, library, strategy, save, timeout=60.0)
    assert code == 3, said
    kind, reason, seconds, left = json.loads(said)
    assert kind == ("CheckpointError" if save in ("checkpoint", "async") else "OrderError"), said
    assert re.search(r"the process of rank 1 .* has ended .* has no values", reason), reason
    assert seconds < 10.0, seconds
    assert not left


def end(library, folder, rank, body):
    """A rank that ends as ``body`` does."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=int(rank), world_size=2)
    globals()[body](simulated.use(library, late="computing"))
    dist.destroy_process_group()  # else torch's gloo may abort the process


def reads_what_is_lost(device):
    """And comes to no call that raises."""
    model, _ = lose_the_last_gradients("NO_SHARD", sys.exit)
    next(model.parameters()).sum().item()
    return model


def is_told_later(device):
    model = reads_what_is_lost(device)
    with pytest.raises(OrderError):
        model(torch.ones(2, 3, device="sim"), ALL).sum().backward()
    time.sleep(2.0)  # autograd's thread drops the error: torch aborts a process that ends while a thread frees tensors


def differ(group, device):
    torch.manual_seed(0)
    model = wrap_blocks(Chosen(), process_group=group, device_id=device if device.type == "sim" else None)

    def train():
        for number in range(6):
            blocks = (0, 2, 3) if dist.get_rank() and number == 3 else ALL
            model(torch.ones(2, 3, device=device), blocks).sum().backward()

    with pytest.raises(OrderError):
        train()


def is_told_of_another_loss(device):
    """What a user was told of one group is nothing of another one."""
    differ(dist.new_group(), torch.device("cpu"))
    reads_what_is_lost(device)


def differs_and_catches(device):
    """The thread that looks finds, after the user was told, that the ranks differ."""
    differ(simulated.new_group(), torch.device("sim", 0))
    time.sleep(1.5)


def has_all_values(device):
    """Rank 1 takes a step more, in vain; rank 0 has all values, and saves them."""
    sim = torch.device("sim", 0)
    group = simulated.new_group()
    torch.manual_seed(0)
    model = wrap_blocks(Chosen(), process_group=group, device_id=sim)

    def train():
        for _ in range(4):  # the order is new until then: in the second step ranks ask each other once who writes ahead
            model(torch.ones(2, 3, device=sim), ALL).sum().backward()
            device.synchronize()

    train()
    dist.barrier()
    if dist.get_rank() == 1:
        device.set_time_out(group._get_backend(sim), 12.0)
        with pytest.raises(OrderError):
            train()
        say("rank 1 was told")
    else:
        wait_until_said("rank 1 was told")
        time.sleep(1.0)  # its thread that looks has found it
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
        model.state_dict()


def saves_what_is_there(device):
    """Rank 1 ends before a call that needs it, when rank 0 has all values."""
    sim = torch.device("sim", 0)
    torch.manual_seed(0)
    model = wrap_blocks(Chosen(), process_group=simulated.new_group(), device_id=sim)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 3, device=sim), ALL).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    device.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1.0)
        sys.exit()
    with pytest.raises(OrderError):
        FullyShardedDataParallel.optim_state_dict(model, optimizer)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    model.state_dict()


STATUSES = {
    reads_what_is_lost: 1,
    is_told_later: 0,
    is_told_of_another_loss: 1,
    differs_and_catches: 0,
    has_all_values: 0,
    saves_what_is_there: 0,
}
PROGRAM = f"import sys; import {__name__} as module; module.end(*sys.argv[1:])"


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Of the two ranks of each body: three bodies at a time, as all of them wait."""
    folder = tmp_path_factory.mktemp("ends")
    programs = []
    for body in STATUSES:
        place = folder / body.__name__
        place.mkdir()
        programs += [(PROGRAM, [str(simulated.build()), str(place), str(rank), body.__name__]) for rank in range(2)]
    groups = forked_scripts.run_side_by_side([programs[:6], programs[6:]], folder, imported=[__name__])
    found = itertools.chain(*groups)
    return dict(zip(STATUSES, zip(found, found, strict=True), strict=True))


@pytest.mark.parametrize("body", STATUSES)
def test_a_process_that_nobody_tells_of_lost_values_ends_with_another_status(ends, body):
    first, second = ends[body]
    assert (first.status, second.status) == (STATUSES[body], 0), first.err + second.err


def test_so_does_a_child(tmp_path):
    """Of the test runner's fork server."""
    start = multiprocessing.get_context("forkserver").Process
    arguments = str(simulated.build()), str(tmp_path)
    children = [start(target=end, args=(*arguments, rank, reads_what_is_lost.__name__)) for rank in range(2)]
    try:
        for child in children:
            child.start()
        for child in children:
            child.join(120.0)
        assert [child.exitcode for child in children] == [1, 0]
    finally:
        for child in children:
            child.kill()
