"""Wrapping makes the shard without the unsharded flat parameter: torch's bits, in little memory, unseen by anybody."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from gloo import HANDLES, fake_world, handle_of
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import flatparam
from flatparam.dropin import flatten
from flatparam.dropin.flat_param import FlatParamHandle

ROOT = Path(__file__).parents[2]


class Odd(nn.Module):
    """Parameters of every layout: contiguous, empty, channels_last, transposed, holes between, one twice."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def random(*shape):
            return torch.randn(shape, generator=generator)

        self.a = nn.Parameter(random(3, 5))
        self.empty = nn.Parameter(random(0, 2))
        self.image = nn.Parameter(random(4, 3, 2, 2).to(memory_format=torch.channels_last))
        self.transposed = nn.Parameter(random(4, 7).t())
        self.inner = nn.Linear(3, 2)
        self.inner.weight, self.inner.bias = nn.Parameter(random(2, 3)), nn.Parameter(random(2))
        self.again = self.a
        self.last = nn.Parameter(random(7))


def wrapped(kind, module, orig, world, rank):
    """The handle that torch's FSDP makes of ``module`` on a rank of a fake world."""
    with fake_world(world, rank), handle_of(kind):
        return FSDP(module, use_orig_params=orig, device_id=torch.device("cpu"))._handle


def facts(handle):
    flat_param = handle.flat_param
    parameters = [] if flat_param._params is None else [param.detach().clone() for param in flat_param._params]
    return [
        flat_param.detach().clone(),
        flat_param._shard_numel_padded,
        flat_param._sharded_size,
        flat_param._unpadded_unsharded_size,
        flat_param._shard_param_infos,
        *parameters,
    ]


def assert_equal(ours, torchs):
    assert len(ours) == len(torchs)
    for mine, its in zip(ours, torchs, strict=True):
        assert torch.equal(mine, its) if isinstance(its, torch.Tensor) else mine == its


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("world", [2, 3, 8, 200])
def test_every_rank_s_shard_is_torch_s(orig, world):
    for rank in sorted({*range(min(world, 8)), world // 2, world - 1}):
        torchs, ours = (facts(wrapped(kind, Odd(), orig, world, rank)) for kind in HANDLES)
        assert_equal(ours, torchs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_shards_of_other_dtypes_are_torch_s(dtype):
    for rank in range(3):
        torchs, ours = (facts(wrapped(kind, Odd().to(dtype), True, 3, rank)) for kind in HANDLES)
        assert_equal(ours, torchs)


def test_parameters_that_are_not_dense_keep_their_values():
    wide = torch.arange(60.0).view(6, 10)
    for rank in range(4):
        module = nn.Module()
        module.columns = nn.Parameter(wide[:, :3])
        module.every_second = nn.Parameter(wide.clone().view(-1)[::2])
        flat = torch.cat([wide[:, :3].flatten(), wide.view(-1)[::2]])
        handle = wrapped("flatparam", module, False, 4, rank)
        assert torch.equal(handle.flat_param, flat[rank * 12 : rank * 12 + 12])


def test_parameters_that_the_user_holds_keep_their_values():
    module, expected = Odd(), [param.detach().clone() for param in Odd().parameters()]
    held = list(module.parameters())
    wrapped("flatparam", module, False, 8, 3)
    for param, value in zip(held, expected, strict=True):
        assert torch.equal(param, value)


@contextlib.contextmanager
def looked_at(name, seen):
    """Replace a step of the handle by one that looks at the unsharded flat parameter, if it is there."""
    step = vars(FlatParamHandle).get(name) or getattr(FlatParamHandle, name)

    def looks(self, *args, **settings):
        if getattr(self, "flat_param", None) is not None and not hasattr(self.flat_param, "_sharded_size"):
            seen.append(self.flat_param.detach().clone())
        result = step(self, *args, **settings)
        if name.startswith("flatten"):
            seen.append(result.detach().clone())
        return result

    own = name in vars(FlatParamHandle)
    setattr(FlatParamHandle, name, looks)
    try:
        yield
    finally:
        if own:
            setattr(FlatParamHandle, name, step)
        else:
            delattr(FlatParamHandle, name)


@pytest.mark.parametrize(
    "name", ["shard", "_use_unsharded_views", "_get_unflat_views_unaligned", "_take_over_attributes", "flatten_tensors"]
)
def test_a_replaced_step_sees_the_unsharded_data(name):
    module = nn.Linear(3, 5)
    expected = torch.cat([param.detach().flatten() for param in module.parameters()])
    seen = []
    with looked_at(name, seen):
        handle = wrapped("flatparam", module, False, 2, 1)
    assert seen
    for tensor in seen:
        assert torch.equal(tensor, expected)
    assert torch.equal(handle.flat_param, expected[10:])


def test_a_replaced_get_shard_sees_the_unsharded_data(monkeypatch):
    module = nn.Linear(3, 5)
    expected = torch.cat([param.detach().flatten() for param in module.parameters()])
    seen, own = [], FlatParamHandle._get_shard

    def looks(tensor, rank, world_size):
        seen.append(tensor.detach().clone())
        return own(tensor, rank, world_size)

    monkeypatch.setattr(FlatParamHandle, "_get_shard", staticmethod(looks))
    wrapped("flatparam", module, False, 2, 0)
    assert len(seen) == 1
    assert torch.equal(seen[0], expected)


def test_a_subclass_and_a_replaced_constructor_see_the_unsharded_data(monkeypatch):
    seen, own = [], FlatParamHandle.__init__

    def constructor(self, *args, **settings):
        own(self, *args, **settings)
        seen.append(self.flat_param.detach().clone())

    monkeypatch.setattr(FlatParamHandle, "__init__", constructor)
    module = nn.Linear(3, 5)
    expected = torch.cat([param.detach().flatten() for param in module.parameters()])
    wrapped("flatparam", module, False, 2, 0)
    assert len(seen) == 1
    assert torch.equal(seen[0], expected)


def test_a_module_that_looks_at_what_it_is_given_sees_the_unsharded_data():
    seen = []

    class Looking(nn.Linear):
        def __setattr__(self, name, value):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                seen.append(value.detach().clone())
            super().__setattr__(name, value)

    module = Looking(3, 5)
    expected = [param.detach().clone() for param in module.parameters()]
    wrapped("flatparam", module, False, 2, 0)
    assert len(seen) >= 2
    for tensor, value in zip(seen, expected, strict=False):
        assert torch.equal(tensor, value)


def test_a_handle_driven_by_hand_has_its_unsharded_data():
    module = nn.Linear(3, 5)
    expected = torch.cat([param.detach().flatten() for param in module.parameters()])
    with fake_world(2):
        strategy = torch.distributed.fsdp._flat_param.HandleShardingStrategy.FULL_SHARD
        arguments = (list(module.parameters()), module, torch.device("cpu"), strategy, False, None, None, False)
        handle = flatparam.FlatParamHandle(*arguments, torch.distributed.group.WORLD, False)
        assert torch.equal(handle.flat_param, expected)
        assert torch.equal(module.weight, expected[:15].view(5, 3))


def test_deterministic_algorithms_stay_as_they_were():
    torch.use_deterministic_algorithms(True)
    try:
        torchs, ours = (facts(wrapped(kind, Odd(), True, 3, 1)) for kind in HANDLES)
        assert_equal(ours, torchs)
        assert torch.utils.deterministic.fill_uninitialized_memory is True
        assert torch.empty(4).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_written_where_deterministic_algorithms_fill_new_memory(monkeypatch):
    made, unwritten = [], flatten._unwritten

    def looks(numel, like):
        made.append(torch.utils.deterministic.fill_uninitialized_memory)
        tensor = unwritten(numel, like)
        made.append(bool(tensor.isnan().all()))
        return tensor

    monkeypatch.setattr(flatten, "_unwritten", looks)
    torch.use_deterministic_algorithms(True)
    try:
        wrapped("flatparam", nn.Linear(300, 300), False, 2, 0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert made == [True, False]


@pytest.mark.sweep(1)
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["flatparam orig", "flatparam flat"])
def test_the_peak_of_wrapping_is_the_shard(name):
    command = [sys.executable, "-m", "benchmarks.bench_wrap", "--wrap", name, "256"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0.9 * 256 / 8 <= found["peak"] <= 256 / 8 + 16 + 32  # MiB: shard, largest parameter, and some
    assert found["stays"] <= 256 / 8 - 256 + 32  # the originals are gone
