"""Ways of compiling a model on the runtime: each trains as without torch.compile, and compiles nothing new later.

Promises:
- 13 ways of compiling train bit for bit as the eager model, compile nothing after the second step and break a graph
  at most once a unit; inductor's numbers within its rounding
"""

import copy
import shutil

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Block, data, loss_of, make, wrap_blocks
from gloo import run_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy

pytestmark = [pytest.mark.multiprocess, pytest.mark.thorough]
STEPS, UNITS = 4, 4


def wrap(module, **arguments):
    return FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}), **arguments)


def around(backend, **arguments):
    return lambda module: torch.compile(wrap(module, **arguments), backend=backend)


def in_place(model, modules, backend):
    for module in modules:
        module.compile(backend=backend)
    return model


def units_of(model):
    return [unit for unit in FSDP.fsdp_modules(model) if unit is not model]


def each_block_by_class(module, backend):
    module.blocks = nn.ModuleList(torch.compile(block, backend=backend) for block in module.blocks)
    return wrap_blocks(module)


def blocks_after(module, backend, inner):
    model = wrap(module)
    return in_place(model, [unit.module if inner else unit for unit in units_of(model)], backend)


def regions(module, backend):
    for block in module.blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    return wrap(module)


def ways(backend):
    """By name: what compiles and wraps a module."""
    return {
        "before": lambda module: wrap(torch.compile(module, backend=backend)),
        "before, in place": lambda module: wrap(in_place(module, [module], backend)),
        "each block before, in place": lambda module: wrap(in_place(module, module.blocks, backend)),
        "each block before": lambda module: each_block_by_class(module, backend),
        "each block's forward": lambda module: regions(module, backend),
        "around": around(backend),
        "around, in place": lambda module: in_place(model := wrap(module), [model], backend),
        "around, flat parameters": around(backend, use_orig_params=False),
        "around SHARD_GRAD_OP": around(backend, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        "around NO_SHARD": around(backend, sharding_strategy=ShardingStrategy.NO_SHARD),
        "around one unit": lambda module: torch.compile(FSDP(module), backend=backend),
        "each unit": lambda module: blocks_after(module, backend, inner=False),
        "inside of each unit": lambda module: blocks_after(module, backend, inner=True),
    }


CASES = [(name, "aot_eager") for name in ways("")] + [(name, "inductor") for name in ("around", "inside of each unit")]
cases = pytest.mark.parametrize("case", CASES, ids=" ".join)


def train(model):
    """The losses, and how many graphs there were after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses, graphs = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, data(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        graphs.append(counters["stats"].get("unique_graphs", 0))
    return losses, graphs


def train_all():
    torch.set_num_threads(1)
    inductor.cpp.cxx = (None, "g++")  # whatever builds flatparam
    module = make()
    eager, _ = train(wrap(copy.deepcopy(module)))
    found = {}
    for name, backend in CASES:
        if backend == "inductor" and shutil.which("g++") is None:
            continue
        torch._dynamo.reset()
        counters.clear()
        losses, graphs = train(ways(backend)[name](copy.deepcopy(module)))
        found[name, backend] = losses, graphs, sum(counters["graph_break"].values())
        dist.barrier()
    return eager, found


@pytest.fixture(scope="module")
def trained():
    return run_ranks(train_all, 2, timeout=400)


def of(trained, case):
    if case not in trained[0][1]:
        pytest.skip("inductor needs a C++ compiler")
    return [(eager, *found[case]) for eager, found in trained]


@cases
def test_losses_are_those_without_compiling(trained, case):
    for eager, losses, _, _ in of(trained, case):
        if case[1] == "aot_eager":
            assert losses == eager
        else:  # its kernels round otherwise
            assert losses == pytest.approx(eager, rel=1e-4)


@cases
def test_something_is_compiled_and_nothing_after_the_second_step(trained, case):
    for _, _, graphs, _ in of(trained, case):
        assert graphs[0] > 0
        assert graphs[1] == graphs[-1]


@cases
def test_there_is_at_most_one_graph_break_a_unit(trained, case):
    for _, _, _, breaks in of(trained, case):
        assert breaks <= UNITS
