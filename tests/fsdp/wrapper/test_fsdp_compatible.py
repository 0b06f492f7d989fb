"""Attributes of torch's class beside its API that tools read. The oracle is torch's class on the same model.

Promises:
- attributes of torch's class beside its API, which tools read, have torch's values
- units cast the inputs that torch's class casts, with each setting: `test_inputs_are_cast_as_torchs`
"""

import copy
import functools
import itertools

import pytest
import torch
from fsdp_models import data, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, TrainingState
from flatparam.fsdp.interop.patches import refuse_shards

FLAT = (
    *("_fqns", "_num_params", "_shapes", "_strides", "_contiguities", "_numels", "_numels_with_padding"),
    *("_is_padding_mask", "_shard_param_infos", "_shard_numel_padded", "_unpadded_unsharded_size", "_sharded_size"),
)
HANDLE = (
    *("uses_sharded_strategy", "rank", "world_size", "device", "_use_orig_params", "_offload_params"),
    *("_sharding_strategy", "_orig_param_dtype", "_fwd_bwd_param_dtype", "_reduce_dtype", "_training_state"),
)
LOW = MixedPrecision(param_dtype=torch.bfloat16)


def theirs(module, **settings):
    policy = ModuleWrapPolicy({type(module.blocks[0])})
    return TorchsFSDP(module, device_id=torch.device("cpu"), auto_wrap_policy=policy, **settings)


def plain(value):
    """torch has lists where its annotations say tuples."""
    return tuple(value) if isinstance(value, list | tuple) else value


def unpadded(values):
    """torch's flat parameters as ours, whose padding is zeros: no weight here is 42, or the half of it."""
    return values.detach().where((values != 42) & (values != 21), 0)


def same(units, others):
    for unit, other in zip(units, others, strict=True):
        assert unit._has_params == other._has_params
        mine, expected = unit._flat_param, other._flat_param
        for name in FLAT if unit._handle.uses_sharded_strategy else FLAT[:6]:  # torch's pads for shards that are not
            assert plain(getattr(mine, name)) == plain(getattr(expected, name)), name
        if unit._handle.uses_sharded_strategy:
            assert torch.equal(mine._local_shard, unpadded(expected))
        assert mine._local_shard.data_ptr() == mine.data_ptr()
        for name in HANDLE:
            assert getattr(unit._handle, name) == getattr(other._handle, name), name
        assert tuple(unit._handle.shard_metadata()) == tuple(other._handle.shard_metadata())
        assert unit._handle.is_sharded(mine) == other._handle.is_sharded(expected)
        assert unit.forward_prefetch == other.forward_prefetch
        unit._assert_state(TrainingState.IDLE)
        with pytest.raises(ValueError, match=r"expected the unit of .* to be in"):
            unit._assert_state([TrainingState.FORWARD_BACKWARD])


def attributes():
    """Those of every unit are torch's, before a step, after it, of a copy, and of a model that was moved."""
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for strategy, uo, mixed in itertools.product(strategies, (False, True), (None, LOW)):
        note(f"{strategy} {uo} {mixed}")
        settings = {"use_orig_params": uo, "mixed_precision": mixed}
        model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], **settings)
        torchs = theirs(make(), sharding_strategy=TorchStrategy[strategy], **settings)
        units, others = FSDP.fsdp_modules(model), TorchsFSDP.fsdp_modules(torchs)
        same(units, others)
        assert len(model._all_handles) == len(units)
        assert model._handle == model._handle
        assert model._handle != model.blocks[0]._handle
        for wrapped in (model, torchs):
            loss_of(wrapped, data(0)).backward()
        same(units, others)
        for unit, other in zip(units, others, strict=True):
            if not uo:
                assert torch.equal(unit._handle.sharded_grad, other._handle.flat_param.grad)
        same(FSDP.fsdp_modules(copy.deepcopy(model)), others)
        for unit in FSDP.fsdp_modules(model.double()):
            assert unit._handle._orig_param_dtype == torch.float64
            assert unit._flat_param._local_shard.data_ptr() == unit._flat_param.data_ptr()


def gathered():
    """In the forward of a unit ``params`` are unsharded, in the dtype of computation; outside they are the shards."""
    model = wrap_blocks(make(), mixed_precision=LOW)
    seen = []

    def look(module, args):
        [param] = model.blocks[0].params
        seen.append((param.numel(), param.dtype, param.data_ptr() != param._local_shard.data_ptr()))
        assert param._mp_shard.untyped_storage().size() == 0

    model.blocks[0].module.register_forward_pre_hook(look)
    loss_of(model, data(0)).backward()
    torchs = theirs(make(), mixed_precision=LOW)
    inner = torchs.blocks[0].module
    handle = torchs.blocks[0]._handle
    inner.register_forward_pre_hook(lambda *ignored: seen.append((handle.flat_param.numel(), handle.flat_param.dtype)))
    loss_of(torchs, data(0)).backward()
    assert seen == [(*seen[1], True), seen[1]]
    for unit in FSDP.fsdp_modules(model):
        assert unit.params[0] is unit._flat_param
    hook = object()
    assert model._comm_hook is model._comm_hook_state is None
    other = wrap_blocks(make())
    other.register_comm_hook(hook, print)
    assert all((unit._comm_hook, unit._comm_hook_state) == (print, hook) for unit in FSDP.fsdp_modules(other))
    model._handle.flat_param_to("cpu")
    with pytest.raises(ValueError, match=r"the unit of Model would lose the values of parameter `first.weight`"):
        model._handle.flat_param_to("meta")
    assert model.blocks[0]._unshard() is None
    model.blocks[0]._unshard(async_op=True).wait()
    model._wait_unshard_streams_on_current_stream()


class Seeing(nn.Module):
    """Keeps the dtype of its input; computes in the dtype of its parameter, if it has one."""

    def __init__(self, inner=None, has_param=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3)) if has_param else None
        self.inner = inner
        self.seen = None

    def forward(self, x, factor):
        self.seen = x.dtype, factor.dtype
        if self.weight is not None:
            x = self.weight * x
        x = x.float()  # the parameters are in bf16, so `inner.seen` shows whether the unit of `inner` casts its input
        return x if self.inner is None else self.inner(x, factor=factor.float())


def dtypes_seen(wrap, of_inner, of_root, has_params):
    """The dtypes that the modules of a tree see, from the outermost one on. ``wrap``: a class of a wrapper."""
    mixed = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=of_inner, cast_root_forward_inputs=of_root)
    modules, model = [], None
    for has_param in reversed(has_params):
        modules.insert(0, Seeing(model, has_param))
        model = wrap(modules[0], mixed_precision=mixed)
    for _ in range(2):
        model(torch.ones(2, 3), factor=torch.ones(1, dtype=torch.float64))
    return [module.seen for module in modules]


def casts():
    """The root casts its inputs if either setting is on, other units if ``cast_forward_inputs`` is: as torch."""
    torchs = functools.partial(TorchsFSDP, device_id=torch.device("cpu"))
    for of_inner, of_root in itertools.product((False, True), repeat=2):
        for has_params in ((True,), (True, True), (False, True), (True, False, True)):
            note(f"{of_inner} {of_root} {has_params}")
            expected = dtypes_seen(torchs, of_inner, of_root, has_params)
            assert dtypes_seen(FSDP, of_inner, of_root, has_params) == expected


def summoned():
    """Inside of summon_full_params the flat parameters are whole, as torch's are, where they are shown."""
    settings = [("FULL_SHARD", False), ("FULL_SHARD", True), ("NO_SHARD", False)]  # torch pads NO_SHARD with True
    for (strategy, uo), rank0_only in itertools.product(settings, (False, True)):
        note(f"{strategy} {uo} {rank0_only}")
        model = wrap_blocks(make(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        torchs = theirs(make(), sharding_strategy=TorchStrategy[strategy], use_orig_params=uo)
        flags = {"rank0_only": rank0_only, "writeback": not rank0_only}
        pairs = list(zip(FSDP.fsdp_modules(model), TorchsFSDP.fsdp_modules(torchs), strict=True))
        before = [unit._flat_param for unit, _ in pairs]
        with FSDP.summon_full_params(model, **flags), TorchsFSDP.summon_full_params(torchs, **flags):
            refuse_shards(dict(model.named_parameters()))  # before they are saved: there are none
            for (unit, other), flat in zip(pairs, before, strict=True):
                expected = other._handle.flat_param
                assert unit._flat_param is flat
                for flat in (unit._handle.flat_param, unit._flat_param, *unit.params):
                    assert [flat.shape, flat._fqns] == [expected.shape, tuple(expected._fqns)]
                    assert torch.equal(flat, unpadded(expected))
                for written in (flat, expected):
                    written.detach().mul_(0.5)
        for (unit, other), flat in zip(pairs, before, strict=True):
            assert unit._flat_param is flat
            assert torch.equal(flat, unpadded(other._flat_param))
        for wrapped in (model, torchs):
            loss_of(wrapped, data(0)).backward()
        for param, expected in zip(model.parameters(), torchs.parameters(), strict=True):
            assert (param.grad is None) is (expected.grad is None)
            assert param.grad is None or torch.equal(param.grad, expected.grad)


def written_and_not_kept(uo):
    """With NO_SHARD and without writeback, writes stay, unless parameters are offloaded: as with torch's class."""
    for offload in (False, True):
        found = []
        for wrapper, arguments in ((FSDP, {}), (TorchsFSDP, {"device_id": torch.device("cpu")})):
            arguments["cpu_offload"] = CPUOffload(offload_params=offload)
            model = wrap_blocks(
                make(), wrapper, sharding_strategy=TorchStrategy.NO_SHARD, use_orig_params=uo, **arguments
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # torch's class pins, as on a GPU
                with wrapper.summon_full_params(model, writeback=False), torch.no_grad():
                    for param in model.parameters():
                        param.zero_()
            found.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
        assert torch.equal(*found)
        assert found[0].any() == offload


@pytest.mark.multiprocess
def test_attributes_are_torchs():
    run_ranks(attributes, 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
def test_writes_without_writeback_where_nothing_is_sharded(uo):
    run_ranks(written_and_not_kept, 2, uo)


@pytest.mark.multiprocess
def test_flat_parameters_are_whole_where_they_are_summoned():
    run_ranks(summoned, 2)


@pytest.mark.multiprocess
def test_params_are_what_is_there():
    run_ranks(gathered, 2)


@pytest.mark.multiprocess
def test_inputs_are_cast_as_torchs():
    run_ranks(casts, 2)
