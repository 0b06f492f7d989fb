"""flatparam.traced: the runtime's numbers from one graph, with its collectives in it; whole states; refusals.

Promises:
- `flatparam.traced`: one graph with its collectives, which gathers again in backward, trains as the runtime; states;
  clipping; refusals
"""

import copy

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Block, Model, data, loss_of, make, wrap_blocks
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from gloo import fake_world, run_ranks
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.two_tensor import TwoTensor

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import traced

pytestmark = pytest.mark.multiprocess
POLICY = ModuleWrapPolicy({Block})
UNITS = 4


class Buffered(Model):
    """With a tied parameter, and buffers, of which one is not saved, and one is a unit's own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)
        self.blocks[0].register_buffer("of_unit", torch.ones(2))
        self.again = nn.Linear(3, 5)
        self.again.weight = self.first.weight

    def forward(self, x):
        return super().forward(x) + self.again(x).sum() * 0.01


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, data(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_both(low):
    torch.set_num_threads(1)
    mixed = None if low is None else MixedPrecision(param_dtype=low, reduce_dtype=torch.float32)
    wanted = train(wrap_blocks(make(), mixed_precision=mixed))
    found, kinds = [], {"forward": [], "backward": []}

    def counting(direction):
        def compiler(graph, inputs):
            kinds[direction] += [
                sum(str(node.target).startswith(f"_c10d_functional.{name}") for node in graph.graph.nodes)
                for name in ("all_gather", "reduce_scatter")
            ]
            return make_boxed_func(graph.forward)

        return compiler

    counted = aot_autograd(
        fw_compiler=counting("forward"),
        bw_compiler=counting("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    for compiled in (False, True):
        model = traced.shard(make(), auto_wrap_policy=POLICY, param_dtype=low, reduce_dtype=low and torch.float32)
        found.append(train(torch.compile(model, backend=counted, fullgraph=True) if compiled else model))
    return wanted, found, kinds, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
def test_one_graph_trains_as_the_runtime_and_gathers_again_in_backward(low):
    for wanted, (eager, compiled), collectives, graphs in run_ranks(train_both, 2, low):
        assert eager == wanted
        assert compiled == pytest.approx(wanted, rel=1e-6 if low is None else 1e-2)
        assert graphs == 1
        assert collectives == {"forward": [UNITS, 0], "backward": [UNITS, UNITS]}


def clip_and_save():
    torch.manual_seed(dist.get_rank())
    module = make(cls=Buffered)
    module.seen += 1
    state = copy.deepcopy(module.state_dict())
    model = traced.shard(module, auto_wrap_policy=POLICY)
    found = traced.full_state_dict(model)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    other = traced.shard(make(seed=1, cls=Buffered), auto_wrap_policy=POLICY)
    traced.load_full_state_dict(other, found)
    x = data(0)
    assert torch.equal(other(x), model(x))

    plain = make(cls=Buffered)
    (sum(loss_of(plain, data(0, rank)) for rank in range(2)) / 2).backward()
    loss_of(model, x).backward()
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return wanted.item(), norm.full_tensor().item()


def test_states_are_the_modules_own_and_clipping_counts_all_ranks():
    for wanted, norm in run_ranks(clip_and_save, 2):
        assert norm == pytest.approx(wanted, rel=1e-5)


def test_what_does_not_fit_is_named_and_nothing_is_loaded():
    with fake_world():
        model = traced.shard(make())
        state = traced.full_state_dict(model)
        before = {name: value.clone() for name, value in state.items()}
        with pytest.raises(KeyError, match=r"missing from the state dict: \['last.weight'\]; in no unit: \['more'\]"):
            traced.load_full_state_dict(model, _without(state))
        with pytest.raises(ValueError, match=r"expected `last.weight` to have shape \(1, 5\), got \(5, 1\)"):
            traced.load_full_state_dict(model, {**state, "last.weight": torch.ones(5, 1)})
        assert all(torch.equal(value, before[name]) for name, value in traced.full_state_dict(model).items())
        with pytest.raises(TypeError, match=r"expected the model that shard\(\) returned, .* got a Linear"):
            traced.full_state_dict(nn.Linear(1, 1))


class Twice(Model):
    """With modules in two places: one of the root's unit, and a unit; it reads an attribute and an item of units."""

    def __init__(self):
        super().__init__()
        self.also, self.block = self.first, self.blocks[0]
        self.block.gain, self.pair = 2.0, nn.Sequential(nn.Identity(), nn.Tanh())

    def forward(self, x):
        return self.last(self.pair[1](self.block.gain * self.block(self.block(self.also(x) + self.first(x)))))


def evaluate_freeze_and_save():
    module = make(cls=Twice)
    module.blocks[1].requires_grad_(False)
    plain = copy.deepcopy(module)
    model = copy.deepcopy(traced.shard(module, auto_wrap_policy=ModuleWrapPolicy({Block, nn.Sequential})))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = data(0)
    with torch.no_grad():
        found, wanted = compiled(x), plain(x)
    torch.testing.assert_close(found, wanted)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), wanted)

    loss_of(compiled, x).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    (sum(loss_of(plain, data(0, rank)) for rank in range(2)) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    state, wanted = traced.full_state_dict(model), plain.state_dict()
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, msg=name)
    traced.load_full_state_dict(model, make(seed=1, cls=Twice).state_dict())
    torch.testing.assert_close(compiled(x), make(seed=1, cls=Twice)(x))

    torch.testing.assert_close(model.double()(x.double()), make(seed=1, cls=Twice).double()(x.double()))


def test_evaluation_frozen_units_modules_in_two_places_and_double_compute_as_the_module():
    run_ranks(evaluate_freeze_and_save, 2)


def _without(state):
    return {name: value for name, value in state.items() if name != "last.weight"} | {"more": torch.ones(1)}


def frozen(module):
    module.blocks[1].scale.requires_grad_(False)
    return r"`blocks.1.scale` has True|one requires_grad: `blocks.1.scale` has False"


def integers(module):
    module.blocks[0].table = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    return r"expected `blocks.0.table` to be a real floating-point parameter with values, got one of torch.int64"


def halves(module):
    module.blocks[2].inner.half()
    return r"one dtype: `blocks.2.scale` has torch.float32, `blocks.2.inner.weight` torch.float16"


def without_values(module):
    module.last.to("meta")
    return r"`last.weight` to be .* got one on the meta device, without values"


def of_a_subclass(module):
    module.first.bias = nn.Parameter(TwoTensor(torch.ones(5), torch.ones(5)))
    return r"expected `first.bias` to be a real floating-point parameter with values, got one that is a TwoTensor"


def empty(module):
    for owner in module.blocks[2].modules():
        owner._parameters.update({name: nn.Parameter(torch.empty(0)) for name in owner._parameters})
    return r"expected a parameter of a unit to have elements: all are empty, `blocks.2.scale` is one"


def shared(module):
    module.blocks[0].inner.weight = module.blocks[1].inner.weight
    return "`blocks.1.inner.weight` of the unit of Block .* is shared with `blocks.0.inner.weight`"


def sharded(module):
    module.blocks[0] = FSDP(module.blocks[0])
    return "expected a module without units, `blocks.0` in it is a FullyShardedDataParallel: shard it as it was"


def traced_already(module):
    module.blocks[1] = traced.shard(module.blocks[1])
    return "expected a module without units, `blocks.1` in it is a TracedUnit"


def replicated(module):
    module.last = torch.nn.parallel.DistributedDataParallel(module.last)
    return r"would hold a DistributedDataParallel of torch \(at `last`\)"


@pytest.mark.parametrize(
    "spoil",
    [frozen, integers, halves, without_values, of_a_subclass, empty, shared, sharded, traced_already, replicated],
)
def test_what_cannot_be_a_unit_is_refused_before_anything_is_changed(spoil):
    with fake_world():
        module = make()
        message = spoil(module)
        names = [name for name, _ in module.named_parameters()]
        with pytest.raises(ValueError, match=message):
            traced.shard(module, auto_wrap_policy=POLICY)
    assert [name for name, _ in module.named_parameters()] == names


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"torch.distributed is not initialized"):
        traced.shard(make())
    with fake_world():
        for name, dtype in (("param_dtype", "bf16"), ("reduce_dtype", torch.int8)):
            with pytest.raises(TypeError, match=f"expected {name} to be a floating-point torch.dtype or None"):
                traced.shard(make(), **{name: dtype})


def test_a_model_prints_as_its_module_with_the_units_around():
    module = make()
    layers = [line for line in repr(module).splitlines() if "Linear" in line]
    with fake_world():
        model = traced.shard(module, auto_wrap_policy=POLICY)
    names = [name for name, _ in model.named_parameters()]
    printed = repr(model)
    assert "(0-2): 3 x TracedUnit(" in printed
    assert [line.strip() for line in printed.splitlines() if "Linear" in line] == [line.strip() for line in layers]
    assert [name for name, _ in model.named_parameters()] == names
