"""The tests of ``make test-gpu``. Without a GPU they run on the simulated device; on one, two ranks share it."""

import accelerator
import pytest
import staged
import torch
import torch.distributed as dist
from bodies import HERE, LOW, PLAIN, losses_of, wrapped
from gloo import run_ranks

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def library():
    return accelerator.build()


@pytest.mark.timeout(700)  # beside another job 240 s were too few
@pytest.mark.parametrize(("body", "ranks"), HERE, ids=[f"{body.__name__}-{ranks}" for body, ranks in HERE])
def test_on_a_gpu(library, body, ranks):
    run_ranks(body, ranks, library, timeout=600.0)


def through_the_host(library, collectives):
    """Collectives of ranks that share an accelerator give the bits of the simulated device's own."""
    here = accelerator.use(library)
    staged.use(collectives, "sim")
    group = dist.new_group(backend="sim:staged")
    for strategy in PLAIN:
        ways = {"sharding_strategy": strategy, "mixed_precision": LOW}
        wanted = losses_of(wrapped(here.new_group(), here.device, **ways), here.device, steps=3)
        assert torch.equal(losses_of(wrapped(group, here.device, **ways), here.device, steps=3), wanted), strategy
    values = torch.arange(4.0, device=here.device) + 10 * dist.get_rank()
    several = [torch.zeros(8, device=here.device) for _ in range(2)]
    group._start_coalescing(here.device)
    for each in several:
        dist.all_gather_into_tensor(each, values, group=group, async_op=True)
    group._end_coalescing(here.device).wait()
    assert [each.tolist() for each in several] == [[0, 1, 2, 3, 10, 11, 12, 13]] * 2
    got = torch.zeros(4 if dist.get_rank() else 2, device=here.device)
    dist.all_to_all_single(got, values[:3].clone(), [len(got) // 2] * 2, [1, 2], group=group)
    assert got.tolist() == ([1, 2, 11, 12] if dist.get_rank() else [0, 10])


@pytest.mark.thorough
@pytest.mark.skipif(accelerator.ON_CUDA, reason="the tests above have them")
def test_collectives_through_the_host(library):
    run_ranks(through_the_host, 2, library, str(staged.build()))
