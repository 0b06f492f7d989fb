"""Streams on an accelerator: which one computes, what runs beside it, and that the host waits for none of them.

The device is simulated (simulated.py); the oracles are the same training on the CPU, bit for bit, and what the device
counts.
"""

import contextlib

import pytest
import simulated
import torch
import torch.distributed as dist
from fsdp_models import data, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from test_fsdp_device import assert_equal, groups_of, three_groups, whole
from torch import nn

from flatparam import CPUOffload, MixedPrecision, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP

pytestmark = pytest.mark.multiprocess

CPU = torch.device("cpu")
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(scope="module")
def library():
    return str(simulated.build())


class Turns(contextlib.ExitStack):
    """Another stream for each micro-batch, which begins where the one before has ended."""

    def __init__(self, streams):
        super().__init__()
        self.streams, self.last = streams, None

    def next(self):
        if self.streams:
            before = torch.accelerator.current_stream()
            self.close()
            stream = self.streams.pop(0)
            self.streams.append(stream)
            stream.wait_stream(before)
            self.enter_context(stream)


def train(model, device, turns, steps=2):
    """Losses, norms, gradients and parameters. Each micro-batch takes the next stream; the optimizer stays."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for step in range(steps):
        for k in range(3):
            turns.next()
            with contextlib.nullcontext() if k == 2 else model.no_sync():
                loss = loss_of(model, data(10 * step + k).to(device))
                loss.backward()
        seen += [loss.detach().cpu(), model.clip_grad_norm_(0.5).cpu()]
        seen += whole(model, lambda param: param.grad)
        optimizer.step()
        optimizer.zero_grad()
    turns.next()
    seen.append(model(data(99).to(device)).detach().cpu())
    return seen + whole(model, lambda param: param)


WAYS = {
    "whole": {"sharding_strategy": ShardingStrategy.FULL_SHARD},
    "low": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "mixed_precision": LOW},
    "offloaded": {"sharding_strategy": ShardingStrategy.FULL_SHARD, "cpu_offload": CPUOffload(True)},
    "alone": {"sharding_strategy": ShardingStrategy.NO_SHARD, "cpu_offload": CPUOffload(True)},
    "copies": {"sharding_strategy": ShardingStrategy.LAYER_ZERO, "offload_grads": True},
    "nested": {"sharding_strategy": ShardingStrategy.LAYER_ZERO_NESTED, "offload_grads": True},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
}


def on_streams(library, late, n_streams, names):
    """On one other stream, or on several that take turns; the last one counts as that which computes."""
    device = simulated.use(library)
    sim, on_cpu, on_sim = torch.device("sim", 0), three_groups(dist.new_group), three_groups(simulated.new_group)
    for name in names:
        arguments = {**WAYS[name], "use_orig_params": True}
        strategy = arguments["sharding_strategy"].name
        for computes in (True, False):
            note(f"{name}, {late}, {n_streams} streams, late or not by what computes: {computes}")
            plain = {key: value for key, value in arguments.items() if key not in ("cpu_offload", "offload_grads")}
            wanted = train(wrap_blocks(make(), process_group=groups_of(strategy, *on_cpu), **plain), CPU, Turns([]))
            model = wrap_blocks(make(), process_group=groups_of(strategy, *on_sim), device_id=sim, **arguments)
            streams = [torch.Stream(sim) for _ in range(n_streams)]
            device.late(late, streams[-1].stream_id if computes else 0)
            with Turns(list(streams)) as turns:
                found = train(model, sim, turns)
            assert_equal(found, wanted, name)
            del model


@pytest.mark.parametrize("late", ["others", "computing"])
@pytest.mark.parametrize("n_streams", [1, 3])
def test_training_on_other_streams_has_the_bits_of_the_cpu(library, late, n_streams):
    run_ranks(
        on_streams, 4 if n_streams == 1 else 2, library, late, n_streams, list(WAYS)[: 7 if n_streams == 1 else 4]
    )


class Watched(nn.Module):
    """Says after its forward how many kernels of it the device has not come to, and how many collectives there were."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.seen = None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        if self.seen is not None:
            self.seen.append((self.device.behind(), self.device.operations().get("simulated::collectives", 0)))
        return x


def one_ahead(library):
    """The gather of the next unit begins before a unit's kernels, of which it does not wait for one."""
    device = simulated.use(library, late="computing")
    sim, group = torch.device("sim", 0), simulated.new_group()
    Watched.device = device
    for offload in (False, True):
        arguments = {"device_id": sim, "process_group": group, "cpu_offload": CPUOffload(offload)}
        model = FSDP(nn.Sequential(*(FSDP(Watched(), **arguments) for _ in range(4))), **arguments)
        x = torch.ones(2, 8, device=sim)
        model(x).sum().backward()
        model.zero_grad()
        torch.accelerator.synchronize()
        blocks = [wrapper.module for wrapper in model.module]
        for block in blocks:
            block.seen = []
        device.operations()
        waits = device.waits()
        loss = model(x).sum()
        assert device.waits() - waits == (4 if offload else 0)  # for shards on the host that may be written to
        behind, gathers = zip(*(block.seen[0] for block in blocks), strict=True)
        assert gathers == (2, 1, 1, 0), gathers  # when the k-th has computed, the one after it is on its way
        assert all(kernels >= 8 for kernels in behind), behind
        loss.backward()


def test_the_next_gather_begins_before_a_unit_computes(library):
    run_ranks(one_ahead, 2, library)


def host_waits(library):
    """How often the host waits for the device in a forward, and in a backward."""
    device = simulated.use(library)
    sim, groups = torch.device("sim", 0), three_groups(simulated.new_group)
    counted = {}
    for strategy in ShardingStrategy:
        model = wrap_blocks(
            make(),
            process_group=groups_of(strategy.name, *groups),
            device_id=sim,
            sharding_strategy=strategy,
            use_orig_params=True,
            mixed_precision=LOW,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            x = data(1).to(sim)
            before = device.waits()
            loss = loss_of(model, x)
            between = device.waits()
            loss.backward()
            counted[strategy.name] = between - before, device.waits() - between
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert device.waits() - between == counted[strategy.name][1], strategy
    return counted


def test_the_host_waits_for_nothing_in_a_step(library):
    for counted in run_ranks(host_waits, 4, library):
        copies = {name: counted.pop(name) for name in ("ZERO_1", "LAYER_ZERO", "LAYER_ZERO_NESTED") if name in counted}
        assert set(counted.values()) == {(0, 0)}, counted
        assert all(waits == (1, 1) for waits in copies.values()), copies  # ranks tell each other what is old


def kept_gradients(library):
    """Gradients that were cleared in place between micro-batches: the device is asked once a unit."""
    device = simulated.use(library)
    sim = torch.device("sim", 0)
    model = wrap_blocks(make(), process_group=simulated.new_group(), device_id=sim, use_orig_params=True)
    with model.no_sync():
        loss_of(model, data(1).to(sim)).backward()
    model.zero_grad(set_to_none=False)
    x = data(2).to(sim)
    loss = loss_of(model, x)
    before = device.waits()
    loss.backward()
    assert device.waits() - before == 4  # units, of 3 to 4 parameters
    module = make()
    loss_of(module, data(2)).backward()
    if dist.get_world_size() == 1:
        assert_equal([p.grad.cpu() for p in model.parameters()], [p.grad for p in module.parameters()], "cleared")


def test_the_device_is_asked_once_for_all_gradients_of_a_unit(library):
    run_ranks(kept_gradients, 1, library)
