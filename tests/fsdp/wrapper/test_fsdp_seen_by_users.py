"""A model on the runtime as users see it: names, shapes, dtypes, state dicts, full parameters, errors.

Promises:
- after an exception in forward or backward the next step is right: `test_exceptions`
- clipping by norms 1, 2, 3, inf; on grids; unsharded units beside sharded ones; inf again and again with an empty
  rank: `test_clipping`, `test_fsdp_construction.py::test_grids_of_ranks`, `test_fsdp_every_strategy.py::test_corners`
- each field of the settings alone; inputs of nested units; buffers: `test_each_precision_setting`
- names, shapes, types of parameters and gradients at every moment: `test_what_is_seen_when`
- full parameters with each flag; `apply`; each rank keeps its shard of the values that it wrote:
  `test_full_parameters`, `test_fsdp_every_strategy.py::test_corners`
- full state dicts and loading them, strict and not: `test_full_state_dicts`
- a conversion after a forward without backward keeps the parameters: `test_a_conversion_keeps_the_parameters`
- where torch 2.13 goes wrong: full parameters of a CPU model, offloaded to the CPU: `test_full_parameters`
"""

import itertools
import math

import pytest
import torch
from fsdp_models import (
    SETTINGS,
    Averaged,
    assert_same,
    assert_same_grads,
    data,
    every_setting,
    have_memory,
    loss_of,
    make,
    wrap_blocks,
)
from gloo import fake_world, note
from simulated_ranks import simulate_ranks
from torch import nn

import flatparam
from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardingStrategy

pytestmark = pytest.mark.multiprocess


def summoning(strategy, uo):
    what = f"{strategy} uo={uo}"
    note(what)
    module, model = make(), wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
    before = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    rank = torch.distributed.get_rank()
    # each rank keeps its own shard of what it wrote; the same values everywhere are the new parameters
    with FSDP.summon_full_params(model):
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in module.named_parameters()]
        for param in model.parameters():
            param.data.mul_(2.0)
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(2.0)
    assert_same(model, module, what)
    assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == before
    with FSDP.summon_full_params(model, writeback=False):
        for param in model.parameters():
            param.data.add_(1.0)
    kept = strategy == "NO_SHARD"
    with torch.no_grad():
        for param in module.parameters():
            param.add_(1.0 if kept else 0.0)
    assert_same(model, module, what)
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        shapes = [tuple(p.shape) for p in model.parameters()]
        if rank == 0 or kept or strategy == "NO_SHARD":
            assert shapes == [tuple(p.shape) for p in module.parameters()]
        else:
            assert shapes == [shape for _, shape in before]
    with FSDP.summon_full_params(model, recurse=False, writeback=False):
        names = [name for name, _ in model.named_parameters()]
        assert "first.weight" in names
        assert uo == ("blocks.0.scale" in names)
    # gradients, written too
    loss_of(model, data(0)).backward()
    Averaged(module, 2).backward(lambda rank: [data(0, rank)])
    with FSDP.summon_full_params(model, with_grads=True):
        for param in model.parameters():
            param.grad.mul_(3.0)
    for param in module.parameters():
        param.grad.mul_(3.0)
    assert_same_grads(model, module, what)
    with pytest.raises(ValueError, match="writeback"), FSDP.summon_full_params(model, rank0_only=True):
        pass
    with (
        FSDP.summon_full_params(model),
        pytest.raises(AssertionError, match="IDLE"),
        FSDP.summon_full_params(model),
    ):
        pass
    visited = []

    def visit(m, visited=visited):
        if isinstance(m, nn.Linear):
            visited.append((tuple(m.weight.shape), m.bias is None))

    model.apply(visit)
    assert len(visited) == 8
    assert ((11, 5), False) in visited


@pytest.mark.sweep(3)
@every_setting
def test_full_parameters(strategy, uo):
    simulate_ranks(summoning, 2, strategy, uo)


def state_dicts(strategy, uo):
    what = f"{strategy} uo={uo}"
    note(what)
    other = make(seed=5)
    model = nn.Sequential(wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo))
    wanted = nn.Sequential(make()).state_dict()
    got = model.state_dict()
    assert list(got) == list(wanted), what
    assert all(torch.equal(got[name], value) for name, value in wanted.items())
    assert not any("_fsdp" in name for name in got._metadata)
    model.load_state_dict(nn.Sequential(other).state_dict())
    assert_same(model[0], other, what)
    assert torch.equal(loss_of(model, data(0)), loss_of(other, data(0)))
    with torch.no_grad():
        loss_of(model, data(0))
    # loading between a forward and the next: the new values are used
    model.load_state_dict(wanted)
    assert torch.equal(loss_of(model, data(0)), loss_of(make(), data(0)))
    model[0].load_state_dict(make(seed=3).state_dict(), assign=True)
    assert_same(model[0], make(seed=3), what)
    broken = dict(wanted)
    broken["0.more"] = broken.pop("0.blocks.1.scale")
    with pytest.raises(RuntimeError, match=r'Missing.*"0.blocks.1.scale"(.|\n)*Unexpected.*"0.more"'):
        model.load_state_dict(broken)
    result = model.load_state_dict(broken, strict=False)
    assert result.missing_keys == ["0.blocks.1.scale"]
    assert result.unexpected_keys == ["0.more"]
    loss_of(model, data(0)).backward()
    config = flatparam.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, flatparam.StateDictType.FULL_STATE_DICT, config):
        got = model.state_dict()
    rank = torch.distributed.get_rank()
    assert len(got) == (len(wanted) if rank == 0 or strategy == "NO_SHARD" else 0)


@pytest.mark.sweep(3)
@every_setting
def test_full_state_dicts(strategy, uo):
    simulate_ranks(state_dicts, 2, strategy, uo)


def clipping():
    for norm, (strategy, uo) in itertools.product((1.0, 2.0, 3.0, math.inf), SETTINGS):
        what = f"{strategy} uo={uo} norm={norm}"
        note(what)
        module, model = make(), wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        loss_of(model, data(0)).backward()
        Averaged(module, 2).backward(lambda rank: [data(0, rank)])
        ours = model.clip_grad_norm_(0.1, norm)
        plain = nn.utils.clip_grad_norm_(module.parameters(), 0.1, norm)
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=0)
        for (name, grad), param in zip(flat_grads(model).items(), module.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad, rtol=1e-5, atol=1e-8, msg=f"{what} {name}")
    with pytest.raises(RuntimeError, match="root"):
        model.blocks[0].clip_grad_norm_(1.0)


def flat_grads(model):
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        return {name: param.grad.clone() for name, param in model.named_parameters()}


def test_clipping():
    simulate_ranks(clipping, 2)


def precision():
    """bf16 for parameters and reduction: a module that casts by hand gives the same gradients."""
    for strategy, uo in SETTINGS:
        note(f"{strategy} uo={uo}")
        low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
        model = wrap_blocks(
            make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo, mixed_precision=low
        )
        model.module.register_buffer("seen", torch.ones(3))
        outer = make()
        halves = [make().bfloat16() for _ in range(2)]
        totals = None
        for rank, half in enumerate(halves):
            loss_of(half, data(0, rank).bfloat16()).backward()
            grads = [param.grad.float() / 2 for param in half.parameters()]
            totals = grads if totals is None else [a + b for a, b in zip(totals, grads, strict=True)]
        for param, grad in zip(outer.parameters(), totals, strict=True):
            param.grad = grad
        loss = loss_of(model, data(0))
        assert loss.dtype == torch.bfloat16
        assert model.seen.dtype == torch.bfloat16
        loss.backward()
        assert all(
            (param.dtype == torch.float32 and param.grad is None) or param.grad.dtype == torch.float32
            for param in model.parameters()
        )
        assert_same_grads(model, outer)
        assert_same(model, make())
        assert all(value.dtype == torch.float32 for value in model.state_dict().values())
        # many small gradients: kept in fp32 though they are bf16
    ones = FSDP(nn.Linear(1, 1, bias=False), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    with ones.no_sync():
        for _ in range(511):
            ones(torch.ones(1, 1)).sum().backward()
    ones(torch.ones(1, 1)).sum().backward()
    [(name, grad)] = flat_grads(ones).items()
    assert grad.item() == 512.0, (name, grad)


def precision_fields(strategy, uo):
    """Each setting alone: dtypes of the wire, of gradients, inputs and buffers."""
    note(f"{strategy} uo={uo}")

    def build(strategy=strategy, uo=uo, **fields):
        torch.manual_seed(0)
        units = [nn.Linear(3, 3) for _ in range(2)]
        arguments = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
        inner = FSDP(units[0], mixed_precision=MixedPrecision(**fields), **arguments)
        return FSDP(nn.Sequential(inner, units[1]), mixed_precision=MixedPrecision(**fields), **arguments)

    def dtypes(model):
        model(data(0)).sum().backward()
        return {param.grad.dtype for param in model.parameters() if param.grad is not None}

    low = torch.bfloat16
    assert dtypes(build(reduce_dtype=low)) == {torch.float32}
    assert dtypes(build(reduce_dtype=low, keep_low_precision_grads=True)) == {low}
    assert dtypes(build(param_dtype=low, keep_low_precision_grads=True)) == {low}
    assert dtypes(build(param_dtype=low, reduce_dtype=torch.float32, keep_low_precision_grads=True)) == {torch.float32}
    model = build(reduce_dtype=low)
    assert model(data(0)).dtype == torch.float32
    # the root casts its inputs, the others only if asked to
    with pytest.raises(RuntimeError, match="dtype"):
        build(param_dtype=low, cast_root_forward_inputs=False)(data(0))
    assert build(param_dtype=low, cast_forward_inputs=True)(data(0).double()).dtype == low
    seen = []
    arguments = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
    inner = nn.Linear(3, 3)
    inner.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0].dtype))
    half = MixedPrecision(param_dtype=torch.float16, cast_forward_inputs=True)
    nested = FSDP(
        nn.Sequential(nn.Linear(3, 3), FSDP(inner, mixed_precision=half, **arguments)),
        mixed_precision=MixedPrecision(param_dtype=low),
        **arguments,
    )
    assert nested(data(0)).dtype == torch.float16
    assert seen == [torch.float16]
    model = build(buffer_dtype=torch.float16)
    model.module.register_buffer("mean", torch.ones(2))
    model.module.register_buffer("count", torch.ones(2, dtype=torch.int64))
    model(data(0))
    assert (model.mean.dtype, model.count.dtype) == (torch.float16, torch.int64)
    assert model.state_dict()["mean"].dtype == torch.float32
    assert model.mean.dtype == torch.float16


@pytest.mark.sweep(3)
@every_setting
def test_each_precision_setting(strategy, uo):
    simulate_ranks(precision_fields, 2, strategy, uo)


def test_mixed_precision():
    simulate_ranks(precision, 2)


def visible():
    """The rows of the table of what is seen when."""
    rank = torch.distributed.get_rank()
    model = wrap_blocks(make(), use_orig_params=False)
    names = [name for name, _ in model.named_parameters()]
    assert names == ["_fsdp_wrapped_module._flat_param"] + [
        f"_fsdp_wrapped_module.blocks.{i}._fsdp_wrapped_module._flat_param" for i in range(3)
    ]
    total = sum(p.numel() for p in make().blocks[0].parameters())
    assert all(p.shape == (math.ceil(total / 2),) for p in list(model.parameters())[1:])
    seen = []
    inner = model.blocks[0].inner
    inner.register_forward_pre_hook(lambda m, args: seen.append((type(m.weight), m.weight.shape, m.weight.grad_fn)))
    loss = loss_of(model, data(0))
    assert seen[0][0] is torch.Tensor
    assert seen[0][1] == (11, 5)
    assert seen[0][2] is not None
    loss.backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())
    model.zero_grad()
    with model.no_sync():
        loss_of(model, data(0)).backward()
    flat = model.blocks[0].params[0]
    assert flat.shape == (math.ceil(total / 2),)
    assert flat.grad.shape == (total,)

    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        originals = make()
        objects = list(originals.parameters())
        model = wrap_blocks(originals, use_orig_params=True, sharding_strategy=ShardingStrategy[strategy])
        assert list(map(id, model.parameters())) == list(map(id, objects))
        names = [name for name, _ in model.named_parameters()]
        assert names[2] == "_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.scale"
        shapes = [tuple(p.shape) for p in model.parameters()]
        whole = [tuple(p.shape) for p in make().parameters()]
        if strategy == "NO_SHARD":
            assert shapes == whole
        else:
            assert all(len(shape) == 1 for shape in shapes)
            assert any(shape == (0,) for shape in shapes)
        loss = loss_of(model, data(0))
        kind = torch.Tensor if strategy == "SHARD_GRAD_OP" else nn.Parameter
        assert type(model.blocks[1].outer.weight) is kind
        loss.backward()
        assert list(map(id, model.parameters())) == list(map(id, objects))
        assert [tuple(p.shape) for p in model.parameters()] == shapes
        for param in model.parameters():
            assert (param.grad is None) == (param.numel() == 0)
            assert param.grad is None or param.grad.shape == param.shape
        model.zero_grad()
        with model.no_sync():
            loss_of(model, data(0)).backward()
        assert [tuple(p.shape) for p in model.parameters()] == shapes
        assert [tuple(p.grad.shape) for p in model.parameters()] == whole
    assert rank in (0, 1)


def test_what_is_seen_when():
    simulate_ranks(visible, 2)


class Boom(Exception):
    pass


def old_values(uo):
    """ZERO_1 keeps what it has gathered: where the shards have changed since, nobody is shown that."""
    model, module = wrap_blocks(make(), sharding_strategy=ShardingStrategy.ZERO_1, use_orig_params=uo), make()
    block = model.module.blocks[1]
    layer = next(inner for inner in block.modules() if isinstance(inner, nn.Linear))
    optim, others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, nn.Linear(2, 2)))
    x = torch.ones(1, layer.in_features)

    def is_refused():
        with pytest.raises(RuntimeError, match=r"the unit of Block at `blocks.1` was used while it is sharded"):
            layer(x)

    for step in range(3):
        loss = loss_of(model, data(step))
        loss.backward(retain_graph=True)
        loss.backward()  # nothing has changed: the graph is as good as before
        optim.step()
        optim.zero_grad()
        is_refused()
        with FSDP.summon_full_params(model):
            shown = layer(x)
        is_refused()
        with torch.no_grad():
            model(data(step))
        if not uo:
            assert torch.equal(layer(x), shown)
            others.step()
            assert torch.equal(layer(x), shown)  # of another model
    loss_of(model, data(0))  # to which no backward comes
    storage = layer.weight.untyped_storage()
    kept = bytes(storage)
    loss_of(model, data(0)).backward()
    optim.step()
    is_refused()
    assert uo or bytes(storage) == kept
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    is_refused()
    assert loss_of(model, data(0)).isfinite()
    assert_same(model, zeroed(module))


def zeroed(module):
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    return module


@pytest.mark.parametrize("uo", [False, True])
def test_old_values_are_not_shown(uo):
    simulate_ranks(old_values, 2, uo)


def exceptions(strategy, uo):
    """An exception in forward or backward: states are reset, and the next step is right."""
    for where in ("forward", "backward", "sibling"):
        note(f"{strategy} uo={uo} {where}")
        module, model = make(), wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)

        def fail(*args):
            raise Boom

        if where == "forward":
            handle = model.blocks[1].inner.register_forward_hook(fail)
        elif where == "backward":
            handle = model.blocks[1].inner.register_full_backward_hook(fail)
        else:
            handle = model.last.register_full_backward_pre_hook(fail)
        for _ in range(2):
            with pytest.raises(Boom):
                loss_of(model, data(3)).backward()
        handle.remove()
        model.zero_grad()
        assert_same(model, module)
        loss_of(model, data(0)).backward()
        Averaged(module, 2).backward(lambda rank: [data(0, rank)])
        assert_same_grads(model, module, f"{strategy} uo={uo} {where}")
        assert not any(all(have_memory(unit._unit.core)) for unit in FSDP.fsdp_modules(model)) or strategy in (
            "NO_SHARD",
            "ZERO_1",
        )


@pytest.mark.sweep(3)
@every_setting
def test_exceptions(strategy, uo):
    simulate_ranks(exceptions, 2, strategy, uo)


def outside():
    """Calls at the wrong time and place say so, on every rank, and change nothing."""
    model = wrap_blocks(make(), use_orig_params=True)
    assert model.check_is_root()
    assert not model.blocks[0].check_is_root()
    with pytest.raises(RuntimeError, match="root"), model.blocks[0].no_sync():
        pass
    with pytest.raises(AssertionError, match="root"), model.blocks[0].no_sync():
        pass
    with pytest.raises(ValueError, match="already"):
        FSDP(model)
    with pytest.raises(TypeError, match="one process group"):
        FSDP(make(), process_group=(None, None))
    with pytest.raises(ValueError, match="both"):
        FSDP(make(), ignored_modules=[], ignored_states=[])
    frozen = nn.Module()
    frozen.trained, frozen.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    with pytest.raises(ValueError, match="`frozen`"):
        FSDP(frozen)
    mixed = nn.Module()
    mixed.first, mixed.second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())
    with pytest.raises(ValueError, match="`second`"):
        FSDP(mixed, use_orig_params=True)
    tied = make()
    tied.blocks[2].scale = tied.blocks[0].scale
    tied.blocks[0] = FSDP(tied.blocks[0])
    with pytest.raises(ValueError, match=r"`scale` of a Block.*Block"):
        FSDP(tied)
    weight = wrap_blocks(make(), use_orig_params=False)
    loss_of(weight, data(0)).backward()
    with pytest.raises(RuntimeError, match="sharded"):
        weight.blocks[0].inner.weight.sum()


def test_wrong_calls():
    simulate_ranks(outside, 2)


class Failing(nn.Linear):
    """Its properties ask for what it has not."""

    @property
    def size(self):
        return self.width

    @property
    def _size(self):
        return self.width


def test_missing_attributes():
    """Public ones are the inner model's; a private one that it does not define is what a class looks for in itself."""
    with fake_world():
        model = FSDP(Failing(2, 2))
        for name, owner in (("size", "Failing"), ("_size", "Failing"), ("nothing", "Failing")):
            with pytest.raises(AttributeError, match=f"'{owner}' object has no attribute '{name}'"):
                getattr(model, name)
        with pytest.raises(AttributeError, match="'FullyShardedDataParallel' object has no attribute '_nothing'"):
            model._nothing  # noqa: B018
        assert model.in_features == 2
        assert not hasattr(model, "_nothing")


CONVERSIONS = {
    "double": lambda model: model.double(),
    "there and back": lambda model: model.double().float(),
    "type": lambda model: model.type(torch.float64),
    "nothing": lambda model: model.float(),
}


def converted(strategy):
    for what, convert in CONVERSIONS.items():
        note(what)
        found = []
        for wrap in (
            lambda module: module,
            lambda module: FSDP(module, sharding_strategy=ShardingStrategy[strategy], use_orig_params=True),
        ):
            torch.manual_seed(1)
            model = wrap(nn.Sequential(wrap(nn.Linear(4, 4)), nn.Linear(4, 4)))
            x = torch.ones(2, 4)
            model(x).sum().backward()
            params = list(model.parameters())
            model(x)  # its result is dropped
            convert(model)
            assert [*map(id, model.parameters())] == [*map(id, params)]
            assert all(isinstance(param, nn.Parameter) for param in params)
            model.zero_grad()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
            model(x.to(params[0].dtype)).sum().backward()
            optimizer.step()
            found.append(model)
        with FSDP.summon_full_params(found[1]):
            for mine, other in zip(found[1].parameters(), found[0].parameters(), strict=True):
                assert torch.allclose(mine, other)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1"])
def test_a_conversion_keeps_the_parameters(strategy):
    simulate_ranks(converted, 2, strategy)
