"""``elastic.resize`` ends in the middle, on one rank or on all: model and optimizer are as before, and go on.

Promises:
- an error of one rank in the middle of the move is raised by all: `test_an_error_of_one_rank_is_raised_by_all`
- Ctrl-C at any line before the commit: `test_ctrl_c_at_any_line`
- Ctrl-C on one rank alone, which ends it: the others raise an error that names the rank, in seconds, and hold what they
  held before: `test_ctrl_c_on_one_rank_alone`
- an exception of a module's `set_extra_state` finds everything else moved: `test_an_extra_state_comes_last`
"""

import contextlib
import linecache
import os
import time

import pytest
import torch
import torch.distributed as dist
from fsdp_models import loss_of
from gloo import note
from interrupting import Bomb
from simulated_ranks import simulate_ranks
from test_resize import OPTIMIZERS, built, everything, same, steps

from flatparam import _C, elastic
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.checkpoint import CheckpointError
from flatparam.checkpoint.loading import Loading
from flatparam.elastic import peers, resizing, transport
from flatparam.fsdp.errors import OrderError, StateError
from flatparam.fsdp.sharding import flat_param
from tests.simulation.process import simulated

pytestmark = pytest.mark.multiprocess
# a function of the move, and the number of its call on one rank that raises
FAULTS = {
    "plan of the boxes": (resizing, "described", 1),
    "addresses of the boxes": (peers, "show", 1),
    "second flat parameter": (flat_param.FlatParam, "bind", 2),
    "plan of the reads": (Loading, "prepare_from", 1),
    "second unit's description": (resizing, "describe_unit", 2),
    "copy on the rank": (transport, "box_of", 1),
    "buffers for the bytes": (transport, "_rounds", 2),
    "bytes to send": (transport, "_bytes", 2),
    "read in memory": (_C, "read_process", 2),
}
BEFORE_COMMIT = ("resize", "check", "plan_old", "check_units", "carry_out", "bind", "compare_units", "move", "__init__")
BEFORE_COMMIT += ("new_word", "show", "_address", "read", "told")
FILES = [module.__file__ for module in (resizing, transport, peers)]
WAYS = ["sent", "read in memory"]
show = peers.show


def go_by(way):
    """Simulated ranks have made-up process numbers, so their boxes are sent. With the real one all read their own."""
    if way == "read in memory":
        process = int(os.readlink("/proc/self"))
        peers.show = lambda parts, word: show(parts, word)._replace(process=process)


def started():
    """Two models, with gradients, that ranks 0 and 1 of 3 hold. The second one's resizes are not disturbed."""
    pairs = []
    for _ in range(2):
        model = built("FULL_SHARD", True)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        steps(model, optimizer, dist.get_rank(), 0, 2)
        elastic.resize(model, optimizer, [0, 1])
        if dist.get_rank() < 2:
            loss_of(model, torch.ones(4, 3)).backward()
        pairs.append((model, optimizer))
    return pairs


def as_before(pair, twin):
    assert pair[0]._unit.is_away == (dist.get_rank() == 2)
    if dist.get_rank() == 2:
        assert not pair[1].state
        with pytest.raises(StateError, match="holds no shards"):
            pair[0].state_dict()
    else:
        same(everything(*pair), everything(*twin))
        for mine, other in zip(pair[0].parameters(), twin[0].parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, other.grad)


def goes_on(pair, twin, at):
    """Both train, move and train: alike."""
    rank = dist.get_rank()
    if rank < 2:
        assert steps(*pair, rank, at, 2) == steps(*twin, rank, at, 2)
    for ranks in ([1, 2], [0, 1]):
        for one in (pair, twin):
            elastic.resize(*one, ranks)
    as_before(pair, twin)
    if rank < 2:
        assert steps(*pair, rank, at + 2, 1) == steps(*twin, rank, at + 2, 1)


def fails_on_one():
    pair, twin = started()
    for fault, (owner, name, count) in FAULTS.items():
        working, calls = getattr(owner, name), 0

        def failing(*args, working=working, count=count):
            nonlocal calls
            calls += dist.get_rank() == 1
            if calls == count and dist.get_rank() == 1:
                calls = count + 1
                raise RuntimeError("no memory is left")
            return working(*args)

        dist.barrier()  # ranks that share the module have all read it
        setattr(owner, name, failing)
        go_by(fault)
        dist.barrier()
        with pytest.raises(CheckpointError, match="rank 1: RuntimeError: no memory is left"):
            elastic.resize(*pair, [0, 1, 2])  # a rank keeps a part, gets one and gives one
        dist.barrier()
        setattr(owner, name, working)
        dist.barrier()
        as_before(pair, twin)
    goes_on(pair, twin, 2)


def test_an_error_of_one_rank_is_raised_by_all():
    simulate_ranks(fails_on_one, 3)


def interrupted(way):
    go_by(way)
    pair, twin = started()
    with Bomb(FILES) as listing:
        elastic.resize(*twin, [1, 2])
    elastic.resize(*twin, [0, 1])
    found = [None] * 3
    dist.all_gather_object(found, [place for place in listing.places if place[1] in BEFORE_COMMIT and place[3] == 1])
    common = (place for place in found[0] if place in found[1] and place in found[2])
    places = [place for place in common if "return Resized(" not in linecache.getline(place[0], place[2])]
    assert len(places) > 60
    assert {"new_word", "show"} <= {place[1] for place in places}
    for place in places:
        note(str(place))
        bomb = Bomb(FILES, place, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt), bomb:
            elastic.resize(*pair, [1, 2])
        assert bomb.exploded
        as_before(pair, twin)
    goes_on(pair, twin, 2)


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_at_any_line(way):
    simulate_ranks(interrupted, 3, way)


def interrupted_alone(rank, part, way):
    """Rank 1 is interrupted at one of its lines, ``part`` of the way."""
    go_by(way)
    pair, twin = started()
    with Bomb(FILES) as listing:
        elastic.resize(*twin, [1, 2])
    elastic.resize(*twin, [0, 1])
    if rank == 1:
        places = [place for place in listing.places if place[1] in BEFORE_COMMIT and place[3] == 1]
        with Bomb(FILES, places[int(part * len(places))], KeyboardInterrupt):
            elastic.resize(*pair, [1, 2])
    begin = time.monotonic()
    with pytest.raises((OrderError, CheckpointError), match="rank 1 has"):
        elastic.resize(*pair, [1, 2])
    as_before(pair, twin)
    return time.monotonic() - begin


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_on_one_rank_alone(way):
    for tenth in range(10):
        run = simulated(interrupted_alone, 3, 1, tenth / 10, way)
        assert run.errors[1][0] == "KeyboardInterrupt", run.story
        assert len(run.errors) == 1, run.story
        assert max(run.results.values()) < 3.0


class Refusing(torch.nn.Linear):
    """Its ``set_extra_state`` raises where ``raises`` is set."""

    raises = False

    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        if self.raises:
            raise RuntimeError("no such state here")


def extra_state_refused():
    pairs = []
    for raises in (True, False):
        torch.manual_seed(0)
        model = FSDP(Refusing(3, 4), use_orig_params=True)
        model.module.raises = raises and dist.get_rank() == 1
        optimizer = OPTIMIZERS["adam"](model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="no such state") if model.module.raises else contextlib.nullcontext():
            elastic.resize(model, optimizer, [0, 1])
        pairs.append((model, optimizer))
    if dist.get_rank() < 2:
        same(everything(*pairs[0]), everything(*pairs[1]))


def test_an_extra_state_comes_last():
    simulate_ranks(extra_state_refused, 3)
