"""``_C.Gather``: all-gathers that Python begins without torch's Python, against the ranks' own numbers."""

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
