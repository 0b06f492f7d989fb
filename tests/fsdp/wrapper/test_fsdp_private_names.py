"""Private names of torch's class that trainers read, set and call, on the runtime: the list of docs/integrations.md.

The oracle is torch's class where it can do it, else the same training without it.

Promises:
- private names of torch's class that trainers read, set and call work, for the list of docs/integrations.md; the error
  for any other name says what to use instead
"""

import importlib
import operator
import re
from pathlib import Path

import pytest
import torch
from fsdp_models import data, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from torch.distributed.fsdp import FlatParameter
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP
from torch.distributed.fsdp._common_utils import _get_module_fsdp_state_if_fully_sharded_module
from torch.distributed.fsdp._runtime_utils import _lazy_init
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.fsdp.wrapper.absent_names import why_absent

PAGE = Path(__file__).parents[3] / "docs" / "integrations.md"


def listed_names():
    """The names in the table of docs/integrations.md, without what follows them."""
    section = PAGE.read_text().split("## Private names")[1]
    rows = [row.split("|") for row in section.splitlines() if row.startswith("| ")]
    return [name for row in rows[1:] for name in re.findall(r"`([\w.]+)`", row[2])]


def theirs(module):
    policy = ModuleWrapPolicy({type(module.blocks[0])})
    return TorchsFSDP(module, device_id=torch.device("cpu"), auto_wrap_policy=policy)


def found_by_name(model, name):
    """What a program gets by a name of the list, from a unit or from torch."""
    if name.startswith("torch."):
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)
    return operator.attrgetter(name)(model)


def every_listed_name():
    """Those of the list are there, as in torch's class."""
    model, torchs = wrap_blocks(make()), theirs(make())
    for wrapped in (model, torchs):
        loss_of(wrapped, data(0)).backward()
    names = listed_names()
    assert len(names) > 12
    for name in names:
        note(name)
        found, expected = found_by_name(model, name), found_by_name(torchs, name)
        assert callable(found) == callable(expected)
    for module in model.modules():
        assert _get_module_fsdp_state_if_fully_sharded_module(module) is None


def other_names():
    """What torch's class and handle have beside that: to read or set it is an error that names a way out."""
    model, torchs = wrap_blocks(make()), theirs(make())
    for wrapped in (model, torchs):
        loss_of(wrapped, data(0)).backward()
    missing = 0
    for ours, other, of_handle in ((model, torchs, False), (model._handle, torchs._handle, True)):
        names = set(dir(other)) - set(dir(torch.nn.Module()))
        for name in sorted(name for name in names if name.startswith("_") and not name.startswith("__")):
            if hasattr(ours, name):
                continue
            missing += 1
            with pytest.raises(AttributeError, match=rf"`{name}` is a name inside of torch's .*runtime has not: .*\w"):
                getattr(ours, name)
            if of_handle or name in vars(other):
                with pytest.raises(AttributeError, match=f"cannot set `{name}`"):
                    setattr(ours, name, 1)
    assert missing > 60
    for name in ("_handle", "_flat_param", "_all_handles"):
        with pytest.raises(AttributeError):
            setattr(model, name, None)
    with pytest.raises(AttributeError, match="cannot set `flat_param` of flatparam's handle"):
        model._handle.flat_param = None
    with pytest.raises(AttributeError, match="has no attribute `of_nobody`"):
        _ = model._handle.of_nobody
    assert why_absent("of_nobody") is None
    assert "no_sync" in why_absent("_sync_gradients")


def grads(model):
    return [param.grad for param in model.parameters() if param.grad is not None]


def resharded(uo):
    """verl's EngineEvalModeCtx; and in the middle of a step, where torch's class gathers again too."""
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        ways = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
        for between in (False, True):
            note(f"{strategy} {between}")
            model, expected = wrap_blocks(make(), **ways), wrap_blocks(make(), **ways)
            model.eval()
            with torch.no_grad():
                model(data(1))
            for handle in model._all_handles:
                handle.reshard(True)
            model.train()
            loss = loss_of(model, data(0))
            for handle in model._all_handles if between else ():
                handle.reshard(True)
                handle.reshard(False)
            loss.backward()
            loss_of(expected, data(0)).backward()
            for one, other in zip(grads(model), grads(expected), strict=True):
                assert torch.equal(one, other)
    inside = []
    model.blocks[0].module.register_forward_pre_hook(lambda *ignored: inside.append(model._handle))

    def in_the_middle(*ignored):
        with pytest.raises(RuntimeError, match=r"reshard: the unit of Model is expected to be in states IDLE"):
            model._handle.reshard(True)

    model.blocks[0].module.register_forward_pre_hook(in_the_middle)
    loss_of(model, data(0)).backward()
    assert inside


def summoned_alone():
    """verl's layered_summon_lora_params: each unit is made a root, summoned, and made another's again."""
    whole = make().state_dict()
    model = wrap_blocks(make())
    loss_of(model, data(0)).backward()
    for i, block in enumerate(model.blocks):
        assert not block._is_root
        block._is_root = True
        assert block._is_root
        with FSDP.summon_full_params(block, writeback=False):
            for name, param in block.named_parameters():
                assert torch.equal(param, whole[f"blocks.{i}.{name}"])
        block._is_root = False
        assert not block._is_root
    model.blocks[0]._is_root = True
    model.blocks[0]._is_root = None
    assert not model.blocks[0]._is_root
    with pytest.raises(RuntimeError, match=r"the unit of Model is in no other unit, so it is the root"):
        model._is_root = False
    model._is_root = True
    expected = wrap_blocks(make())
    for wrapped in (model, expected):
        for param in wrapped.parameters():
            param.grad = None
        loss_of(wrapped, data(1)).backward()
    for one, other in zip(grads(model), grads(expected), strict=True):
        assert torch.equal(one, other)


def local_checkpoint():
    """OLMo's LocalShardedCheckpointer: shards and what describes them, read and copied back."""
    model, torchs = wrap_blocks(make()), theirs(make())
    keys = ("_fqns", "_numels", "_numels_with_padding", "_shapes", "_shard_numel_padded", "_shard_param_infos")
    for wrapped in (model, torchs):
        _lazy_init(wrapped, wrapped)
    saved = []
    for unit, other in zip(FSDP.fsdp_modules(model), TorchsFSDP.fsdp_modules(torchs), strict=True):
        flat, expected = unit._handle.flat_param, other._handle.flat_param
        assert isinstance(flat, FlatParameter)
        for key in keys:
            mine, wanted = getattr(flat, key), getattr(expected, key)
            assert mine == wanted if isinstance(mine, int) else list(mine) == list(wanted), key  # torch has lists too
        saved.append(flat.detach().clone())
    loss = loss_of(model, data(0))
    with torch.no_grad():
        for handle, values in zip(model._all_handles, saved, strict=True):
            handle.flat_param.zero_()
            assert not loss_is(model, loss)
            handle.flat_param.copy_(values)
    assert loss_is(model, loss)


def loss_is(model, expected):
    with torch.no_grad():
        return torch.equal(loss_of(model, data(0)), expected)


@pytest.mark.multiprocess
def test_the_list_is_there():
    run_ranks(every_listed_name, 2)


@pytest.mark.multiprocess
def test_other_names_say_what_to_do():
    run_ranks(other_names, 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
def test_units_are_resharded_by_their_handle(uo):
    run_ranks(resharded, 2, uo)


@pytest.mark.multiprocess
def test_a_unit_is_summoned_as_a_root():
    run_ranks(summoned_alone, 2)


@pytest.mark.multiprocess
def test_shards_are_saved_by_their_handle():
    run_ranks(local_checkpoint, 2)
