"""Warnings about something that all ranks do alike: one a model, not one a unit and rank, and at the user's line."""

import contextlib
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Block, make
from gloo import fake_world, run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.common.warned import warn_user

BLOCKS = ModuleWrapPolicy({Block})


@contextlib.contextmanager
def warned():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        told = []
        yield told
    told += [(str(one.message), one.filename == __file__) for one in found]


def padded():
    FSDP(
        nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3))),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        atomic=torch.Tensor.numel,
    )


def in_full_precision():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    FSDP(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=MixedPrecision(torch.bfloat16))


def of_one_rank():
    FSDP(make(), process_group=dist.new_group([dist.get_rank()]), auto_wrap_policy=BLOCKS)


def with_hooks():
    module = make()
    for param in module.parameters():
        param.register_hook(lambda grad: grad)
    FSDP(module, auto_wrap_policy=BLOCKS)


def states():
    model = FSDP(make(), auto_wrap_policy=BLOCKS, sharding_strategy=ShardingStrategy.NO_SHARD)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.state_dict()


def summoned():
    model = FSDP(make(), auto_wrap_policy=BLOCKS)
    with FSDP.summon_full_params(model, offload_to_cpu=True, writeback=False):
        pass


FIRST = [  # (program, its one warning)
    (padded, r"is padding: .* \(and 2 more of this kind\)$"),
    (in_full_precision, r"mixed precision is off for modules of \['BatchNorm1d'\]"),
    (of_one_rank, r"FSDP is switching to use `NO_SHARD` instead of .* \(and 3 more of this kind\)$"),
    (with_hooks, r"hooks of `.*` are not called, .* \(and \d+ more of this kind\)$"),
    (states, r"is not sharded: its state dict is whole.* \(and 3 more of this kind\)$"),
    (summoned, r"summon_full_params\(offload_to_cpu=True\) without rank0_only=True"),
]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("program", "expected"), FIRST, ids=[program.__name__ for program, _ in FIRST])
def test_the_first_rank_warns_once(program, expected, rank):
    with fake_world(8, rank=rank), warned() as told:
        program()
    assert len(told) == (rank == 0), told
    for text, is_here in told:
        assert re.search(expected, text)
        assert is_here


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_without_gradients_is_named(rank):
    """As torch's class does it."""
    with fake_world(2, rank=rank), warned() as told:
        FSDP(make()).clip_grad_norm_(1.0)
    [(text, is_here)] = told
    assert text.startswith(f"clip_grad_norm_() was called on rank {rank} with no gradients")
    assert is_here


@pytest.mark.parametrize("rank", [0, 1])
def test_a_launcher_tells_which_rank_is_the_first_before_there_are_groups(rank, monkeypatch):
    monkeypatch.setenv("RANK", str(rank))
    with warned() as told:
        warn_user("of all ranks")
    assert told == [("of all ranks", True)][rank:]


def of_each_rank():
    group = [dist.new_group([0]), dist.new_group([1, 2])][min(dist.get_rank(), 1)]  # rank 0 warns of its own group only
    with warned() as told:
        FSDP(make(dist.get_rank()), auto_wrap_policy=BLOCKS, process_group=group)
    return [text for text, is_here in told if "has other values" in text and is_here]


@pytest.mark.multiprocess
def test_the_first_rank_of_a_group_warns_of_values_that_differ():
    none, [text], nothing = run_ranks(of_each_rank, 3)
    assert none == nothing == []
    assert "has other values on rank 2 than on rank 1" in text
    assert text.endswith("(and 3 more of this kind)")


def with_an_error_after_it():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[0].weight.requires_grad_(False)
    module[1].bias = module[0].bias
    with pytest.raises(ValueError, match="is shared with"):
        FSDP(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)


def test_a_warning_may_explain_an_error():
    with fake_world(2), warned() as told:
        with_an_error_after_it()
    [(text, is_here)] = told
    assert "have frozen parameters beside those that train" in text
    assert is_here
    with fake_world(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        with_an_error_after_it()


def of_other_depths():
    module = make(blocks=3 - dist.get_rank())
    with pytest.raises(ValueError, match="built different units") as caught:
        FSDP(module, auto_wrap_policy=BLOCKS)
    return str(caught.value)


@pytest.mark.multiprocess
def test_an_error_of_ranks_with_other_models_has_the_counts_of_units():
    for text in run_ranks(of_other_depths, 2):
        assert text == (
            "the ranks have built different units: rank 0 has the unit of Block at `blocks.2`, rank 1 has the "
            "unit of Model. "
            "Rank 0 builds 4 units (3 of Block, 1 of Model), rank 1 3 units (2 of Block, 1 of Model)"
        )
