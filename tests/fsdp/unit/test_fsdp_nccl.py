"""The runtime's use of NCCL beside collectives: the average, registered memory, aligned shards.

And what it does where there is no memory, or no collective for a device.

The simulated device's collectives stand for it (simulated.py). The oracle is the same training on the CPU, bit for bit.
"""

import contextlib
import re
import warnings

import pytest
import simulated
import torch
import torch.distributed as dist
from fsdp_models import data, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from test_fsdp_device import assert_equal, groups_of, three_groups, train
from torch import nn

from flatparam import CPUOffload, MixedPrecision, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp.sharding.parameters import default_alignment

CPU = torch.device("cpu")
IN_FP32 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
IN_BF16 = MixedPrecision(param_dtype=torch.bfloat16)

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def library():
    return str(simulated.build())


def averaged(library, shared):
    """``shared``: whether the number of ranks leaves a power of two to divide by after the reduction."""
    device = simulated.use(library)
    sim, three = torch.device("sim", 0), three_groups if shared else lambda new_group: [new_group()] * 3
    on_cpu, on_sim = three(dist.new_group), three(simulated.new_group)
    ways = [("FULL_SHARD", None), ("FULL_SHARD", IN_FP32), ("FULL_SHARD", IN_BF16), ("NO_SHARD", None)]
    for strategy, precision in [*ways, *([("HYBRID_SHARD", None)] if shared else [])]:
        note(f"{strategy}, {precision}")
        ways = {"sharding_strategy": ShardingStrategy[strategy], "mixed_precision": precision, "use_orig_params": True}
        wanted = train(wrap_blocks(make(), process_group=groups_of(strategy, *on_cpu), **ways), CPU, 2, 1)
        model = wrap_blocks(make(), process_group=groups_of(strategy, *on_sim), device_id=sim, **ways)
        assert_equal(train(model, sim, 2, 1), wanted, strategy)
        loss = loss_of(model, data(0).to(sim))
        device.operations()
        loss.backward()
        seen = device.operations()
        multiplies, units = shared and precision is not IN_BF16, 1 + len(model.blocks)
        seen = seen.get("simulated::multiplied", 0), seen["aten::div"]
        assert seen == ((units, 1) if multiplies else (0, 1 + units)), seen  # autograd divides for the mean


@pytest.mark.parametrize(("ranks", "shared"), [(4, True), (3, False)])
def test_the_collective_multiplies_instead_of_a_division_after_it(library, ranks, shared):
    run_ranks(averaged, ranks, library, shared)


def in_registered_memory(library, how, line):
    """``how``: what the group says of memory, as simulated_device.cpp has it; ``line``: what is told then."""
    device = simulated.use(library)
    device.registers(how)
    sim, on_cpu, on_sim = torch.device("sim", 0), three_groups(dist.new_group), three_groups(simulated.new_group)
    told = []
    for strategy in ("FULL_SHARD", "LAYER_ZERO_NESTED"):
        note(strategy)
        ways = {"sharding_strategy": ShardingStrategy[strategy], "mixed_precision": IN_FP32}
        wanted = train(wrap_blocks(make(), process_group=groups_of(strategy, *on_cpu), **ways), CPU, 2)
        device.operations()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = wrap_blocks(make(), process_group=groups_of(strategy, *on_sim), device_id=sim, **ways)
            assert_equal(train(model, sim, 2), wanted, strategy)
        told += [str(warning.message) for warning in caught if "FLATPARAM_REGISTERED" in str(warning.message)]
        assert (device.operations().get("simulated::registered", 0) > 20) == (line is None)
    assert len(told) == (line is not None)
    assert line is None or (line in told[0] and "and more" not in told[0])


@pytest.mark.parametrize(
    ("how", "line"), [(0, "nccl does not on sim:0"), (1, "memory that could not be registered"), (2, None)]
)
def test_training_in_registered_memory_has_the_bits_of_the_cpu(library, how, line):
    run_ranks(in_registered_memory, 4, library, how, line, environment={"FLATPARAM_REGISTERED": "1"})


def test_shards_of_nccl_start_at_16_bytes():
    assert default_alignment(torch.device("cuda", 1)) == 16
    assert [default_alignment(device) for device in (CPU, torch.device("meta"), None)] == [None] * 3


def without_room(library, segments):
    """Memory runs out at each place of a step in turn; then the model trains on as if it had not begun that step."""
    device = simulated.use(library)
    sim, group = torch.device("sim", 0), simulated.new_group()

    def made(where, group):
        model = wrap_blocks(make(), process_group=group, device_id=where, use_orig_params=True, segments=segments)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def stepped(model, optimizer, step, where):
        loss = loss_of(model, data(step).to(where))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().cpu()

    plain, model = made(CPU, dist.group.WORLD), made(sim, group)
    assert torch.equal(stepped(*model, 0, sim), stepped(*plain, 0, CPU))
    left, failed = 0, []
    while True:
        note(f"{left} bytes left")
        x = data(100).to(sim)
        device.room(device.memory()[0] + left)
        try:
            loss_of(model[0], x).backward()
        except torch.OutOfMemoryError as error:
            failed.append(str(error))
        else:
            break
        finally:
            device.room(-1)
        model[1].zero_grad()
        del x
        found, wanted = stepped(*model, 1 + len(failed), sim), stepped(*plain, 1 + len(failed), CPU)
        assert torch.equal(found, wanted), (left, found, wanted)
        lacking = torch.tensor(int(re.search(r"no room for \d+ bytes: (\d+) too few", failed[-1])[1]))
        dist.all_reduce(lacking, op=dist.ReduceOp.MIN)
        left += lacking.item()  # for the next place to be the first without room
    note(f"{len(failed)} places")
    assert len(failed) > 20


@pytest.mark.parametrize("segments", [False, True])
def test_a_model_without_room_trains_on_when_there_is_some(library, segments):
    run_ranks(without_room, 2, library, segments)


def elsewhere(library):
    simulated.use(library)
    for group, module, has, there in (
        (simulated.new_group(), nn.Linear(4, 4), "sim", "cpu"),
        (dist.group.WORLD, nn.Linear(4, 4).to("sim:0"), "cpu or cuda", "sim:0"),
    ):
        on = f"`weight` on a device that its process group .* for, {has}; it is on {there}: pass device_id="
        with pytest.raises(ValueError, match=on):
            FSDP(module, process_group=group)


def test_parameters_on_a_device_that_the_group_has_no_collectives_for(library):
    run_ranks(elsewhere, 2, library)


def captured(library):
    device = simulated.use(library)
    sim = torch.device("sim", 0)
    for ways, warm, message in (
        ({}, 0, "run a few steps before"),
        ({}, 1, None),
        ({"sharding_strategy": ShardingStrategy.NO_SHARD}, 0, "run a few steps before"),
        ({"sharding_strategy": ShardingStrategy.ZERO_1}, 1, "ZERO_1 and LAYER_ZERO cannot be captured"),
        ({"cpu_offload": CPUOffload(True)}, 1, "leave out CPUOffload"),
    ):
        note(f"{ways}, {warm}")
        model = wrap_blocks(make(), process_group=simulated.new_group(), device_id=sim, use_orig_params=True, **ways)
        x = data(0).to(sim)
        for _ in range(warm):
            loss_of(model, x).backward()
        model.zero_grad()
        device.capturing(True)
        with contextlib.nullcontext() if message is None else pytest.raises(RuntimeError, match=message):
            loss_of(model, x).backward()
        device.capturing(False)
        model.zero_grad()
        loss_of(model, x).backward()


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="this torch does not tell C++ of captures")
def test_what_a_graph_cannot_have_is_said_before_it_is_captured(library):
    run_ranks(captured, 2, library)
