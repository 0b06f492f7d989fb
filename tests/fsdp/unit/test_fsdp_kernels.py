"""An accelerator with kernels of ours: training has the same bits as without, and torch's operations do not pack.

The device is simulated (simulated.py) and runs the kernels' bodies on the host. The oracles are the same training on
the CPU, or by torch's operations where the device sums up strided tensors in another order; torch in fp64 for clipping.
"""

import pytest
import simulated
import torch
import torch.distributed as dist
from fsdp_models import data, full_grads, full_params, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from torch import nn

from benchmarks.c_testing import _C_testing
from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardingStrategy

SIM = torch.device("privateuseone", 0)  # its name where it is not simulated yet
PRECISIONS = (
    None,
    MixedPrecision(param_dtype=torch.bfloat16),
    MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, keep_low_precision_grads=False),
)

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def library():
    return str(simulated.build())


class Odd(nn.Module):
    """Gradients of many strides: transposed, expanded, and of channels last; one parameter has none."""

    def __init__(self, width):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(width, 3))
        self.spread = nn.Parameter(torch.randn(7, 3))
        self.image = nn.Parameter(torch.randn(3, 2, 2, 3).to(memory_format=torch.channels_last))
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x):
        image = self.image * self.image.detach().contiguous()
        return x * self.turned.t().sum(0) + self.spread.sum() + image.sum()


class Mixed(nn.Module):
    """Blocks of different kinds, and ``many`` parameters of the root."""

    def __init__(self, many=0):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(
            [Odd(5), nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))]
        )
        self.many = nn.ParameterList([torch.full((1 + i % 3,), 0.5 / (i + 1)) for i in range(many)])
        self.last = nn.Linear(5, 1, bias=False)

    def forward(self, x):
        x = self.first(x) + sum(param.sum() for param in self.many)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def backwards(model, device, steps):
    for step in steps[:-1]:
        with model.no_sync():
            loss_of(model, data(step).to(device)).backward()
    loss_of(model, data(steps[-1]).to(device)).backward()


def train(model, device):
    """Return parameters and gradients after two steps. The first step also accumulates in ``.grad``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for step in (10, 20):
        backwards(model, device, [step, step + 1, step + 2])
        if step == 10:
            backwards(model, device, [step + 3])
        seen += [grad.cpu() for grad in full_grads(model).values() if grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [value.cpu() for value in full_params(model).values()]


def calls(used=True, too_old=False):
    return _C_testing.host_kernels(used, too_old)


MODELS = {"plain": make, "mixed": lambda: make(cls=Mixed, many=100)}  # 100: more than a launch is told of
SETTINGS = [*(("FULL_SHARD", number) for number in range(len(PRECISIONS))), ("NO_SHARD", 0), ("ZERO_1", 2)]
CASES = [(*setting, name) for setting in SETTINGS for name in MODELS]


def training(library, cases):
    simulated.use(library)
    on_sim = simulated.new_group()
    for strategy, number, name in cases:
        note(f"{strategy}, {PRECISIONS[number]}, {name}")
        model = MODELS[name]
        ways = {"sharding_strategy": ShardingStrategy[strategy], "mixed_precision": PRECISIONS[number]}
        ways["use_orig_params"] = True
        there = {**ways, "process_group": on_sim, "device_id": SIM}
        calls(False)
        if name == "plain":
            wanted = train(wrap_blocks(model(), process_group=dist.group.WORLD, **ways), torch.device("cpu"))
        else:
            wanted = train(wrap_blocks(model(), **there), SIM)
        before = calls()
        found = train(wrap_blocks(model(), **there), SIM)
        after = calls()
        assert len(found) == len(wanted)
        for place, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(a, b), (place, a, b)
        assert after["pack"] >= before["pack"] + 2 * 3 * 4  # steps, backwards, units


def test_training_has_the_same_bits(library):
    plain, mixed = CASES[::2], CASES[1::2]
    run_ranks(training, 4, library, [*plain[::2], *mixed[1::2]])


@pytest.mark.thorough
def test_training_has_the_same_bits_in_all_settings(library):
    run_ranks(training, 4, library, CASES, timeout=250.0)


def on_an_older_device(library):
    """One that what was compiled does not run on: torch's operations, with the same bits."""
    simulated.use(library)
    wanted = train(wrap_blocks(make(), process_group=dist.group.WORLD, use_orig_params=True), torch.device("cpu"))
    before = calls(True, True)
    model = wrap_blocks(make(), process_group=simulated.new_group(), device_id=SIM, use_orig_params=True)
    found = train(model, SIM)
    assert model.clip_grad_norm_(1.0) == 0  # no gradients are left
    assert calls(True, True) == before
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_an_older_device_has_torchs_operations(library):
    run_ranks(on_an_older_device, 2, library)


def packing(library):
    """What torch's operations do in a backward, without kernels and with them."""
    device = simulated.use(library)
    model = FSDP(make(cls=Mixed, many=10), process_group=simulated.new_group(), device_id=SIM, use_orig_params=True)
    seen = []
    for used in (False, True):
        calls(used)
        loss = loss_of(model, data(1).to(SIM))
        device.operations()
        before = calls(used)
        loss.backward()
        operations, after = device.operations(), calls(used)
        model.zero_grad()
        seen.append(operations)
        assert after["pack"] - before["pack"] == (1 if used else 0)
    return seen


def sending(library):
    """Launches of a forward: a copy of its shard for each unit whose shard is not sent from where it lies."""
    simulated.use(library)
    ways = {"process_group": simulated.new_group(), "device_id": SIM, "use_orig_params": True}
    low = MixedPrecision(param_dtype=torch.bfloat16)
    seen = []
    for more in ({}, {"mixed_precision": low}, {"sharding_strategy": ShardingStrategy.NO_SHARD}):
        model = wrap_blocks(make(cls=Mixed), **ways, **more)
        before = calls()
        with torch.no_grad():
            model(data(1).to(SIM))
        seen.append(calls()["pack"] - before["pack"])
    return seen


def test_shards_are_sent_from_where_they_lie(library):
    units = 4
    assert run_ranks(sending, 2, library) == [[0, units, 0]] * 2


def many(library):
    """More gradients than a launch is told of: one for each table, and the same bits."""
    simulated.use(library)
    model = FSDP(make(cls=Mixed, many=400), process_group=simulated.new_group(), device_id=SIM, use_orig_params=True)
    found = []
    for used in (False, True):
        loss = loss_of(model, data(1).to(SIM))
        before = calls(used)
        loss.backward()
        packed = calls(used)
        grads = [param.grad for param in model.parameters() if param.grad is not None and param.grad.numel() > 0]
        exact = torch.stack([grad.cpu().double().square().sum() for grad in grads]).sum()
        dist.all_reduce(exact)
        largest = model.clip_grad_norm_(1e9, norm_type=float("inf")).cpu()
        norm = model.clip_grad_norm_(0.25).cpu()
        after = calls(used)
        assert packed["pack"] - before["pack"] == (5 if used else 0)  # 413 gradients: 48 bytes each of 4,000
        assert (after["norm"] - packed["norm"] >= 3) == used
        torch.testing.assert_close(norm.double(), exact.sqrt(), rtol=3e-7, atol=0)
        found.append([largest, *(param.grad.cpu() for param in model.parameters() if param.grad is not None)])
        model.zero_grad()
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_launch_for_each_table_of_many_gradients(library):
    run_ranks(many, 2, library)


def test_padding_and_gaps_cost_no_operation(library):
    for without, with_kernels in run_ranks(packing, 2, library):
        zeros = [(each.get("aten::zero_", 0), each.get("aten::_foreach_zero_", 0)) for each in (without, with_kernels)]
        assert zeros == [(0, 1), (0, 0)], (without, with_kernels)  # the padding alone, and not at all
        assert without["aten::fill_"] == with_kernels["aten::fill_"] == 1  # the gradient of the loss
        assert sum(with_kernels.values()) < sum(without.values()) - 20, (without, with_kernels)


def adding(library):
    """A gradient that was reduced in bf16 is divided, cast and added to ``.grad`` in one launch."""
    device = simulated.use(library)
    low = MixedPrecision(param_dtype=torch.bfloat16)
    arguments = {"process_group": simulated.new_group(), "mixed_precision": low, "use_orig_params": True}
    model = FSDP(make(cls=Mixed, many=10), device_id=SIM, **arguments)
    found = []
    for used in (False, True):
        for number in range(2):
            loss = loss_of(model, data(number).to(SIM))
            before = calls(used)
            device.operations()
            loss.backward()
        operations, after = device.operations(), calls(used)
        assert after["pack"] - before["pack"] == (2 if used else 0)  # one packs the unit's own gradients
        assert operations["aten::div"] == (1 if used else 2), operations  # one is the loss's, which is a mean
        found.append([param.grad.cpu() for param in model.parameters() if param.grad is not None])
        model.zero_grad()
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_reduced_gradient_is_added_in_one_launch(library):
    run_ranks(adding, 4, library)  # which divide by 2 before they add up, and after


class Holes(nn.Module):
    """Parameters that do not fill their places, and one in the middle that has no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.unused, self.last = (nn.Parameter(torch.randn(n)) for n in (3, 5, 7))

    def forward(self, x):
        return x * self.first.sum() * self.last.sum()


def holes(library):
    """Without kernels: zeros where there is no gradient, whatever was in the memory."""
    simulated.use(library)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        seen = []
        for device, group in ((torch.device("cpu"), dist.group.WORLD), (SIM, simulated.new_group())):
            arguments = {"sharding_strategy": strategy, "process_group": group, "device_id": device}
            model = FSDP(make(cls=Holes), use_orig_params=False, **arguments)
            loss_of(model, data(1).to(device)).backward()
            seen.append(next(model.parameters()).grad.cpu())  # with its padding
        assert torch.equal(*seen), seen


def test_what_has_no_gradient_has_zeros(library):
    run_ranks(holes, 2, library)


def clipping(library):
    simulated.use(library)
    for used in (False, True):
        before = calls(used)
        model = wrap_blocks(make(cls=Mixed), process_group=simulated.new_group(), device_id=SIM, use_orig_params=True)
        backwards(model, SIM, [1, 2])
        grads = {name: grad.cpu() for name, grad in full_grads(model).items() if grad is not None}
        norm = model.clip_grad_norm_(0.25).cpu()
        wanted = torch.cat([grad.double().flatten() for grad in grads.values()]).norm()
        torch.testing.assert_close(norm.double(), wanted, rtol=3e-7, atol=0)
        factor = (torch.reciprocal(norm + 1e-6) * 0.25).clamp(max=1.0)
        for name, grad in full_grads(model).items():
            assert grad is None or torch.equal(grad.cpu(), grads[name] * factor), (used, name)
        largest = model.clip_grad_norm_(1e9, norm_type=float("inf")).cpu()
        assert largest == max(grad.mul(factor).abs().max() for grad in grads.values())
        assert model.clip_grad_norm_(1e9, norm_type=3.0) > 0  # by torch's operations
        after = calls(used)
        assert after["norm"] - before["norm"] == (2 if used else 0)
        assert after["scale"] - before["scale"] == (3 if used else 0)


def test_clipping(library):
    run_ranks(clipping, 2, library)
