"""torch.compile of a wrapped model, and of modules inside of one: as with torch's handle, with no more graph breaks.

Of a model on flatparam's own runtime: as the unsharded module.

Promises:
- `torch.compile(model)` and `model.compile()` train as the unsharded module, without `install()`:
  `test_flatparams_runtime_compiles_without_install`
"""

import copy

import pytest
import torch
import torch.distributed as dist
from dropin_behaviours import Setting, batch
from dropin_models import Mlp
from gloo import fake_world, note, run_both, run_ranks
from recording import Recorder, first_difference
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

import flatparam

pytestmark = pytest.mark.multiprocess
CASES = [
    ("outside", "FULL_SHARD", True),
    ("outside", "FULL_SHARD", False),
    ("outside", "SHARD_GRAD_OP", True),
    ("inside", "FULL_SHARD", True),
    ("inside", "SHARD_GRAD_OP", False),
    ("inside", "NO_SHARD", True),
]


def train(kind, where, strategy, orig):
    """Return the events of three steps, the graph breaks, and how much was compiled."""
    torch._dynamo.reset()
    counters.clear()
    recorder = Recorder()
    inner = Mlp()
    if where == "inside":
        for block in inner.blocks:
            block.compile(backend="aot_eager")
    model = Setting(kind, strategy, orig).wrap(inner)
    run = torch.compile(model, backend="aot_eager") if where == "outside" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.collectives():
        for step in range(3):
            optimizer.zero_grad()
            x = batch(step)
            output = run(x, 0)
            recorder.tensor(f"step {step} output", output)
            output.square().sum().backward()
            recorder.tensor(f"step {step} gradient of the input", x.grad)
            recorder.parameters(f"step {step}", model)
            optimizer.step()
        for name, value in model.state_dict().items():
            recorder.tensor(f"saved {name}", value)
    return recorder.events, sum(counters["graph_break"].values()), dict(counters["stats"])


def train_all(kind):
    torch.set_num_threads(1)
    results = []
    for case in CASES:
        note(f"{case} with the handle of {kind}")
        torch.manual_seed(5)
        results.append(train(kind, *case))
        dist.barrier()
    return results


def train_compiled(how):
    """Train with flatparam's runtime, compiled, and unsharded; return the parameters of both, and how much was."""
    assert not flatparam.is_installed()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model = flatparam.FullyShardedDataParallel(copy.deepcopy(plain), use_orig_params=True)
    if how == "torch.compile":
        run = torch.compile(model, backend="aot_eager")
    else:
        model.compile(backend="aot_eager")
        run = model
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        x = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        sum(plain(each).square().sum() / 2 for each in x).backward()
        run(x[dist.get_rank()]).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.tolist() for name, value in plain.state_dict().items()}, {
        name: value.tolist() for name, value in model.state_dict().items()
    }


@pytest.mark.sweep(1)
@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
def test_flatparams_runtime_compiles_without_install(how):
    for expected, got in run_ranks(train_compiled, 2, how):
        assert got.keys() == expected.keys()
        for name, value in got.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[name]))


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return torch.func.functional_call(self.inner, {"weight": 2.0 * self.inner.weight}, (x,))


def test_functional_call_is_compiled_as_before_and_in_a_unit_as_unsharded():
    x, module = torch.ones(1, 3), Doubling()
    wanted = module(x)
    with fake_world():
        for use_orig_params in (False, True):
            torch._dynamo.reset()
            block = copy.deepcopy(module)
            block.compile(backend="eager")
            model = flatparam.FullyShardedDataParallel(block, use_orig_params=use_orig_params)
            assert torch.equal(model(x), wanted)
            assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x), wanted)


@pytest.mark.thorough
def test_compiled_models_train_as_with_torchs_handle():
    for torchs, ours in run_both(train_all, 2):
        for case, (expected, breaks, compiled), (got, own_breaks, own_compiled) in zip(
            CASES, torchs, ours, strict=True
        ):
            assert first_difference(expected, got) is None, f"{case}: {first_difference(expected, got)}"
            assert own_breaks <= breaks, case
            assert own_compiled == compiled, case
            assert bool(compiled) == case[2], case  # Dynamo takes FSDP modules with original parameters only


def train_with_backward_traced(kind):
    """By compiled autograd. Where parameters are sharded, torch's own handle cannot be traced."""
    found = []
    for orig in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(5)
        model = Setting(kind, "NO_SHARD", orig).wrap(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = model(torch.full((4, 3), float(step + 1))).square().sum()
            found.append(loss.item())
            with compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.thorough
def test_a_backward_may_be_traced():
    for torchs, ours in run_both(train_with_backward_traced, 1):
        assert ours == torchs
        assert len(set(ours)) == 3


def test_flatparams_runtime_says_that_its_backward_cannot_be_traced():
    with fake_world(2):
        model = flatparam.FullyShardedDataParallel(nn.Linear(3, 3))
        loss = model(torch.ones(2, 3)).sum()
        with (
            compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(
                NotImplementedError, match="compiled autograd cannot trace the backward of the unit of Linear"
            ),
        ):
            loss.backward()
        model(torch.ones(2, 3)).sum().backward()
        assert all(param.grad is not None for param in model.parameters())
