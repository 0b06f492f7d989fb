"""``_C.Gather``: all-gathers that Python begins without torch's Python, against the ranks' own numbers."""

import weakref

import pytest
import torch
import torch.distributed as dist
from support.gloo import fake_world, run_ranks, say, wait_until_said

from flatparam import _C
from flatparam.common.collectives import name_in_cpp

pytestmark = pytest.mark.multiprocess


def _gathers():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    name = name_in_cpp(dist.group.WORLD)
    gather = _C.Gather(dist.group.WORLD, name, True)
    assert gather.is_completed()  # there is none
    assert gather.wait()
    output, shard = torch.zeros(2 * world_size), torch.full((2,), float(rank))
    if rank == 0:
        gather.begin(output, shard)
        assert not gather.wait()  # for the other rank, which waits
        assert not gather.is_completed()
        with pytest.raises(RuntimeError, match="under way"):
            gather.begin(output, shard)
        shard.data = torch.full((2,), -1.0)  # what is sent stays what it was
        say("rank 0 has waited")
    else:
        wait_until_said("rank 0 has waited")
        gather.begin(output, shard)
    while not gather.wait():
        pass
    assert output.tolist() == [0.0, 0.0, 1.0, 1.0]
    with pytest.raises(RuntimeError):
        gather.begin(torch.zeros(3), shard)
    assert gather.is_completed()
    gather.begin(output, torch.full((2,), 2.0))
    while not gather.wait():
        pass
    assert output.tolist() == [2.0] * 4


def test_a_gather_is_begun_waited_for_in_slices_and_used_again():
    run_ranks(_gathers, 2)


def _let_go():
    """The backend's thread lets go of what it was given, and would take the GIL for an object of Python's."""
    gather = _C.Gather(dist.group.WORLD, name_in_cpp(dist.group.WORLD), True)
    tensors = [torch.zeros(4), torch.ones(2)]
    gone = [weakref.ref(tensor) for tensor in tensors]
    if dist.get_rank() == 0:
        gather.begin(*tensors)
        del tensors[:]
        assert [tensor() for tensor in gone] == [None, None]
        say("rank 0 has let go")
    else:
        wait_until_said("rank 0 has let go")
        gather.begin(*tensors)
    while not gather.wait():
        pass


def test_a_gather_under_way_holds_no_objects_of_python():
    run_ranks(_let_go, 2)


def test_what_is_no_group_or_tensor_is_refused():
    with fake_world(2):
        with pytest.raises(RuntimeError):
            _C.Gather(dist.group.WORLD, "no group of this name", False)
        gather = _C.Gather(dist.group.WORLD, name_in_cpp(dist.group.WORLD), False)
        for wrong in ((None, torch.ones(1)), (torch.ones(2), object())):
            with pytest.raises(TypeError, match="plain"):
                gather.begin(*wrong)
        with pytest.raises(TypeError):
            gather.begin(torch.ones(2))
        assert gather.wait()
