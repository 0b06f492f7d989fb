"""Names and argument orders of torch 1.12's wrapper that users still have: all but those of state dicts.

Promises:
- names of torch 1.12 and its order of arguments
"""

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from fsdp_models import Averaged, Block, assert_same, data, full_params, loss_of, make, wrap_blocks
from simulated_ranks import simulate_ranks
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import flatparam
from flatparam import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, TrainingState, TrainingState_
from flatparam import FullyShardedDataParallel as FSDP


def policy(module, recurse, unwrapped_params):
    return recurse or isinstance(module, Block)


def step(model):
    module = make()
    loss_of(model, data(0)).backward()
    Averaged(module, 2).backward(lambda rank: [data(0, rank)])
    for one in (model, module):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        one.zero_grad()
    assert_same(model, module)


def old_names():
    world, cpu = dist.group.WORLD, torch.device("cpu")
    # every argument of 1.12 in its order, then those of 2.13 behind them
    first = (world, ShardingStrategy.FULL_SHARD, CPUOffload(False), policy, None, MixedPrecision(), [], None, cpu, True)
    more = (False, True, True, None, None)
    for arguments in (first, (*first[:6], None, *first[7:], *more)):
        model = FSDP(make(), *arguments)
        assert len(FSDP.fsdp_modules(model)) == 4
        assert FSDP.fsdp_modules(model, True) == [model]
        assert model.backward_prefetch is None
        assert model.device_id == cpu
        step(model)
    assert FSDP(make()).device_id is None

    model = wrap_blocks(make())
    block = model.blocks[0]
    total = sum(param.numel() for param in make().blocks[0].parameters())
    assert block.numel_padded_per_param == [total % 2 if dist.get_rank() else 0]
    assert (block.gradient_predivide_factor, block.gradient_postdivide_factor) == (2.0, 1.0)
    assert model.reshard_after_forward is True
    assert wrap_blocks(make(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP).reshard_after_forward is False
    assert model.params_with_grad == []
    loss_of(model, data(0)).backward()
    assert model.params_with_grad == list(model.parameters())
    assert block.params_with_grad == block.params
    model.zero_grad()

    wanted = dict(make().named_parameters())
    with model._summon_full_params():
        assert {name: param.shape for name, param in model.named_parameters()} == {
            n: p.shape for n, p in wanted.items()
        }
    with model._summon_full_params(False, False, False, False):
        assert model.first.weight.shape == wanted["first.weight"].shape
        assert len(model.blocks[0].params) == len(list(model.blocks[0].parameters())) == 1
        model.first.weight.data.zero_()
    assert torch.equal(full_params(model)["first.weight"], wanted["first.weight"])
    with FSDP.summon_full_params(model, True, True, False, False):
        model.first.weight.data.zero_()
    assert not full_params(model)["first.weight"].any()
    with pytest.raises(ValueError, match="writeback"), model._summon_full_params(rank0_only=True):
        pass
    loss_of(model, data(0)).backward()
    assert model.clip_grad_norm_(0.5, 2.0) > 0

    # states of 1.12 are those of today that they are part of
    seen = []
    model.blocks[0].inner.register_forward_hook(lambda *args: seen.append(model.training_state))
    assert model.training_state == TrainingState_.IDLE
    assert TrainingState_.IDLE != TrainingState_.FORWARD != TrainingState_.BACKWARD_PRE
    loss_of(model, data(0))
    assert seen == [TrainingState_.FORWARD]
    assert seen[0] in {TrainingState_.FORWARD}
    assert seen[0] != TrainingState_.IDLE
    with model._summon_full_params():
        assert model.training_state == TrainingState_.SUMMON_FULL_PARAMS
        assert model.training_state == TrainingState.SUMMON_FULL_PARAMS


@pytest.mark.multiprocess
def test_old_names_and_orders_of_arguments():
    simulate_ranks(old_names, 2)


def test_the_constructor_takes_torch_s_arguments_in_torch_s_order():
    theirs = list(inspect.signature(torchs.FullyShardedDataParallel.__init__).parameters.values())
    ours = list(inspect.signature(FSDP.__init__).parameters.values())
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    assert [p.default for p in ours[: len(theirs)]] == [p.default for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])
    for name in ("summon_full_params", "fsdp_modules", "clip_grad_norm_", "no_sync", "apply", "register_comm_hook"):
        theirs, ours = (inspect.signature(getattr(cls, name)) for cls in (torchs.FullyShardedDataParallel, FSDP))
        ours = [("self" if p.name == "wrapper" else p.name, p.default) for p in ours.parameters.values()]
        assert ours[: len(theirs.parameters)] == [(p.name, p.default) for p in theirs.parameters.values()], name


def test_names_that_are_torch_s_own():
    from torch.distributed.fsdp import _common_utils, fully_sharded_data_parallel, wrap

    for name in (
        "always_wrap_policy",
        "transformer_auto_wrap_policy",
        "size_based_auto_wrap_policy",
        "lambda_auto_wrap_policy",
        "CustomPolicy",
        "enable_wrap",
        "wrap",
    ):
        assert getattr(flatparam, name) is getattr(wrap, name)
    assert issubclass(flatparam.ModuleWrapPolicy, wrap.ModuleWrapPolicy)  # which takes one class, too
    for name in ("TrainingState", "HandleTrainingState"):
        assert getattr(flatparam, name) is getattr(_common_utils, name)
    for name in ("FSDP_PREFIX", "FSDP_WRAPPED_MODULE"):
        assert getattr(flatparam, name) == getattr(_common_utils, name)
    assert flatparam.FLAT_PARAM == fully_sharded_data_parallel.FLAT_PARAM
    for name in (
        "BackwardPrefetch",
        "CPUOffload",
        "MixedPrecision",
        "StateDictType",
        "OptimStateKeyType",
        "FlatParameter",
    ):
        assert getattr(flatparam, name) is getattr(torchs, name)
    assert flatparam.ShardedGradScaler is ShardedGradScaler
    assert BackwardPrefetch.BACKWARD_PRE is torchs.BackwardPrefetch.BACKWARD_PRE
    assert flatparam.ShardingStrategy.FULL_SHARD == torchs.ShardingStrategy.FULL_SHARD
    name = "_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module.weight"
    assert flatparam.clean_tensor_name(name) == _common_utils.clean_tensor_name(name) == "blocks.0.weight"


def test_p_assert_prints_and_raises(capsys):
    flatparam.p_assert(1 < 2, "never seen")
    with pytest.raises(AssertionError, match="what went wrong"):
        flatparam.p_assert([], "what went wrong")
    assert "what went wrong" in capsys.readouterr().out
