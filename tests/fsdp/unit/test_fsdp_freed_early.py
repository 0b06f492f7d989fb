"""Memory that a side stream still writes to is not used again, even if the model is gone.

The device is simulated (simulated.py), and all streams are late but the one that computes: what is written too late is
seen in the tensors that have the memory by then.
"""

import contextlib
import functools
import gc
import itertools
import random
import sys
import time
import weakref
from pathlib import Path

import forked_scripts
import pytest
import simulated
import torch
from fsdp_models import data, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from test_fsdp_device import groups_of, three_groups
from test_fsdp_streams import LOW
from test_fsdp_streams import WAYS as PLAIN_WAYS
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def library():
    return str(simulated.build())


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
        self.skips = False

    def forward(self, x):
        x = self.blocks[0](x)
        return x if self.skips else self.blocks[1](x)


def deleted(library):
    """A model goes while a unit is cast to its place that was gathered ahead, and that nobody has come to."""
    device = simulated.use(library)
    sim = torch.device("sim", 0)
    arguments = {"process_group": simulated.new_group(), "device_id": sim, "mixed_precision": LOW}
    model = wrap_blocks(Skips(), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True, **arguments)
    x = torch.ones(2, 64, device=sim)
    with torch.no_grad():
        model(x)
        model.module.skips = True
        before = device.memory()[0]
        model(x)
        ahead = device.memory()[0] - before
        assert ahead >= 2 * 64 * 65
        del model
        blocks = [torch.zeros(64 * 65, device=sim, dtype=torch.bfloat16) for _ in range(4)]  # get its memory
    device.synchronize()
    assert not any(block.any().item() for block in blocks)


def test_memory_that_is_written_to_is_not_used_again(library):
    run_ranks(deleted, 1, library)


def not_gathered(library, strategy):
    """The collective cannot be begun that was to gather what this rank's shard is being cast to."""
    device = simulated.use(library)
    sim, groups = torch.device("sim", 0), groups_of(strategy.name, *three_groups(simulated.new_group))
    layer = nn.Linear(64, 64)
    nn.init.ones_(layer.weight)
    model = FSDP(layer, process_group=groups, device_id=sim, mixed_precision=LOW, sharding_strategy=strategy)
    x = torch.ones(2, 64, device=sim)
    with torch.no_grad():
        model(x)
        model._flat_param.add_(1.0)
        device.fail_after(0)
        with pytest.raises(RuntimeError, match="a collective that was to fail"):
            model(x)
        device.fail_after(-1)
        # what was being cast may have been freed, or is with the model
        blocks = [torch.zeros(n, device=sim, dtype=torch.bfloat16) for n in (64 * 65, 64 * 65 // 2) for _ in range(4)]
        del model
        blocks += [torch.zeros_like(block) for block in blocks]
    device.synchronize()
    assert not any(block.any().item() for block in blocks)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.LAYER_ZERO_NESTED])
def test_memory_of_a_gather_that_fails_is_not_used_again_too_early(library, strategy):
    run_ranks(not_gathered, 2 if strategy is ShardingStrategy.FULL_SHARD else 4, library, strategy)


def stop(*_):
    raise RuntimeError("stopped")


def not_added_to(library):
    """A model goes while a gradient that no_sync has put to the host comes back, to which nobody adds."""
    device = simulated.use(library)
    sim = torch.device("sim", 0)
    model = Skips()
    groups = groups_of("LAYER_ZERO", *three_groups(simulated.new_group))
    base = device.memory()[0]
    model = wrap_blocks(
        model, process_group=groups, device_id=sim, sharding_strategy=ShardingStrategy.LAYER_ZERO, offload_grads=True
    )
    x = torch.ones(2, 64, device=sim)
    with model.no_sync():
        model(x).sum().backward()
    model.module.blocks[1].module.register_full_backward_hook(stop)
    with pytest.raises(RuntimeError, match="stopped"):
        model(x).sum().backward()
    del model, x
    patience = time.monotonic() + 10  # a thread of autograd's keeps the graph for a moment
    while gc.collect() >= 0 and device.memory()[0] > base:
        assert time.monotonic() < patience, device.memory()
        time.sleep(0.01)
    blocks = [torch.zeros(64 * 65, device=sim) for _ in range(12)]  # get its memory
    device.synchronize()
    assert not any(block.any().item() for block in blocks)


def test_memory_of_a_gradient_that_comes_back_is_not_used_again_too_early(library):
    run_ranks(not_added_to, 2, library)


def cleaned_up_on_a_failed_device(library, how):
    """While a gradient comes back from the host the device fails for good. The model goes, or recovers first."""
    device = simulated.use(library)
    sim = torch.device("sim", 0)
    model, groups = Skips(), groups_of("LAYER_ZERO", *three_groups(simulated.new_group))
    model = wrap_blocks(
        model, process_group=groups, device_id=sim, sharding_strategy=ShardingStrategy.LAYER_ZERO, offload_grads=True
    )
    x = torch.ones(2, 64, device=sim)
    with model.no_sync():
        model(x).sum().backward()

    def fail(*_):
        device.fail()
        stop()

    model.module.blocks[1].module.register_full_backward_hook(fail)
    with pytest.raises(RuntimeError, match="stopped"):
        model(x).sum().backward()
    if how == "recovers":
        model.reset_state()
        with pytest.raises(RuntimeError, match="the device has failed"):
            model(x)
    alive = weakref.ref(model.module)
    del model, fail
    patience = time.monotonic() + 10
    while gc.collect() >= 0 and alive() is not None:
        assert time.monotonic() < patience
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["goes", "recovers"])
def test_a_failed_device_neither_hides_an_exception_nor_ends_the_process(library, how):
    run_ranks(cleaned_up_on_a_failed_device, 2, library, how)


WAYS = {**PLAIN_WAYS, "segments": {**PLAIN_WAYS["whole"], "segments": True}}


def whatever_fails(library, seed):
    """Steps that fail somewhere, on all ranks alike. Then the model goes, or the next step is as without them."""
    device, chance = simulated.use(library), random.Random(seed)
    sim, groups = torch.device("sim", 0), three_groups(functools.partial(simulated.new_group, on_host=seed % 2 == 0))
    for _ in range(30):
        way, fails = chance.choice(list(WAYS)), chance.choice(["a collective", "a forward", "a backward"])
        which, block = chance.randrange(12), chance.randrange(3)
        micro, goes_on = chance.random() < 0.5, chance.random() < 0.5
        note(f"{way}: {fails} fails: {which} or {block}; no_sync {micro}, goes on {goes_on}")
        of_way = groups_of(WAYS[way]["sharding_strategy"].name, *groups)
        arguments = {"use_orig_params": True, "process_group": of_way, "device_id": sim, **WAYS[way]}
        model = wrap_blocks(make(), **arguments)
        loss_of(model, data(0).to(sim)).backward()
        model.zero_grad()
        if micro:
            with model.no_sync():
                loss_of(model, data(1).to(sim)).backward()
        unit = model.module.blocks[block]
        if fails == "a collective":
            device.fail_after(which)
        hook = (unit.register_full_backward_hook if fails == "a backward" else unit.register_forward_hook)(
            stop if fails != "a collective" else lambda *_: None
        )
        with (
            contextlib.suppress(RuntimeError) if fails == "a collective" else pytest.raises(RuntimeError, match="stop")
        ):
            loss_of(model, data(2).to(sim)).backward()
        device.fail_after(-1)
        hook.remove()
        if goes_on:
            model.zero_grad()
            twin = wrap_blocks(make(), **arguments)
            found, wanted = (gradients_of(each, data(3).to(sim)) for each in (model, twin))
            assert all(map(torch.equal, found, wanted))
            del twin
        del model, unit, hook
        gc.collect()
        device.synchronize()  # which tells of memory that was written to after it was freed


BEFORE = ("a forward", "micro-batches", "cleared micro-batches")


def then_on_another_stream(library):
    """Memory that was made for one stream is used last on another one, which waits for the first, and is waited for."""
    device = simulated.use(library)
    sim, groups = torch.device("sim", 0), three_groups(simulated.new_group)
    for way, before in itertools.product(WAYS, BEFORE):
        note(f"{way}: {before}")
        arguments = {"use_orig_params": True, "device_id": sim, **WAYS[way]}
        arguments["process_group"] = groups_of(arguments["sharding_strategy"].name, *groups)
        model = wrap_blocks(make(), **arguments)
        for k in range(3):
            with model.no_sync():
                loss = loss_of(model, data(k).to(sim))
                if before != "a forward":
                    loss.backward()
        if before == "cleared micro-batches":
            model.zero_grad()
        side = torch.Stream(sim)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            loss_of(model, data(3).to(sim)).backward()
            model.zero_grad()
        torch.accelerator.current_stream().wait_stream(side)
        device.synchronize()


def test_memory_of_one_stream_that_another_one_uses_last(library):
    run_ranks(then_on_another_stream, 2, library)


def gradients_of(model, x):
    loss = loss_of(model, x)
    loss.backward()
    return [loss.detach().cpu(), *(param.grad.cpu() for param in model.parameters() if param.grad is not None)]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_whatever_fails_no_memory_is_written_to_after_it_was_freed(library, seed):
    run_ranks(whatever_fails, 4 if seed % 2 else 2, library, seed, timeout=120.0)


ENDS = """
import gc, sys, torch, torch.distributed as dist
sys.path[:0] = sys.argv[2:]
import simulated
from fsdp_models import data, loss_of, make, wrap_blocks
from flatparam import ShardingStrategy

device = simulated.use(sys.argv[1])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = simulated.new_group([0]), simulated.new_group()
sim = torch.device("sim", 0)
model = wrap_blocks(
    make(), process_group=groups, device_id=sim, sharding_strategy=ShardingStrategy.LAYER_ZERO, offload_grads=True
)

def stop(*_):
    raise RuntimeError("stopped")

loss_of(model, data(0).to(sim)).backward()
model.module.blocks[0].register_full_backward_hook(stop)
try:
    with model.no_sync():
        loss_of(model, data(0).to(sim)).backward()
except RuntimeError as error:
    assert "stopped" in str(error)
del model, groups
gc.collect()
dist.destroy_process_group()
device.end_first()  # then come static variables
print("stopped")
"""


def test_a_process_ends_while_gradients_leave_for_the_host(library):
    here = Path(__file__).parent
    folders = [str(here.parents[1] / "support"), str(here), str(here.parents[2])]
    ended = forked_scripts.completed([sys.executable, "-c", ENDS, library, *folders], is_finalized=True)
    assert (ended.returncode, ended.stdout) == (0, "stopped\n"), ended
