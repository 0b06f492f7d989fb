"""Refused calls raise on every rank, in the types of both of torch's versions, and name the cause.

Promises:
- arguments that contradict are refused on every rank, naming the culprit; parameters that two units share:
  `test_refusals`, `test_refusals_in_a_grid`, `test_fsdp_every_strategy.py::test_arguments_that_contradict`,
  `test_fsdp_seen_by_users.py::test_wrong_calls`, `test_fsdp_construction.py::test_a_parameter_of_two_units`
- calls at a wrong time, steps and forwards in summoned parameters, inputs on the meta device, shapes that change:
  `test_refusals`
"""

import contextlib
import copy
import dataclasses
import functools
import re

import pytest
import torch
import torch.distributed as dist
from fsdp_models import SETTINGS, Block, assert_same, assert_same_grads, data, full_params, loss_of, make, wrap_blocks
from gloo import fake_world, note
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import Placement, ShardedGradScaler, ShardingStrategy
from flatparam.fsdp.sharding.parameters import Options, check_tensors, find_originals
from flatparam.fsdp.wrapper.materialize import move

ELSEWHERE = {  # words for a strategy in other libraries -> the name here
    "full_shard": "FULL_SHARD",
    "ZERO3": "FULL_SHARD",
    "zero2": "SHARD_GRAD_OP",
    "ShardingStrategy.shard_grad_op": "SHARD_GRAD_OP",
    "hybrid": "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2",
    "zero-stage-1": "ZERO_1",
    "ddp": "NO_SHARD",
    "?": "",
    3: "",
}
HYBRIDS = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


@contextlib.contextmanager
def refused(message, *types):
    """The block raises, as each of ``types``, with ``message``, on every rank."""
    note(message)
    raised = None
    caught = []
    try:
        yield caught
    except Exception as error:
        raised = error
        caught.append(error)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if raised is None else f"{type(raised).__name__}: {raised}")
    assert all(other is not None for other in everyone), everyone
    assert re.search(message, str(raised)), (message, everyone)
    assert all(isinstance(raised, kind) for kind in types), (type(raised).__mro__, everyone)


def calling(function, *args):
    """A forward hook that calls ``function``."""
    return lambda *ignored: function(*args)


def arguments():
    """Arguments that contradict each other, or name what cannot be."""
    line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    world = dist.group.WORLD
    with refused("both process_group and device_mesh", ValueError):
        FSDP(make(), process_group=world, device_mesh=line)
    with refused("both ignored_modules and ignored_states", ValueError):
        FSDP(make(), ignored_modules=[], ignored_states=[])
    with refused(r"all nn.Parameter or all nn.Module .* types \[.*Linear'>, .*Parameter'>\]", ValueError):
        FSDP(make(), ignored_states=[nn.Linear(1, 1), nn.Parameter(torch.ones(1))])
    for given in ({"process_group": world}, {"device_mesh": line}, {"sharding_strategy": ShardingStrategy.FULL_SHARD}):
        with refused("placement= replaces", ValueError):
            FSDP(make(), placement=Placement(world, world, world), **given)
    for hybrid in HYBRIDS:
        for policy in (None, ModuleWrapPolicy({Block})):
            with refused(rf"{hybrid.name} must know .* got process_group=None", ValueError):
                FSDP(make(), sharding_strategy=hybrid, auto_wrap_policy=policy)
        with refused(rf"{hybrid.name} must know which ranks share", ValueError):
            FSDP(make(), process_group=world, sharding_strategy=hybrid)
        with refused(rf"{hybrid.name} takes a 2-D device_mesh \(replicate, shard\), got 1-D", ValueError):
            FSDP(make(), device_mesh=line, sharding_strategy=hybrid)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1"):
        with refused(rf"{strategy} takes one process group, got 2", TypeError):
            FSDP(make(), process_group=(world, world), sharding_strategy=ShardingStrategy[strategy])
        with refused(rf"{strategy} takes a 1-D device_mesh, got 2-D", ValueError):
            FSDP(make(), device_mesh=grid, sharding_strategy=ShardingStrategy[strategy])
    alone = [dist.new_group([rank]) for rank in range(2)]
    for others in (alone[1 - dist.get_rank()], 3):
        with refused(rf"a process group that this rank {dist.get_rank()} is in", ValueError):
            FSDP(make(), process_group=others)
    with refused("this rank is not in the group", ValueError):
        Placement(optim=alone[1 - dist.get_rank()], grad=alone[1 - dist.get_rank()])
    with refused("ShardingStrategy", TypeError):
        FSDP(make(), sharding_strategy="FULL_SHARDED")
    for word, meant in ELSEWHERE.items():
        text = rf"; did you mean ShardingStrategy.{meant}\?$" if meant else "$"
        with refused(
            f"a ShardingStrategy, got {re.escape(repr(word))}: pass one of FULL_SHARD, [A-Z01_, ]*{text}", TypeError
        ):
            FSDP(make(), sharding_strategy=word)
    with refused("backward_prefetch", TypeError):
        FSDP(make(), backward_prefetch="pre")
    with refused("expected classes of modules as the units of a policy, got 'Linear'", TypeError):
        FSDP(make(), auto_wrap_policy={"Linear"})
    with refused(r"auto_wrap_policy is the class Block: pass ModuleWrapPolicy\({Block}\)", TypeError):
        FSDP(make(), auto_wrap_policy=Block)
    with refused("auto_wrap_policy is the class CustomPolicy: pass an object of it", TypeError):
        FSDP(make(), auto_wrap_policy=CustomPolicy)
    with refused("expected device_mesh to be torch's DeviceMesh or None, got 'x'", TypeError):
        FSDP(make(), device_mesh="x")
    with refused("FULL_SHARD takes one process group, got the text 'world'", TypeError):
        FSDP(make(), process_group="world")
    for bound in (-1.0, float("nan")):
        with refused(f"expected max_norm to be at least 0, got {bound}", ValueError):
            FSDP(make()).clip_grad_norm_(bound)
    for kind in (0.0, -2.0, -float("inf"), float("nan")):
        with refused(f"expected norm_type to be above 0, or infinity, got {kind}", ValueError):
            FSDP(make()).clip_grad_norm_(1.0, norm_type=kind)
    with refused("3 to be callable", ValueError):
        FSDP(make(), param_init_fn=3)
    with refused("False/True or a kwarg dict, but it returned 3", ValueError):
        FSDP(make(), auto_wrap_policy=CustomPolicy(lambda module: 3))


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.ZERO_1, ShardingStrategy.NO_SHARD])
def test_lbfgs(strategy, uo):
    """It multiplies gradients of all parameters with each other."""
    with fake_world(2):
        model = wrap_blocks(make(), use_orig_params=uo, sharding_strategy=strategy)
        before = [param.detach().clone() for param in model.parameters()]
        optimizer = torch.optim.LBFGS(model.parameters())

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, data(0))
            loss.backward()
            return loss

        if strategy is ShardingStrategy.NO_SHARD:
            optimizer.step(closure)
        else:
            with refused(r"LBFGS.step\(\): a parameter of the unit of .* is this rank's shard", RuntimeError):
                optimizer.step(closure)
        kept = all(map(torch.equal, before, model.parameters()))
        assert kept == (strategy is not ShardingStrategy.NO_SHARD)


def for_whole_parameters():
    for strategy, uo in SETTINGS:
        model = wrap_blocks(make(), use_orig_params=uo, sharding_strategy=ShardingStrategy[strategy])
        before = [param.detach().clone() for param in model.parameters()]
        loss_of(model, data(0)).backward()
        is_sharded = strategy != "NO_SHARD"
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        averager = PeriodicModelAverager(period=1, warmup_steps=0)
        for call in (
            functools.partial(average_parameters, model.parameters(), dist.group.WORLD),
            functools.partial(averager.average_parameters, model.parameters()),
            optimizer.step,
        ):
            assert all(map(torch.equal, before, model.parameters()))
            if is_sharded:
                with refused("a parameter of the unit of .* is this rank's shard", RuntimeError):
                    call()
            else:
                call()
        assert all(map(torch.equal, before, model.parameters())) == is_sharded


@pytest.mark.multiprocess
def test_what_takes_whole_parameters():
    simulate_ranks(for_whole_parameters, 2)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "LAYER_ZERO"])
def test_without_a_process_group(strategy):
    with pytest.raises(ValueError, match=r"torch.distributed is not initialized: call .*init_process_group\(\) first"):
        FSDP(make(), sharding_strategy=ShardingStrategy[strategy])


@pytest.mark.parametrize("uo", [False, True])
def test_a_scripted_module_is_refused_and_the_others_stay_as_they_were(uo):
    module = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with fake_world(2):
        with pytest.raises(ValueError, match=r"parameter `1\.weight` belongs to a module of torch\.jit"):
            FSDP(module, use_orig_params=uo)
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        FSDP(module, use_orig_params=uo, ignored_modules=[module[1]])(torch.ones(1, 2)).sum().backward()


def parameters():
    """Parameters that one unit cannot hold."""
    halves, made = nn.Module(), torch.ones(2, dtype=torch.uint8).view(torch.uint4)
    halves.weight, halves.table = nn.Parameter(torch.ones(2)), nn.Parameter(made, requires_grad=False)
    with refused(r"parameter `table` \(shape \(2,\), torch.uint4 on cpu\): torch copies no torch.uint4", ValueError):
        FSDP(halves, segments=True)
    mixed = nn.Module()
    mixed.first, mixed.second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())
    with refused("uniform dtype but got torch.float32 .`first`. and torch.float64 .*`second`", ValueError):
        FSDP(mixed)
    overlapping = nn.Module()
    memory = torch.arange(6.0)
    overlapping.first, overlapping.second = nn.Parameter(memory[:4]), nn.Parameter(memory[2:])
    with refused("parameters `first` and `second` overlap in memory", ValueError):
        FSDP(overlapping)
    expanded = nn.Module()
    expanded.weight = nn.Parameter(torch.ones(1, 3).expand(4, 3))
    with refused("parameter `weight` has elements that share memory", ValueError):
        FSDP(expanded, use_orig_params=True)
    with torch.inference_mode():
        inferred = make()
    match = r"parameter `first.weight` .*made or wrapped in torch.inference_mode\(\): do it outside"
    with refused(match, ValueError):
        FSDP(inferred)
    with torch.inference_mode(), refused(match, ValueError):
        FSDP(make())
    plain = make()
    with torch.inference_mode(), refused(match, ValueError):
        FSDP(plain)
    FSDP(plain)  # the refused call has changed nothing
    frozen = nn.Linear(2, 2)
    frozen.bias.requires_grad_(False)
    with refused("`weight` has True, .*`bias`.* has False; pass segments=True", ValueError):
        FSDP(frozen)
    apart = nn.Linear(2, 2)
    apart.bias = nn.Parameter(torch.empty(2, device="meta"))
    originals = find_originals([apart], apart, set())
    with refused("same device but got both cpu .`weight`. and .*`bias` .* on meta", ValueError, RuntimeError):
        check_tensors(originals, Options(Placement()))
    with refused("device_id=cpu, but parameter `bias` of Linear is on meta", ValueError, RuntimeError):
        move([apart], set(), torch.device("cpu"), torch.device("cpu"), torch.device("cpu"))
    with refused("device_id=0 names an accelerator", ValueError, RuntimeError):
        FSDP(make(), device_id=0)
    scalar = nn.Module()
    scalar.one, scalar.more = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3))
    scalar.forward = lambda x: x * scalar.one + scalar.more.sum()
    for uo in (False, True):  # accepted
        model = FSDP(copy.deepcopy(scalar), use_orig_params=uo)
        assert full_params(model)["one"].shape == ()
    with refused("wrap a module once", ValueError):
        FSDP(FSDP(make()))
    with refused("FSDP applied but found blocks.0 in", ValueError):
        FSDP(wrap_blocks(make()).module, auto_wrap_policy=ModuleWrapPolicy({Block}))
    tied = make()
    tied.blocks[1].scale = tied.blocks[0].scale
    with refused(r"`blocks.1.scale` of the unit of Block .* with `blocks.0.scale` of the unit of Block", ValueError):
        FSDP(tied, auto_wrap_policy=ModuleWrapPolicy({Block}))


class Kept(FSDP):
    """Lets itself be used after its constructor has failed."""

    made = []

    def __new__(cls, *args, **kwargs):
        cls.made.append(super().__new__(cls))
        return cls.made[-1]


def calls():
    """Calls at a wrong time; the model trains on as if they had not been made."""
    for uo in (False, True):
        model, module = wrap_blocks(make(), use_orig_params=uo), make()
        mixed = make()
        mixed.blocks[0] = FSDP(mixed.blocks[0], use_orig_params=not uo)
        with refused(
            "one homogeneous value for _use_orig_params in a tree of units: the unit of Model has", ValueError
        ):
            FSDP(mixed, use_orig_params=uo)(data(0))
        mixed = make()
        mixed.blocks[0] = FSDP(mixed.blocks[0], use_orig_params=uo, limit_all_gathers=False)
        with refused("one homogeneous value for limit_all_gathers", ValueError):
            FSDP(mixed, use_orig_params=uo)(data(0))

        with (
            refused("writeback=True with rank0_only=True", ValueError, NotImplementedError),
            FSDP.summon_full_params(model, rank0_only=True),
        ):
            pass
        with FSDP.summon_full_params(model):
            idle = (ValueError, AssertionError, RuntimeError)
            with (
                refused("summon_full_params: Cannot .* another summon: the unit of Model is expected", *idle),
                FSDP.summon_full_params(model),
            ):
                pass
            with refused("apply: the unit of Model is expected .* SUMMON_FULL_PARAMS", *idle):
                model.apply(lambda module: None)
            with refused("the unit of Model.*summon_full_params", *idle):
                model(data(0)).sum().backward()
            with refused("the unit of Block.*summon_full_params", *idle):
                model.blocks[0](torch.ones(2, 5)).sum().backward()
        handle = model.blocks[1].inner.register_forward_hook(calling(FSDP.summon_full_params(model).__enter__))
        with refused("summon_full_params: Cannot .* forward/backward .* expected .* it is in FORWARD_BACKWARD", *idle):
            model(data(0))
        handle.remove()
        handle = model.blocks[1].inner.register_forward_hook(calling(model.clip_grad_norm_, 1.0))
        with refused("clip_grad_norm_: .* expected .* it is in FORWARD_BACKWARD", *idle):
            model(data(0))
        handle.remove()
        child = model.blocks[0]
        with refused(r"`no_sync\(\)` should only be called on the root .* the unit of Block", *idle), child.no_sync():
            pass
        with refused(r"`clip_grad_norm_\(\)` should only be called on the root .* the unit of Block", *idle):
            child.clip_grad_norm_(1.0)
        with refused("^register_comm_hook can only be called on a root instance.$", *idle) as caught:
            child.register_comm_hook(None, print)
        assert "this is the unit of Block at `blocks.0` in the unit of Model" in str(caught[0].__cause__)
        with refused("expected hook to be callable, got int", ValueError):
            model.register_comm_hook(None, 3)
        with refused("before the first forward", *idle):
            model.register_comm_hook(None, print)
        hooked = wrap_blocks(make(), use_orig_params=uo)
        hooked.register_comm_hook(None, print)
        with refused("^A communication hook is already registered$", *idle):
            hooked.register_comm_hook(None, print)
        one_only = wrap_blocks(make(), use_orig_params=uo)
        one_only.blocks[0]._comm_hook = print
        with refused("^A communication hook is already registered$", *idle):
            one_only.register_comm_hook(None, print)
        for inner in (one_only, hooked):
            with refused("Expects one communication hook in a tree: the unit of .* and the unit of", ValueError):
                FSDP(nn.Sequential(nn.Linear(3, 3), inner), use_orig_params=uo)(data(0))
        loss_of(model, data(0)).backward()
        one = copy.deepcopy(module)
        for rank in range(2):
            (loss_of(one, data(0, rank)) / 2).backward()
        assert_same_grads(model, one)

        # with_grads, offloaded or not sharded: no refusal
        with FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=True, rank0_only=True, writeback=False):
            pass
        whole = wrap_blocks(make(), use_orig_params=uo, sharding_strategy=ShardingStrategy.NO_SHARD)
        with FSDP.summon_full_params(whole, offload_to_cpu=True, rank0_only=True, writeback=False):
            pass

        Kept.made.clear()
        with refused("`bias`", ValueError):
            broken = nn.Linear(2, 2)
            broken.bias.requires_grad_(False)
            Kept(broken, use_orig_params=False)
        with refused("not wrapped to the end", *idle):
            Kept.made[0](torch.ones(1, 2))
        with refused(
            "the unit of Model computes on cpu, and got an input of shape .4, 3. on the meta device|meta", *idle[::2]
        ):
            model(data(0).to("meta"))
        with refused("input of shape .2, 3. on the meta device", *idle[::2]):
            model(x=torch.empty(2, 3, device="meta"))
        model.zero_grad()
        assert_same(model, module)


def grids():
    """Hooks where there is a grid of ranks."""
    mesh = init_device_mesh("cpu", (2, 2))
    for hybrid in HYBRIDS:
        model = FSDP(make(), device_mesh=mesh, sharding_strategy=hybrid)
        with refused(rf"not for a grid of ranks \({hybrid.name}\)", ValueError, AssertionError, RuntimeError):
            model.register_comm_hook(None, print)


def steps():
    """Steps in summoned parameters, shapes that change between steps, gradients that are not finite."""
    for uo in (False, True):
        model, module = wrap_blocks(make(), use_orig_params=uo), make()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer.step()  # without gradients
        loss_of(model, data(0)).backward()
        name = "`first.weight`" if uo else "`the flat parameter`"
        for flags in ({"writeback": False}, {}, {"with_grads": True, "writeback": False}):
            with FSDP.summon_full_params(model, **flags):
                held = any(p.grad is not None for p in model.parameters())
                if uo and flags.get("with_grads") is None and not held:
                    continue
                message = rf"inside summon_full_params\(\): (`[a-z.]*[a-z]`|{name}) of the unit of"
                with refused(message, ValueError, RuntimeError, AssertionError):
                    optimizer.step()
        assert_same(model, module)
        optimizer.step()
        if uo:
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            before = full_params(model)
            with FSDP.summon_full_params(model, with_grads=True):
                grads = {name: param.grad.clone() for name, param in model.named_parameters()}
                sgd.step()
            after = full_params(model)
            assert all(torch.equal(after[name], before[name].add(grad, alpha=-0.1)) for name, grad in grads.items())

        model = wrap_blocks(make(), use_orig_params=uo)
        loss_of(model, data(0)).backward()
        kept = full_params(model)
        block = model.blocks[1]
        if uo:
            place, old = block.inner, block.inner.weight.data
            place.weight.data = torch.ones(7, 7)
            with refused(
                r"Cannot writeback.*`inner.weight` to have its shape \(11, 5\) or that of its piece .* got \(7, 7\)",
                *(ValueError, RuntimeError),
            ):
                loss_of(model, data(0))
            place.weight.data = old
        else:
            flat = block.params[0]
            old = flat.data
            flat.data = torch.ones(7)
            with refused(r"unit of Block at `blocks.1`: .* to have shape \(63,\), got \(7,\)", ValueError):
                loss_of(model, data(0))
            flat.data = old
        loss_of(model, data(0)).backward()
        assert all(torch.equal(value, kept[name]) for name, value in full_params(model).items())

        for rank in range(2):  # one rank alone has a NaN: nobody steps, and the scale is halved
            model = wrap_blocks(make(), use_orig_params=uo)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = ShardedGradScaler(device="cpu", init_scale=8.0)
            x = data(0)
            if dist.get_rank() == rank:
                x[0, 0] = torch.nan
            scaler.scale(loss_of(model, x)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 4.0
            optimizer.zero_grad()
            assert_same(model, make())


@dataclasses.dataclass
class Batch:
    """An input that counts how often it was made."""

    x: torch.Tensor
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        self.made += 1


class Appends(nn.Module):
    """Writes to what it is given, as models with caches do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, batch, cache, more=None):
        cache.append(batch.x)
        batch.made += 1
        more["seen"] = batch
        return (batch.x * self.weight).sum()


def inputs():
    """Inputs that are where they should be are passed on as the objects that they are; else their tensors are found."""
    for uo in (False, True):
        model = FSDP(Appends(), use_orig_params=uo)
        batch, cache, more = Batch(torch.ones(3)), [], {}
        model(batch, cache, more=more).backward()
        assert (len(cache), more["seen"] is batch, batch.made) == (1, True, 2)
        elsewhere = torch.empty(3, device="meta")
        for given in (Batch(elsewhere), [elsewhere], {"x": (1, elsewhere)}, (torch.ones(1), [[elsewhere]])):
            with refused("input of shape .3,. on the meta device", ValueError, RuntimeError):
                model(given, [], more={})


def everything():
    for part in (arguments, parameters, calls, steps, inputs):
        part()


@pytest.mark.multiprocess
def test_refusals():
    simulate_ranks(everything, 2)


@pytest.mark.multiprocess
def test_refusals_in_a_grid():
    simulate_ranks(grids, 4)
