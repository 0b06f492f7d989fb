"""Streams on an accelerator: which one computes, which work runs beside it, and that the host waits for none.

The device is simulated (simulated.py); the oracles are the same training on the CPU, bit for bit, and what the device
counts.
"""

import contextlib
import datetime
import functools
import itertools
import os
import re
import threading
import time

import pytest
import simulated
import torch
import torch.distributed as dist
from fsdp_models import data, first_rank_warns, loss_of, make, wrap_blocks
from gloo import ends_of_ranks, meet_in_a_server, note, run_ranks
from pairs import cover
from test_fsdp_device import assert_equal, groups_of, three_groups, whole
from torch import nn

from flatparam import CPUOffload, MixedPrecision, Placement, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp import OrderError
from flatparam.fsdp.desync import same_unit

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


def on_streams(library, n_streams, cases):
    """On one other stream, or on several that take turns; the last one counts as that which computes."""
    device, wanted = simulated.use(library), {}
    sim, on_cpu, on_sim = torch.device("sim", 0), three_groups(dist.new_group), three_groups(simulated.new_group)
    on_both = three_groups(functools.partial(simulated.new_group, on_host=True))
    for name, late, computes in cases:
        arguments = {**WAYS[name], "use_orig_params": True}
        strategy = arguments["sharding_strategy"].name
        note(f"{name}, {late}, {n_streams} streams, late or not by what computes: {computes}")
        if name not in wanted:
            plain = {key: value for key, value in arguments.items() if key not in ("cpu_offload", "offload_grads")}
            model = wrap_blocks(make(), process_group=groups_of(strategy, *on_cpu), **plain)
            wanted[name] = train(model, CPU, Turns([]))
        groups = groups_of(strategy, *(on_sim if computes else on_both))
        model = wrap_blocks(make(), process_group=groups, device_id=sim, **arguments)
        streams = [torch.Stream(sim) for _ in range(n_streams)]
        device.late(late, streams[-1].stream_id if computes else 0)
        with Turns(list(streams)) as turns:
            found = train(model, sim, turns)
        assert_equal(found, wanted[name], name)
        del model


def cases_of(n_streams):
    return list(itertools.product(list(WAYS)[: 7 if n_streams == 1 else 4], ("others", "computing"), (True, False)))


@pytest.mark.parametrize("n_streams", [1, 3])
def test_training_on_other_streams_has_the_bits_of_the_cpu(library, n_streams):
    cases = cover(cases_of(n_streams))
    assert len(cases) >= 2 * (7 if n_streams == 1 else 4)
    run_ranks(on_streams, 4 if n_streams == 1 else 2, library, n_streams, cases)


@pytest.mark.thorough
@pytest.mark.parametrize("n_streams", [1, 3])
def test_training_on_other_streams_has_the_bits_of_the_cpu_in_all_settings(library, n_streams):
    run_ranks(on_streams, 4 if n_streams == 1 else 2, library, n_streams, cases_of(n_streams))


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
        for _ in range(2):  # after the first one ranks ask each other which units it has written to
            model(x).sum().backward()
        model.zero_grad()
        device.synchronize()
        blocks = [wrapper.module for wrapper in model.module]
        for block in blocks:
            block.seen = []
        device.operations()
        waits = device.waits()
        loss = model(x).sum()
        assert device.waits() == waits  # not for shards on the host either: the stream for gathers is not late
        behind, gathers = zip(*(block.seen[0] for block in blocks), strict=True)
        assert gathers == (2, 1, 1, 0), gathers  # when the k-th has computed, the one after it is on its way
        assert all(kernels >= 8 for kernels in behind), behind
        loss.backward()


def beside(library):
    """What a gather does before its collective is put to another stream, too."""
    device = simulated.use(library)
    sim, group = torch.device("sim", 0), simulated.new_group()
    for offload in (False, True):
        arguments = {"device_id": sim, "process_group": group, "cpu_offload": CPUOffload(offload)}
        model = FSDP(nn.Sequential(*(FSDP(Watched(), **arguments) for _ in range(4))), **arguments)
        x = torch.ones(2, 8, device=sim)
        with torch.no_grad():
            for _ in range(2):
                model(x)
            before = device.put_off()
            model(x)
        # the collective; before it, where the shard is not sent from its place, a wait and the way there
        assert device.put_off() - before >= 4 * (3 if offload else 1), device.put_off() - before


def test_the_next_gather_begins_before_a_unit_computes(library):
    run_ranks(one_ahead, 2, library)
    run_ranks(beside, 2, library)


def finds_none():
    raise RuntimeError("no interface")


def host_waits(library, on_host, network):
    """How often the host waits for the device in a forward, and in a backward."""
    device = simulated.use(library)
    sim, groups = torch.device("sim", 0), three_groups(functools.partial(simulated.new_group, on_host=on_host))
    if not network:
        same_unit.check_gloo = finds_none  # not for the simulated collectives, which are gloo's
    counted = {}
    for strategy, offload in itertools.product(ShardingStrategy, (False, True)):
        model = wrap_blocks(
            make(),
            process_group=groups_of(strategy.name, *groups),
            device_id=sim,
            sharding_strategy=strategy,
            use_orig_params=True,
            mixed_precision=LOW,
            cpu_offload=CPUOffload(offload),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):  # in the second ranks ask each other which units the first has written to
            x = data(1).to(sim)
            before = device.waits()
            loss = loss_of(model, x)
            between = device.waits()
            loss.backward()
            counted[strategy.name, offload] = between - before, device.waits() - between
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if not offload:  # else the norm of all ranks is for gradients on the host
                assert device.waits() - between == counted[strategy.name, offload][1], strategy
    return counted


@pytest.mark.parametrize(
    ("on_host", "network"),
    [
        pytest.param(True, True, marks=pytest.mark.thorough),
        pytest.param(False, True, id="gloo was not asked for"),
        pytest.param(False, False, id="gloo finds no network"),
    ],
)
def test_the_host_waits_for_nothing_in_a_step(library, on_host, network):
    for counted in run_ranks(host_waits, 4, library, on_host, network):
        for (name, offload), waits in counted.items():
            copied = name in ("ZERO_1", "LAYER_ZERO", "LAYER_ZERO_NESTED")  # ranks tell each other what is old
            copied = copied and not network
            halves = name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "LAYER_ZERO_NESTED")  # the second comes later
            assert waits[0] == int(copied), (name, offload, waits)
            at_most = max(int(copied), (1 + halves) * offload)
            assert int(copied or offload) <= waits[1] <= at_most, (name, offload, waits)


def one_without_a_network(library, what, reason):
    """Rank 1 finds no network for gloo: all go on without one, told why, and train as before."""
    simulated.use(library)
    sim, group = torch.device("sim", 0), simulated.new_group()
    same_unit._CONNECTING = datetime.timedelta(seconds=2)
    strategy = {"sharding_strategy": ShardingStrategy.ZERO_1}
    wanted = train(wrap_blocks(make(), process_group=dist.group.WORLD, **strategy), CPU, Turns([]))
    if dist.get_rank() == 1 and what == "interface":
        os.environ["GLOO_SOCKET_IFNAME"] = "nothing0"
    elif dist.get_rank() == 1:
        same_unit.gloo_beside = lambda *_: finds_none()
    with first_rank_warns(f"wait for the device .* {reason}.* GLOO_SOCKET_IFNAME"):
        model = wrap_blocks(make(), process_group=group, device_id=sim, **strategy)
    assert_equal(train(model, sim, Turns([])), wanted, "without a network")


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("interface", r"rank 1 finds no network for gloo \(.*nothing0"),
        ("connection", r"rank 0 finds no network for gloo \(.*timeout"),
    ],
)
def test_a_rank_without_a_network_for_gloo_is_told_to_all(library, what, reason):
    run_ranks(one_without_a_network, 2, library, what, reason, timeout=60.0)


def beside_a_thread(library):
    """A thread of the user's has collectives on the host over the same group, as an asynchronous checkpoint has."""
    simulated.use(library)
    sim, group = torch.device("sim", 0), simulated.new_group(on_host=True)
    strategy = {"sharding_strategy": ShardingStrategy.ZERO_1}
    wanted = train(wrap_blocks(make(), process_group=dist.group.WORLD, **strategy), CPU, Turns([]))
    model = wrap_blocks(make(), process_group=group, device_id=sim, **strategy)
    problems = []

    def talk():
        for number in range(60):
            time.sleep(0.003 * ((number + dist.get_rank()) % 3))  # each at another place of its step
            values = torch.full((7,), float(number))
            dist.all_reduce(values, group=group)
            if not torch.equal(values, torch.full((7,), 2.0 * number)):
                problems.append(values)

    thread = threading.Thread(target=talk)
    thread.start()
    found = train(model, sim, Turns([]))
    thread.join()
    assert_equal(found, wanted, "beside a thread")
    assert not problems, problems


def test_what_others_do_with_the_group_of_the_host_is_theirs(library):
    run_ranks(beside_a_thread, 2, library)


def beside_other_ranks(library):
    """Rank 0 has a group more than others, and a function of its own in the place of torch's."""
    simulated.use(library)
    sim, group = torch.device("sim", 0), simulated.new_group(on_host=True)
    strategy = {"sharding_strategy": ShardingStrategy.ZERO_1}
    wanted = train(wrap_blocks(make(), process_group=dist.group.WORLD, **strategy), CPU, Turns([]))
    alone = dist.new_group([0])
    note("ranks have unlike groups")
    model = wrap_blocks(make(), process_group=group, device_id=sim, **strategy)
    if dist.get_rank() == 0:
        assert dist.get_world_size(alone) == 1
        dist.all_reduce = functools.partial(dist.all_reduce)
    note("ranks have unlike functions")
    assert_equal(train(model, sim, Turns([])), wanted, "beside other ranks")


def test_ranks_meet_on_the_host_whatever_else_each_has(library):
    run_ranks(beside_other_ranks, 2, library, timeout=60.0)


def ends_before_they_meet(library):
    """Rank 1 has compared a unit with rank 0, and ends before there is a group for the host."""
    meet_in_a_server()
    simulated.use(library)
    arguments = {"process_group": simulated.new_group(on_host=True), "device_id": torch.device("sim", 0)}
    if dist.get_rank() == 1:
        Placement.with_host = lambda *_: os._exit(7)
    try:
        wrap_blocks(make(), sharding_strategy=ShardingStrategy.ZERO_1, **arguments)
    except OrderError as error:
        note(error)
        os._exit(3)


def test_a_rank_that_ends_before_ranks_meet_on_the_host_is_missed(library):
    (code, _, told), (lost, _, _) = ends_of_ranks(ends_before_they_meet, 2, library, timeout=60.0)
    assert (code, lost) == (3, 7), told
    assert re.search("the process of rank 1 .* has ended", told)


class Scaled(nn.Module):
    """Nothing that the simulated device has to do at once, as it must views; two parameters, of two flat ones."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3), requires_grad=False)

    def forward(self, x):
        return x * self.scale + self.shift


def written_after(library):
    """Shards on the host are read before a forward returns, and gradients are there when a backward does."""
    device = simulated.use(library)
    sim = torch.device("sim", 0)
    device.late("others", 1 << 40)  # a stream that nobody has: all are late
    seen = []
    for where, group in ((CPU, dist.group.WORLD), (sim, simulated.new_group())):
        arguments = {"process_group": group, "segments": True, "device_id": where, "use_orig_params": True}
        arguments["cpu_offload"] = CPUOffload(True)
        torch.manual_seed(0)
        model = FSDP(nn.Sequential(*(FSDP(Scaled(), **arguments) for _ in range(3))), **arguments)
        x, values, waits = data(0).to(where), [], []
        for step in range(3):
            before = device.waits()
            with contextlib.nullcontext() if step else torch.no_grad():
                found = model(x)
            between = device.waits()
            if step:
                found.square().sum().backward()
            waits.append((between > before, device.waits() > between))
            for param in model.parameters():
                grad = torch.ones(()) if param.grad is None else param.grad.clone()
                values.append(grad)
                param.data.mul_(0.5).add_(grad)
            values.append(found.detach().cpu())
        seen.append(values)
        assert waits == ([(True, False), (True, True), (True, True)] if where == sim else [(False, False)] * 3), waits
    assert_equal(seen[1], seen[0], "written to at once")


def test_shards_on_the_host_may_be_written_to_at_once(library):
    run_ranks(written_after, 1, library)


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


class Two(nn.Module):
    """Parameters of two dtypes, one of them frozen in part: three flat parameters."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3, dtype=torch.float64)
        self.a.bias.requires_grad_(False)

    def forward(self, x):
        return self.a(self.b(x.double()).float())


def segments(library, late, hybrid):
    """What segments gather, reduce, and add over replicas is one call of the backend each, with the same bits."""
    device = simulated.use(library, late)
    sim = torch.device("sim", 0)
    seen = []
    for where, new_group in ((CPU, dist.new_group), (sim, simulated.new_group)):
        group = three_groups(new_group)[1:] if hybrid else new_group()
        arguments = {"device_id": where, "process_group": group, "segments": True, "use_orig_params": True}
        arguments["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
        torch.manual_seed(0)
        model = FSDP(nn.Sequential(*(FSDP(Two(), **arguments) for _ in range(3))), **arguments)
        assert {len(wrapper._unit.flat_params) for wrapper in model.module} == {3}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        values = []
        for step in range(3):
            x = data(step).to(where)
            device.operations()
            loss = loss_of(model, x)
            forward = device.operations().get("simulated::collectives", 0)
            # once, after the first forward, ranks ask each other which units it has written to
            assert forward == (3 + (step == 1) if where == sim else 0)
            loss.backward()
            backward = device.operations().get("simulated::collectives", 0)
            assert backward == (0 if where == CPU else 9 if hybrid else 6), backward
            values.append(loss.detach().cpu())
            values += [param.grad.cpu() for param in model.parameters() if param.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        seen.append(values + whole(model, lambda param: param))
    assert_equal(seen[1], seen[0], "segments")


@pytest.mark.parametrize("late", ["others", "computing"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_segments_have_their_collectives_in_one_call(library, late, hybrid):
    run_ranks(segments, 4 if hybrid else 2, library, late, hybrid)


def broken_off(library):
    """One of several collectives of a call cannot be begun: the call is ended, and the next ones work."""
    device = simulated.use(library)
    sim, seen = torch.device("sim", 0), []
    for at in (None, 1, 4, 7, 13):  # in the gathers of the first unit, of the second, of the third; in a backward
        arguments = {
            "device_id": sim,
            "process_group": simulated.new_group(),
            "segments": True,
            "use_orig_params": True,
        }
        torch.manual_seed(0)
        model = FSDP(nn.Sequential(*(FSDP(Two(), **arguments) for _ in range(3))), **arguments)
        note(f"after {at} collectives")
        loss_of(model, data(0).to(sim)).backward()
        model.zero_grad()
        if at is not None:
            device.fail_after(at)
            with pytest.raises(RuntimeError, match="a collective that was to fail"):
                loss_of(model, data(0).to(sim)).backward()
            device.fail_after(-1)
            model.zero_grad()
        loss_of(model, data(1).to(sim)).backward()
        seen.append([param.grad.cpu() for param in model.parameters() if param.grad is not None])
        assert_equal(seen[-1], seen[0], f"after {at} collectives")


def test_a_call_for_several_that_fails_is_ended(library):
    run_ranks(broken_off, 2, library)


def let_go(library):
    """Data that were assigned on one stream are taken over on another, and their memory used again at once."""
    simulated.use(library)
    sim = torch.device("sim", 0)

    def assigned(device, group):
        model = wrap_blocks(make(), use_orig_params=True, process_group=group, device_id=device)
        for param in model.parameters():
            param.data = param.data * 0.9
        return model

    wanted = loss_of(assigned(CPU, dist.group.WORLD), data(0)).item()
    model, x = assigned(sim, simulated.new_group()), data(0).to(sim)
    numels = [param.numel() for param in model.parameters()]
    first, other = torch.accelerator.current_stream(), torch.Stream(sim)
    other.wait_stream(first)
    with other:
        loss = loss_of(model, x)
    again = [torch.full((numel,), 1e9, device=sim) for numel in numels]
    first.wait_stream(other)
    del again
    assert loss.item() == wanted, (loss.item(), wanted)


def test_data_that_were_assigned_on_another_stream(library):
    run_ranks(let_go, 2, library)
