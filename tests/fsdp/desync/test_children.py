"""Ranks that are children of multiprocessing, in each of its ways to start.

Promises:
- an exception of a rank that is a child of multiprocessing, or of torch.multiprocessing.spawn, is told to the others
  with its text; also while a thread of its own keeps the child: `test_an_error_of_a_child_is_told`
- where the child has imported flatparam only in its function, the others are told at least that it has ended:
  `test_the_end_is_told_where_flatparam_was_imported_late`; for lost values it has another status, as in
  `test_fsdp_lost_values.py::test_so_does_a_child`: `test_so_has_a_child_that_imports_flatparam_late`
- a child ends with the status that Python gives it: `test_the_status_of_a_child_stays`
"""

import multiprocessing
import os
import re
import sys
import threading
import time

import late_import
import pytest
import simulated
import torch
import torch.distributed as dist
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp.errors import OrderError

pytestmark = pytest.mark.multiprocess

WAYS = ["fork", "forkserver", "spawn"]
ERROR = "rank 1 has raised an error of its own in .* and has ended: ValueError: batch 17 is bad"


def raises(rank, folder, how):
    """Rank 0 writes to a file what it is told of rank 1."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = FSDP(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        if how == "keeps a thread":
            threading.Thread(target=time.sleep, args=(8.0,)).start()
        if how != "exits":
            raise ValueError("batch 17 is bad")
        try:
            raise ValueError("batch 17 is bad")
        except ValueError:
            sys.exit(1)  # as torch.multiprocessing.spawn ends a process
    begin = time.monotonic()
    try:
        model(torch.ones(2, 4))
    except OrderError as error:
        with open(f"{folder}/told", "w") as file:
            file.write(f"{time.monotonic() - begin} {error}")
    os._exit(3)


def ends(way, call, *arguments):
    """Start a child for each of the arguments; return their exit codes."""
    context = multiprocessing.get_context(way)
    children = [context.Process(target=call, args=each) for each in zip(*arguments, strict=True)]
    try:
        for child in children:
            child.start()
        for child in children:
            child.join(60.0)
        return [child.exitcode for child in children]
    finally:
        for child in children:
            child.kill()


@pytest.mark.parametrize(
    ("way", "how"),
    [(way, "raises") for way in WAYS] + [("fork", "keeps a thread"), ("fork", "exits")],
)
def test_an_error_of_a_child_is_told(way, how, tmp_path):
    assert ends(way, raises, [0, 1], [tmp_path] * 2, [how] * 2) == [3, 1]
    seconds, told = (tmp_path / "told").read_text().split(" ", 1)
    assert re.match(ERROR, told), told
    assert float(seconds) < 6.0


def test_the_end_is_told_where_flatparam_was_imported_late(tmp_path):
    arguments = [__name__] * 2, ["raises"] * 2, [0, 1], [tmp_path] * 2, ["raises"] * 2
    assert ends("spawn", late_import.call, *arguments) == [3, 1]
    _, told = (tmp_path / "told").read_text().split(" ", 1)
    if sys.version_info < (3, 13):
        assert re.match(ERROR, told), told
    else:  # nothing tells it the error
        assert re.match(r"the process of rank 1 \(\d+\) has ended without a word", told), told


def test_so_has_a_child_that_imports_flatparam_late(tmp_path):
    arguments = [str(simulated.build())] * 2, [str(tmp_path)] * 2, [0, 1], ["reads_what_is_lost"] * 2
    assert ends("spawn", late_import.call, ["test_fsdp_lost_values"] * 2, ["end"] * 2, *arguments) == [1, 0]


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_the_status_of_a_child_stays(way):
    assert ends(way, sys.exit, [None, 0, 3, "", "no data"]) == [0, 0, 3, 1, 1]
