"""Settings and modules that are out of the ordinary: optimizers in backward, modules without a forward.

Promises:
- optimizers in backward step as those afterwards do; with `use_orig_params=False` they are refused:
  `test_optimizers_in_backward`
- full precision in evaluation, as the environment asks: `test_full_precision_in_evaluation`
- the other switches of the environment leave collectives out, or have nothing to do:
  `test_collectives_that_are_left_out`, `test_switches_that_have_nothing_to_do`
- a strategy by name, classes as a policy, a policy that chooses nothing: accepted, or refused with the remedy
"""

import copy
import functools
import itertools
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Averaged, Block, Model, assert_same, data, loss_of, make, wrap_blocks
from gloo import fake_world, note, run_ranks
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchsModuleWrapPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.optim import _apply_optimizer_in_backward

import flatparam
from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ModuleWrapPolicy, ShardingStrategy
from flatparam.common.torch_private import logger
from flatparam.fsdp.wrapper.wrap import targets_of


def optimizers_in_backward():
    """They step each unit when its gradient is reduced, and leave none: training is that of optimizers afterwards."""
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1"):
        note(strategy)
        module = make()
        model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9})
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        oracle = Averaged(module, 2)
        for step in range(3):
            with model.no_sync():
                loss_of(model, data(10 + step)).backward()
            loss_of(model, data(step)).backward()
            oracle.backward(lambda rank, step=step: [data(10 + step, rank), data(step, rank)])
            optimizer.step()
            optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        assert_same(model, module, strategy)
        fresh = copy.deepcopy(model)  # has no optimizers
        loss_of(fresh, data(0)).backward()
        assert_same(fresh, module, strategy)
    model = wrap_blocks(make(), use_orig_params=False)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(RuntimeError, match="optimizer in backward is only supported with use_orig_params=True"):
        model(data(0))
    dist.barrier()


def trained_with_hook(wrapper, hook, strategy, uo, low, **arguments):
    """Three steps with a hook of torch's, accumulation in one of them: this rank's parameters and gradients."""
    precision = MixedPrecision(param_dtype=low)
    model = wrap_blocks(
        make(), wrapper, sharding_strategy=strategy, use_orig_params=uo, mixed_precision=precision, **arguments
    )
    model.register_comm_hook(default_hooks.LowPrecisionState(dist.group.WORLD), getattr(default_hooks, hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            with model.no_sync():
                loss_of(model, data(10)).backward()
        loss_of(model, data(step)).backward()
        optimizer.step()
    params = list(model.parameters())
    return torch.cat([tensor.detach().flatten() for p in params for tensor in (p, p.grad) if tensor is not None])


HOOKS = [
    (hook, strategy)
    for hook in ("fp16_compress_hook", "bf16_compress_hook", "allreduce_hook", "reduce_scatter_hook")
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    if hook.startswith(("fp16", "bf16")) or (hook == "allreduce_hook") == (strategy == "NO_SHARD")
]


def hooks_of_torch():
    """Bit for bit what torch's class makes of them, which on a CPU fails unless streams can be recorded there."""
    settings = list(itertools.product(HOOKS, (False, True), (None, torch.bfloat16)))
    expected = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        for (hook, strategy), *others in settings:
            device = torch.device("cpu")
            expected.append(trained_with_hook(TorchFSDP, hook, TorchStrategy[strategy], *others, device_id=device))
    for ((hook, strategy), *others), values in zip(settings, expected, strict=True):
        note(f"{hook} {strategy} {others}")
        assert torch.equal(trained_with_hook(FSDP, hook, ShardingStrategy[strategy], *others), values)


class Seen(nn.Module):
    """Notes the dtypes that it computes with."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("buffer", torch.ones(3))
        self.seen = []

    def forward(self, x):
        self.seen.append((self.linear.weight.dtype, self.buffer.dtype, x.dtype))
        return self.linear(x) + self.buffer


def two(wrapper, **arguments):
    torch.manual_seed(0)
    low = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    model = nn.Sequential(wrapper(Seen(), mixed_precision=low, **arguments), Seen())
    return wrapper(model, mixed_precision=low, **arguments)


def full_precision_in_eval():
    """Dtypes, outputs and gradients, also of a backward in evaluation, are torch's."""
    for strategy, uo in itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), (False, True)):
        note(f"{strategy} {uo}")
        arguments = {"use_orig_params": uo, "sharding_strategy": TorchStrategy[strategy]}
        models = two(FSDP, **arguments), two(TorchFSDP, device_id=torch.device("cpu"), **arguments)
        for training in (True, False, False, True, False):
            outputs = []
            for model in models:
                model.zero_grad()
                output = model.train(training)(data(0))
                output.float().sum().backward()
                outputs.append((output, [p.grad for p in model.parameters()]))
            (ours, our_grads), (torchs, torch_grads) = outputs
            assert torch.equal(ours, torchs)
            assert ours.dtype == torchs.dtype
            for mine, theirs in zip(our_grads, torch_grads, strict=True):
                assert (mine is None) == (theirs is None)
                assert mine is None or torch.equal(mine, theirs), (strategy, uo, training)
            with torch.no_grad():
                assert torch.equal(models[0](data(1)), models[1](data(1)))
        seen = [[inner.seen for inner in model.modules() if isinstance(inner, Seen)] for model in models]
        assert seen[0] == seen[1]
        states = [model.state_dict() for model in models]
        assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
        assert all(states[0][name].dtype == value.dtype for name, value in states[1].items())
    zero = two(FSDP, sharding_strategy=ShardingStrategy.ZERO_1)
    for training in (True, False, True):
        zero.train(training)(data(0)).float().sum().backward()
    assert [dtypes[0] for dtypes in zero.module[1].seen] == [torch.bfloat16, torch.float32, torch.bfloat16]
    zero.module[1].linear.register_forward_hook(lambda *ignored: zero._unit.core.compute_in_full(True))
    with pytest.raises(RuntimeError, match="the unit of Sequential cannot change its precision in the middle"):
        zero(data(0))


@pytest.mark.multiprocess
def test_full_precision_in_evaluation():
    simulate_ranks(full_precision_in_eval, 2, environment={"FSDP_USE_FULL_PREC_IN_EVAL": "1"})


def buffers_that_are_shared():
    """Modules that share a buffer still do when it was cast, and so does who has kept it; as with torch's class."""
    low = MixedPrecision(buffer_dtype=torch.bfloat16)
    for wrapper, arguments in ((FSDP, {}), (TorchFSDP, {"device_id": torch.device("cpu")})):
        first, second = Seen(), Seen()
        kept = first.buffer = second.buffer
        arguments |= {"mixed_precision": low}
        model = wrapper(nn.Sequential(first, wrapper(second, **arguments)), **arguments)
        for training in (True, False, True):
            model.train(training)(data(0))
            assert first.buffer is kept
            assert second.buffer is kept
            if wrapper is FSDP:  # torch's leaves it low, as the root casts it before the unit in it
                assert kept.dtype == (torch.bfloat16 if training else torch.float32)


@pytest.mark.multiprocess
def test_buffers_that_are_shared_stay_so():
    simulate_ranks(buffers_that_are_shared, 2, environment={"FSDP_USE_FULL_PREC_IN_EVAL": "1"})


def without_padding(model):
    """``model`` of torch's class with zeros in the padding of its shards, where torch has 42."""
    for unit in TorchFSDP.fsdp_modules(model):
        flat = unit._handle.flat_param
        pieces = zip(flat._numels_with_padding, flat._is_padding_mask, strict=True)
        is_padding = torch.cat([torch.full((numel,), padding) for numel, padding in pieces])
        begin = dist.get_rank() * flat.numel() if unit._handle.uses_sharded_strategy else 0
        mine = is_padding[begin : begin + flat.numel()]
        flat.data[: len(mine)][mine] = 0
    return model


def without_gathers():
    """As torch's class: each rank has its own shard in the place of the others'. A warning says so, once."""
    settings = (("FULL_SHARD", True), ("FULL_SHARD", False), ("SHARD_GRAD_OP", True), ("NO_SHARD", False))
    said = []
    logger.addFilter(lambda record: said.append(record.getMessage()) or True)
    wrapped = [
        wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        for strategy, uo in settings
    ]
    assert ["FSDP_USE_FAKE_ALL_GATHER=1" in message for message in said] == [True]
    host = {"device_id": torch.device("cpu")}
    for (strategy, uo), model in zip(settings, wrapped, strict=True):
        stock = {"sharding_strategy": TorchStrategy[strategy], "use_orig_params": uo, **host}
        models = [model, without_padding(wrap_blocks(make(), TorchFSDP, **stock))]
        for step in range(2):
            losses = [loss_of(model, data(step)) for model in models]
            assert torch.equal(*losses), (strategy, uo)
            assert torch.equal(losses[0], loss_of(make(), data(step))) == (strategy == "NO_SHARD"), (strategy, uo)
            for loss in losses:
                loss.backward()
            grads = zip(*([param.grad for param in model.parameters()] for model in models), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in grads if theirs is not None), (strategy, uo)
            for model in models:
                model.zero_grad()


def without_reductions():
    """Each rank has its part of its own gradient, divided as if the others had zeros."""
    for strategy, uo in (("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("ZERO_1", True)):
        model = FSDP(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        module = make()
        loss_of(model, data(0)).backward()
        loss_of(module, data(0)).backward()
        (flat_param,) = model._unit.flat_params
        places = zip(flat_param.shard_slices(), module.parameters(), flat_param.layout.offsets, strict=True)
        for here, param, offset in places:
            if here.numel > 0:
                found = here.original.param.grad if uo else here.of(flat_param.flat.grad)
                start = flat_param.placement.rank * flat_param.layout.shard_numel + here.start - offset
                assert torch.equal(found.reshape(-1), param.grad.reshape(-1)[start : start + here.numel] / 2), strategy
        with FSDP.summon_full_params(model):
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), module.parameters(), strict=True))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("check", "switch"), [(without_gathers, "FSDP_USE_FAKE_ALL_GATHER"), (without_reductions, "FSDP_USE_FAKE_REDUCE")]
)
def test_collectives_that_are_left_out(check, switch):
    run_ranks(check, 2, environment={switch: "1"})


class Watched(nn.Linear):
    """Has rules of its own for attributes: notes whose names are set and deleted."""

    def __init__(self, *sizes):
        self.__dict__["asked"] = set()
        super().__init__(*sizes)

    def __setattr__(self, name, value):
        self.asked.add(("set", name))
        super().__setattr__(name, value)

    def __delattr__(self, name):
        self.asked.add(("delete", name))
        super().__delattr__(name)


def written_by_users():
    """What is written between steps is trained on as in the unsharded module, and modules keep their rules."""
    asked = []
    for uo in (False, True):
        note(f"uo={uo}")
        module, model = make(), make()
        for one in (module, model):
            one.first = Watched(3, 5)
            one.first.load_state_dict(make().first.state_dict())
        model.first.asked.clear()
        model = wrap_blocks(model, use_orig_params=uo)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, model)]
        for step in range(3):
            Averaged(module, 2).backward(lambda rank, step=step: [data(step, rank)])
            loss_of(model, data(step)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for param in itertools.chain(module.parameters(), model.parameters()):
                param.data = param.data * 0.5
        assert_same(model, module, f"uo={uo}")
        asked.append(sorted(model.first.asked))
    return asked


@pytest.mark.multiprocess
@pytest.mark.parametrize("switch", ["FSDP_SKIP_WRITEBACK_CHECK", "FSDP_USE_UNSAFE_SETATTR"])
def test_switches_that_have_nothing_to_do(switch):
    found = simulate_ranks(written_by_users, 2, environment={switch: "1"})
    assert found == simulate_ranks(written_by_users, 2, environment={switch: "0"})
    assert ("set", "weight") in found[0][1]


@pytest.mark.multiprocess
def test_optimizers_in_backward():
    simulate_ranks(optimizers_in_backward, 2)


@pytest.mark.multiprocess
def test_communication_hooks_of_torch():
    simulate_ranks(hooks_of_torch, 2)


@pytest.mark.parametrize("module", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})])
def test_modules_without_a_forward_warn(module):
    with (
        fake_world(2),
        pytest.warns(UserWarning, match=f"do not implement forward: a {type(module).__name__} has none"),
    ):
        FSDP(module)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j, 0.5j, -2 + 0j]))

    def forward(self, x):
        return ((self.weight * x).abs() ** 2).sum()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "ZERO_1"])
@pytest.mark.parametrize("dtypes", [{"reduce_dtype": torch.float32}, {"param_dtype": torch.bfloat16}])
def test_mixed_precision_leaves_complex_parameters_whole(strategy, dtypes):
    """A real dtype would lose their imaginary parts."""
    bare = Complex()
    bare(torch.ones(4)).backward()
    with fake_world(1):
        settings = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True}
        model = FSDP(Complex(), mixed_precision=MixedPrecision(**dtypes), **settings)
        model(torch.ones(4)).backward()
        [param] = model.parameters()
        assert param.grad.dtype == torch.complex64
        assert torch.equal(param.grad, bare.weight.grad)


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "buffer_dtype"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.bool, "bf16"])
def test_other_dtypes_of_mixed_precision_are_refused(name, dtype):
    expected = f"expected mixed_precision.{name} to be a floating-point torch.dtype or None, got {dtype!r}"
    with fake_world(1), pytest.raises(TypeError, match=expected):
        FSDP(nn.Linear(2, 2), mixed_precision=MixedPrecision(**{name: dtype}))


def test_a_strategy_may_be_a_name():
    with fake_world(1):
        model = FSDP(nn.Linear(2, 2), sharding_strategy="NO_SHARD")
        assert model.sharding_strategy == ShardingStrategy.NO_SHARD
        for wrong in ("no_shard", "ZERO_4", 3):
            with pytest.raises(TypeError, match=rf"got {wrong!r}: pass one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, "):
                FSDP(nn.Linear(2, 2), sharding_strategy=wrong)


@pytest.mark.parametrize(
    ("argument", "example"),
    [
        ({"mixed_precision": torch.float16}, "MixedPrecision(param_dtype=torch.float16), got torch.float16"),
        ({"mixed_precision": "bf16"}, "MixedPrecision(param_dtype=torch.bfloat16), got 'bf16'"),
        ({"cpu_offload": True}, "CPUOffload(offload_params=True), got True"),
    ],
)
def test_a_setting_in_another_form_is_told_the_form(argument, example):
    with fake_world(1), pytest.raises(TypeError, match=re.escape(f"or None, as in {example}")):
        FSDP(nn.Linear(2, 2), **argument)


@pytest.mark.parametrize("policy", [{Block}, [Block], ModuleWrapPolicy(Block), ModuleWrapPolicy({Block})])
def test_a_policy_may_be_a_set_of_classes_or_of_one_class(policy):
    with fake_world(1):
        model = FSDP(Model(), auto_wrap_policy=policy, sharding_strategy="NO_SHARD")
        assert [type(unit.module) for unit in FSDP.fsdp_modules(model)] == [Model, Block, Block, Block]


def test_what_is_no_class_in_a_policy_is_refused():
    for call in (lambda: ModuleWrapPolicy({"Block"}), lambda: FSDP(Model(), auto_wrap_policy={"Block"})):
        with fake_world(1), pytest.raises(TypeError, match=r"expected classes of modules .* got 'Block'"):
            call()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "policy",
    [
        {nn.Conv2d},
        TorchsModuleWrapPolicy({nn.Conv2d}),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Conv2d}),
    ],
)
def test_a_policy_that_chooses_nothing_is_told_of_once(policy, rank):
    expected = "chooses modules of Conv2d, and Model has none: all of it is one unit. Its modules are of: "
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        targets_of_rank(policy, rank)
    told = [one for one in found if "auto_wrap_policy" in str(one.message)]
    assert len(told) == 1 - rank
    for one in told:
        assert expected + "Linear (8), Block (3), ModuleList (1)" in str(one.message)
        assert one.filename == __file__


def targets_of_rank(policy, rank):
    with fake_world(2, rank=rank):
        return targets_of(Model(), policy, set(), set(), {})


def test_exceptions_are_names_of_the_package():
    assert {"DeviceError", "OrderError", "StateError"} <= set(flatparam.__all__)
    assert flatparam.StateError is flatparam.fsdp.errors.StateError
    assert issubclass(flatparam.DeviceError, ValueError)
    assert issubclass(flatparam.OrderError, RuntimeError)


def differing():
    """The message has what differs, and nothing of what is the same."""
    rank, said = dist.get_rank(), "the ranks have built different units: "
    precision = MixedPrecision(reduce_dtype=torch.bfloat16 if rank else None)
    expected = (
        r"rank 0 has the unit of Linear \(reduce_dtype=None\), rank 1 has the unit of Linear \(reduce_dtype=torch"
    )
    with pytest.raises(ValueError, match=said + expected + r".bfloat16\)$"):
        FSDP(nn.Linear(3, 4), mixed_precision=precision)
    expected = r"rank 0 has parameter `weight` \(shape \(4, 3\), strides \(3, 1\)\), rank 1 has parameter `weight` "
    with pytest.raises(
        ValueError, match=said + expected + r"\(shape \(4, 2\), strides \(2, 1\)\), in the unit of Linear$"
    ):
        FSDP(nn.Linear(3 - rank, 4))
    inner = nn.Sequential(nn.ReLU(), nn.Linear(3 - rank, 4))
    with pytest.raises(ValueError, match=said + r".*\), in the unit of Linear at `1\.1`$"):
        FSDP(
            nn.Sequential(nn.Linear(4, 3), inner),
            auto_wrap_policy=lambda module, recurse, **_: recurse or module is inner[1],
        )


@pytest.mark.multiprocess
def test_an_error_of_ranks_that_differ_shows_what_does():
    simulate_ranks(differing, 2)
