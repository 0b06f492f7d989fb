"""The runtime on an accelerator: a simulated one, whose copies come as late as a real one's may (simulated.py).

The oracle is the same training on the CPU, which other tests hold against unsharded modules: no bit differs.

Promises:
- units on two devices, whose backwards run in two threads of autograd: `test_autograd_has_a_thread_for_each_device`
- on an accelerator (simulated) training equals that on the CPU, parameters and gradients offloaded or not; bytes on
  it are those planned
"""

import contextlib
import copy
import itertools
import warnings

import pytest
import simulated
import torch
import torch.distributed as dist
from fsdp_models import data, full_grads, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from test_fsdp_threads import ELSEWHERE, in_thread
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType

from flatparam import CPUOffload, MixedPrecision, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP

CPU = torch.device("cpu")
PRECISIONS = {
    "fp32": None,
    "bf16": MixedPrecision(param_dtype=torch.bfloat16),
    "bf16, reduced in fp32": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


@pytest.fixture(scope="module")
def library():
    return str(simulated.build())


def groups_of(strategy, wide, inner, outer):
    if strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        return inner, outer
    return (inner, wide) if strategy.startswith("LAYER_ZERO") else wide


def three_groups(new_group):
    """The world, this rank's half of it, and its peers in the other half."""
    ranks = list(range(dist.get_world_size()))
    half = len(ranks) // 2
    wide = new_group()
    rows = [ranks[:half], ranks[half:]]
    inner = [new_group(row) for row in rows]
    outer = [new_group(list(pair)) for pair in zip(*rows, strict=True)]
    return wide, inner[dist.get_rank() // half], outer[dist.get_rank() % half]


def train(model, device, micro_batches=3, steps=2):
    """All that can be seen of some steps: losses, norms, gradients, and the parameters in the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for step in range(steps):
        for k in range(micro_batches - 1):
            with model.no_sync():
                loss_of(model, data(10 * step + k).to(device)).backward()
        loss = loss_of(model, data(10 * step + 9).to(device))
        loss.backward()
        seen += [loss.detach().cpu(), model.clip_grad_norm_(0.5).cpu()]
        seen += whole(model, lambda param: param.grad)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen.append(model(data(99).to(device)).cpu())
    config = FullStateDictConfig(offload_to_cpu=next(model.parameters()).is_cpu)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        seen += [value.cpu() for value in model.state_dict().values()]
    return seen + whole(model, lambda param: param)


def whole(model, what):
    """``what`` of every parameter; shown where its shard is: a parameter cannot change to or from this device."""
    on_host = next(model.parameters()).is_cpu
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that every rank gets them
        stack.enter_context(FSDP.summon_full_params(model, writeback=False, with_grads=True, offload_to_cpu=on_host))
        values = [what(param) for param in model.parameters()]
        return [value.detach().cpu().clone() for value in values if value is not None]


def assert_equal(found, wanted, what):
    assert len(found) == len(wanted), what
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b), (what, number, a, b)


def settings():
    """Each strategy in fp32 and in lower precisions, with the original parameters and with flat ones."""
    ways = list(zip(PRECISIONS.items(), (True, False, True), strict=True))
    for strategy, ((name, precision), orig) in itertools.product(ShardingStrategy, ways):
        arguments = {"sharding_strategy": strategy, "mixed_precision": precision, "use_orig_params": orig}
        what = f"{strategy.name}, {name}, {'orig' if orig else 'flat'}"
        yield what, arguments
        if strategy.name.startswith("LAYER_ZERO"):
            yield f"{what}, gradients offloaded", {**arguments, "offload_grads": True}


def every_setting(library, late):
    device = simulated.use(library, late)
    on_cpu, on_sim = three_groups(dist.new_group), three_groups(simulated.new_group)
    for what, arguments in settings():
        name = arguments["sharding_strategy"].name
        wanted = train(wrap_blocks(make(), process_group=groups_of(name, *on_cpu), **arguments), CPU)
        there = {**arguments, "process_group": groups_of(name, *on_sim), "device_id": torch.device("sim", 0)}
        for params_offloaded in (False, True):
            note(f"{what}, parameters offloaded: {params_offloaded}")
            before = device.memory()[0]
            model = wrap_blocks(make(), cpu_offload=CPUOffload(params_offloaded), **there)
            assert all(param.is_cpu == params_offloaded for param in model.parameters())
            assert_equal(train(model, there["device_id"]), wanted, what)
            del model
            left = device.memory()[0] - before
            assert left == 0, f"{what}: {left} bytes of a deleted model are left"


LATE = pytest.mark.parametrize("late", ["others", "computing"])


@pytest.mark.thorough
@pytest.mark.multiprocess
@LATE
def test_training_equals_that_on_the_cpu(library, late):
    run_ranks(every_setting, 4, library, late, timeout=300.0)


class Shifted(nn.Module):
    """A buffer that counts forwards, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))])
        self.last = nn.Linear(3, 1)
        self.last.bias.requires_grad_(False)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        self.shift += 0.125
        return self.last(self.blocks[0](x) + self.shift)


def other_ways(library, late):
    """Offloaded beside a device that nobody named, with buffers; copied, loaded, interrupted; inputs from a device."""
    device = simulated.use(library, late)
    sim, on_cpu, on_sim = torch.device("sim", 0), dist.group.WORLD, simulated.new_group()
    for orig in (True, False):
        note(f"orig: {orig}")
        ways = {"segments": True, "use_orig_params": orig}
        wanted = train(wrap_blocks(make(cls=Shifted), process_group=on_cpu, **ways), CPU)
        offloaded = {"process_group": on_sim, "cpu_offload": CPUOffload(True), "sync_module_states": True, **ways}
        model = wrap_blocks(make(cls=Shifted), **offloaded)
        assert (model.compute_device, model.module.shift.device) == (sim, sim)
        copied = copy.deepcopy(wrap_blocks(make(), **offloaded))
        assert all(flat_param.flat.is_pinned() for flat_param in copied._unit.flat_params)
        assert_equal([copied(data(0).to(sim)).cpu()], [make()(data(0))], f"copied, orig: {orig}")
        x = data(0).to(sim)
        put_off = device.put_off()
        with torch.no_grad():
            model.eval()(x)
        with pytest.raises(RuntimeError, match="mat1"):
            model(x[:, :2])
        model.train().load_state_dict(make(cls=Shifted).state_dict())
        assert_equal(train(model, sim), wanted, f"offloaded, orig: {orig}")
        assert device.put_off() > put_off
    model = wrap_blocks(make(), process_group=on_cpu)
    assert_equal([model(data(0).to(sim))], [model(data(0))], "an input that comes from the device")


@pytest.mark.multiprocess
@LATE
def test_other_ways_to_come_to_a_device(library, late):
    run_ranks(other_ways, 2, library, late, timeout=120.0)


def raises_often(library):
    """A hook raises in a backward, in the device's thread; a forward after that begins anew, however soon it comes."""
    simulated.use(library)
    sim, group = torch.device("sim", 0), simulated.new_group()
    module, model = make(), wrap_blocks(make(), process_group=group, device_id=sim, use_orig_params=True)
    loss_of(module, data(0)).backward()
    for trial in range(60):
        note(f"trial {trial}")
        handle = model.module.blocks[trial % 2].register_full_backward_hook(lambda *_: 1 / 0)
        loss = loss_of(model, data(1).to(sim))
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        model.zero_grad()
        loss_of(model, data(0).to(sim)).backward()
        found = [param.grad.cpu() for param in model.parameters()]
        assert_equal(found, [param.grad for param in module.parameters()], f"trial {trial}")
        model.zero_grad()


@pytest.mark.multiprocess
def test_a_forward_right_after_a_backward_that_raised(library):
    run_ranks(raises_often, 1, library)


class Halves(nn.Module):
    """What comes to each device is computed apart, so that autograd has a thread for each at the same time."""

    def __init__(self):
        super().__init__()
        self.shard_slice, self.there = ((nn.Sequential(*(nn.Linear(48, 48) for _ in range(6)))) for _ in range(2))

    def forward(self, x):
        return self.shard_slice(x) + self.there(x.to(next(self.there.parameters()).device)).cpu()


def units_on_two_devices(library):
    simulated.use(library)
    sim, on_sim = torch.device("sim", 0), simulated.new_group()
    for orig in (False, True):
        module, model = make(cls=Halves), make(cls=Halves)
        for half, arguments in ((model.shard_slice, {}), (model.there, {"process_group": on_sim, "device_id": sim})):
            for i, layer in enumerate(half):
                half[i] = FSDP(layer, use_orig_params=orig, **arguments)
        model = FSDP(model, use_orig_params=orig)
        x = torch.randn(4, 48)
        for trial in range(10):
            note(f"orig: {orig}, trial {trial}")
            for synced in (False, False, True):
                with contextlib.nullcontext() if synced else model.no_sync():
                    model(x).square().mean().backward()
                module(x).square().mean().backward()
            found, wanted = (torch.cat([p.grad.cpu().flatten() for p in m.parameters()]) for m in (model, module))
            torch.testing.assert_close(found, wanted)
            model.zero_grad()
            module.zero_grad()


@pytest.mark.multiprocess
def test_autograd_has_a_thread_for_each_device(library):
    run_ranks(units_on_two_devices, 1, library)


class Scale(nn.Module):
    """Nothing but parameters: what is computed is a number."""

    def __init__(self, numel, ones):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(numel // 2) for _ in range(2))
        self.ones = ones  # of each dtype

    def forward(self, x):
        for weight in self.weights:
            x = x * torch.dot(weight, self.ones[weight.dtype][: weight.numel()])
        return x


def backwards_in_a_forward(library):
    """A forward may call a backward, whose nodes the device's thread runs; another thread may not."""
    simulated.use(library)
    device = torch.device("sim", 0)
    for run, refused in ((lambda call: call(), False), (in_thread, True)):
        model = wrap_blocks(make(), process_group=simulated.new_group(), use_orig_params=True, device_id=device)
        earlier = loss_of(model, data(0).to(device))
        raised = []

        def meanwhile(*_, raised=raised, run=run, earlier=earlier):
            raised.append(run(earlier.backward))

        hook = model.module.blocks[1].register_forward_hook(meanwhile)
        model(data(1).to(device))
        hook.remove()
        assert (ELSEWHERE in str(raised[0])) == refused, raised
        grads = [param.grad for param in model.parameters()]
        assert all((grad is None) == refused for grad in grads)
        if not refused:
            module = make()
            loss_of(module, data(0)).backward()
            assert_equal([grad.cpu() for grad in grads], [param.grad for param in module.parameters()], "in a forward")


@pytest.mark.multiprocess
def test_a_backward_in_a_forward_is_of_its_thread(library):
    run_ranks(backwards_in_a_forward, 1, library)


def peaks(library, numels):
    """Bytes on the device: measured over those planned, for what can be offloaded. ``numels``: of each unit."""
    device = simulated.use(library)
    wide, inner, outer = three_groups(simulated.new_group)
    low, lower = (MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=dtype) for dtype in (torch.float32, None))
    offloads_all = {"cpu_offload": CPUOffload(True)}
    ones = {dtype: torch.ones(max(numels), device="sim", dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    x = torch.ones(1, device="sim")
    for strategy, offloads, precision in (
        ("FULL_SHARD", {}, None),
        ("FULL_SHARD", {}, lower),
        ("FULL_SHARD", offloads_all, None),
        ("FULL_SHARD", offloads_all, low),
        ("FULL_SHARD", offloads_all, lower),
        ("SHARD_GRAD_OP", {}, low),
        ("NO_SHARD", offloads_all, None),
        ("ZERO_1", {}, None),
        ("LAYER_ZERO", {}, low),
        ("LAYER_ZERO", {"offload_grads": True}, None),
        ("HYBRID_SHARD", {}, low),
        ("HYBRID_SHARD", {}, lower),
        ("HYBRID_SHARD", offloads_all, None),
        ("LAYER_ZERO_NESTED", {}, low),
        ("LAYER_ZERO_NESTED", {"offload_grads": True, **offloads_all}, None),
    ):
        note(f"{strategy} {offloads} {precision}")
        arguments = {
            "sharding_strategy": ShardingStrategy[strategy],
            "process_group": groups_of(strategy, wide, inner, outer),
            "device_id": torch.device("sim", 0),
            "mixed_precision": precision,
            **offloads,
        }
        before, _, host_before = device.memory()
        model = FSDP(nn.Sequential(*(FSDP(Scale(numel, ones), **arguments) for numel in numels)), **arguments)
        plan = model.memory_plan(optimizer_bytes=0)

        def check(planned, case=(strategy, offloads, precision), before=before):
            measured = device.memory()[1] - before
            assert measured == pytest.approx(planned, rel=0.02), (case, measured, planned)
            device.reset_peak()

        model(x).backward()
        device.reset_peak()
        model(x).backward()
        check(plan.peak)
        model.zero_grad()
        model(x).backward()
        check(plan.peak_alone)
        model.zero_grad()
        device.reset_peak()
        with model.no_sync():
            model(x).backward()
            kept = device.memory()[0]
            model(x).backward()
        if "offload_grads" in offloads:
            copies = sum(unit.copy for unit in plan.units)
            assert kept - before <= plan.between_steps + copies + plan.no_sync + 64, (strategy, offloads)
        model(x).backward()
        check(plan.peak_no_sync)
        assert device.memory()[2] - host_before <= plan.host, (strategy, offloads)
        del model


SMALL, BIG = 2**13, 2**17


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "numels",
    [
        pytest.param([BIG, SMALL, BIG, SMALL], id="in turn"),
        pytest.param([BIG, BIG, SMALL, SMALL], id="big ones first"),
        pytest.param([SMALL, SMALL, SMALL, BIG], id="a big one last"),
        pytest.param([SMALL, BIG, BIG, BIG], id="a small one first"),
        pytest.param([SMALL] * 6, id="equal"),
    ],
)
@pytest.mark.sweep(1)
def test_bytes_on_the_device_are_those_planned(library, numels):
    run_ranks(peaks, 4, library, numels, timeout=240.0)


def waits_for_wrapping(library):
    device = simulated.use(library)
    group = simulated.new_group()
    counted = []
    for many in (4, 40):
        module = nn.ParameterList([nn.Parameter(torch.ones(3 + i % 2)) for i in range(many)]).to("sim")
        before = device.waits()
        FSDP(module, process_group=group, device_id=torch.device("sim", 0))
        counted.append(device.waits() - before)
    assert counted[0] == counted[1], counted


@pytest.mark.multiprocess
def test_wrapping_waits_as_often_for_many_parameters_as_for_few(library):
    run_ranks(waits_for_wrapping, 2, library)


class Steps(nn.Module):
    """Its forward begins with a step of its blocks, of which one was gathered ahead and is empty on a rank."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(2)])
        self.last = nn.Linear(3, 3)
        self.begins = []

    def forward(self, x):
        for call in self.begins:
            call()
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def changes_next_unit(library, low):
    """A forward that changes shards which are gathered ahead computes with what they are, as where nothing is."""
    simulated.use(library)
    precision = MixedPrecision(param_dtype=torch.bfloat16) if low else None
    seen = []
    for device, group in (("cpu", dist.group.WORLD), ("sim", simulated.new_group())):
        ways = {"process_group": group, "device_id": torch.device(device, 0), "mixed_precision": precision}
        model = wrap_blocks(make(), use_orig_params=True, **ways)

        def double(*_, unit=model.blocks[1]):
            with torch.no_grad():
                for shard in unit.parameters():
                    shard.mul_(2)

        model.blocks[0].module.register_forward_hook(double)
        steps = wrap_blocks(make(cls=Steps), use_orig_params=True, shard_alignment=64, **ways)
        optimizer = torch.optim.SGD(steps.blocks.parameters(), lr=0.1)
        steps.module.begins = [optimizer.step, optimizer.zero_grad]
        for step in range(3):
            for each in (model, steps):
                loss_of(each, data(step).to(device)).backward()
                seen.append([grad.cpu() for grad in full_grads(each).values() if grad is not None])
            model.zero_grad()
    for on_cpu, on_sim in zip(seen[:6], seen[6:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(on_cpu, on_sim, strict=True))


@pytest.mark.multiprocess
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
def test_a_forward_that_changes_what_is_gathered_ahead(library, low):
    run_ranks(changes_next_unit, 2, library, low)


def late_copies(library):
    """What the device puts off: or the tests above could not fail."""
    device = simulated.use(library)
    sim = torch.device("sim", 0)
    own = torch.Stream(sim)
    source, target = torch.ones(4, device=sim), torch.zeros(4, device=sim)
    with own:
        target.copy_(source, non_blocking=True)
        done = own.record_event()
    assert target.sum().item() == 0
    torch.accelerator.current_stream().wait_event(done)
    assert target.sum().item() == 4
    with own:
        target.copy_(source, non_blocking=True)
        done = own.record_event()
    address = source.data_ptr()
    del source
    again = torch.zeros(4, device=sim)  # gets the memory that the copy is going to read
    assert again.data_ptr() == address
    done.synchronize()
    assert target.sum().item() == 0
    host = torch.zeros(4, pin_memory=True)
    host.copy_(torch.ones(4, device=sim), non_blocking=True)
    assert host.sum() == 0
    device.synchronize()
    assert host.sum() == 4
    assert device.put_off() == 3


def late_kernels(library):
    """The stream that computes is late itself, and who reads what it writes is not."""
    device = simulated.use(library, late="computing")
    sim = torch.device("sim", 0)
    own, x = torch.Stream(sim), torch.ones(4, device=sim)
    device.synchronize()
    x.mul_(2)
    product = x * 3
    done = torch.accelerator.current_stream().record_event()
    seen = torch.zeros(4, device=sim)
    device.synchronize()
    x.mul_(5)
    with own:
        seen.copy_(x, non_blocking=True)
    assert seen.tolist() == [2, 2, 2, 2]
    with own:
        own.wait_event(torch.accelerator.current_stream(sim).record_event())  # of itself: nothing
        own.wait_event(done)
        seen.copy_(product, non_blocking=True)
    assert seen.tolist() == [6, 6, 6, 6]
    assert x.tolist() == [10, 10, 10, 10]
    assert device.waits() > 0


def late_collectives(library):
    """A collective's work comes late too, and waiting for it keeps a stream waiting but not the host."""
    device = simulated.use(library)
    sim, group = torch.device("sim", 0), simulated.new_group()
    x = torch.ones(4, device=sim)
    before = device.waits()
    work = dist.all_reduce(x, group=group, async_op=True)
    assert not work.is_completed()
    early = x.clone()
    work.wait()
    late = x.clone()
    assert device.waits() == before
    assert (early.tolist(), late.tolist()) == ([1] * 4, [dist.get_world_size()] * 4)
    work = dist.all_reduce(x, group=group, async_op=True)
    x.zero_()
    work.wait()
    assert x.isnan().all()  # what it sends was changed before it was sent


@pytest.mark.multiprocess
def test_the_device_is_as_late_as_one_may_be(library):
    run_ranks(late_copies, 1, library)
    run_ranks(late_kernels, 1, library)
    run_ranks(late_collectives, 2, library)
