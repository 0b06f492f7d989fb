"""States that do not fit are refused on every rank, naming parameter and key, and change nothing.

Promises:
- states that do not fit are refused on every rank, naming parameter and key, and change nothing
- an optimizer state that lacks a parameter of a group is loaded with a warning that names it:
  `test_a_parameter_without_state_beside_others_that_have_some_is_named`, `test_checkpoint_warnings.py` (the same name)
"""

import copy
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from fsdp_models import first_rank_warns, full_params, make, wrap_blocks
from gloo import fake_world, note
from simulated_ranks import simulate_ranks
from test_torch_helpers import trained
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictType

from flatparam import FullyShardedDataParallel as FSDP


def refused(call, *said):
    """Fail unless ``call`` is refused with all of ``said`` in its message."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    for words in said:
        assert re.search(words, str(caught.value)), (words, str(caught.value))


def not_alike(uo):
    """What the ranks of one parameter do not have alike cannot be saved."""
    model = wrap_blocks(make(), use_orig_params=uo)
    optimizer = trained(model)
    weight = model.blocks[0].module.inner.bias if uo else model.blocks[0].params[0]
    name = r"`blocks\.0\.inner\.bias`" if uo else r"`blocks\.0\.\w+"
    state, first = optimizer.state[weight], dist.get_rank() == 0
    good = dict(state)
    for key, value, said in (
        ("step", torch.tensor(7.0), "`step`"),
        ("exp_avg", torch.zeros(3, 3, 3), "`exp_avg`"),
        ("exp_avg", good["exp_avg"].double(), "`exp_avg`"),
        ("more", "text", "`more`"),
    ):
        note(f"{uo} {key}")
        if first:
            state[key] = value
        for save in (FSDP.full_optim_state_dict, FSDP.sharded_optim_state_dict):
            refused(lambda save=save: save(model, optimizer), said, name)
        state.clear()
        state.update(good)
    if first:
        del optimizer.state[weight]
    with pytest.raises(RuntimeError, match="has none"):
        FSDP.full_optim_state_dict(model, optimizer)


def not_fitting(uo):
    """What does not fit is refused, and nothing is loaded."""
    model = wrap_blocks(make(), use_orig_params=uo)
    optimizer = trained(model)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    before, params = copy.deepcopy(optimizer.state_dict()), full_params(model)

    def changed(name, key, value):
        state = copy.deepcopy(full)
        state["state"][name][key] = value
        return state

    bad = changed("blocks.1.outer.weight", "exp_avg", torch.zeros(4, 11))
    refused(
        lambda: FSDP.shard_full_optim_state_dict(bad, model, optim=optimizer),
        "`exp_avg`",
        r"`blocks\.1\.outer\.weight`",
    )
    given = bad if dist.get_rank() == 0 else None
    refused(lambda: FSDP.scatter_full_optim_state_dict(given, model, optim=optimizer), "`exp_avg`")
    refused(lambda: FSDP.scatter_full_optim_state_dict(None, model, optim=optimizer), "rank 0 has no")
    less = copy.deepcopy(full)
    less["param_groups"][0]["params"].remove("last.weight")
    if uo:
        refused(lambda: FSDP.shard_full_optim_state_dict(less, model, optim=optimizer), r"`last\.weight`", "group 0")
    else:
        bad = changed("blocks.0.scale", "step", torch.tensor(9.0))
        refused(lambda: FSDP.shard_full_optim_state_dict(bad, model, optim=optimizer), "`step`", r"`blocks\.0\.scale`")
    mixed = {"state": {0: {}, "first.weight": {}}, "param_groups": []}
    refused(lambda: FSDP.rekey_optim_state_dict(mixed, OptimStateKeyType.PARAM_ID, make()), "names or numbers")
    named = {"state": {"nowhere": {}}}
    refused(lambda: FSDP.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, make()), "nowhere")
    with first_rank_warns("'elsewhere'"):
        more = FSDP.shard_full_optim_state_dict(
            {**full, "state": {**full["state"], "elsewhere": {"a": 1}}}, model, optim=optimizer
        )
    assert more["state"]["elsewhere"] == {"a": 1}

    # rows of one rank alone that do not fit
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        rows, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        wrong = {**rows, "first.weight": rows["first.bias"]} if dist.get_rank() else rows
        with pytest.raises(RuntimeError, match=r"nothing was loaded: rank 1: .*first\.weight"):
            model.load_state_dict(wrong)
        if dist.get_rank():
            del states["state"]["first.weight"]["exp_avg"]
        with pytest.raises(RuntimeError, match=r"rank 1: .*exp_avg of first\.weight"):
            FSDP.optim_state_dict_to_load(model, optimizer, states)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        local = model.state_dict()
        local["_flat_param"] = local["blocks.0._flat_param"]
        with pytest.raises(RuntimeError, match="`_flat_param` has"):
            model.load_state_dict(local)
    after = optimizer.state_dict()
    assert str(after) == str(before)
    assert all(torch.equal(value, params[name]) for name, value in full_params(model).items())


@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("check", [not_alike, not_fitting])
def test_bad_states(check, uo):
    simulate_ranks(check, 2, uo)


@pytest.mark.parametrize("uo", [False, True])
def test_a_parameter_without_state_beside_others_that_have_some_is_named(uo):
    """A whole state loads without a word; one that lacks a parameter, or its whole unit's, is told."""
    with fake_world():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one rank shards nothing
            model = FSDP(nn.Sequential(FSDP(nn.Linear(2, 3), use_orig_params=uo), nn.Linear(3, 1)), use_orig_params=uo)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        state = FSDP.full_optim_state_dict(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            FSDP.optim_state_dict_to_load(model, optimizer, copy.deepcopy(state))
        for name in ("0.weight", "0.bias"):
            state["state"].pop(name)
        with pytest.warns(
            UserWarning, match="has nothing for `0.weight`, `0.bias`, and has `1.weight` of the same par"
        ):
            FSDP.optim_state_dict_to_load(model, optimizer, copy.deepcopy(state))
        state["state"] = {}  # of an optimizer that has not stepped
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            FSDP.optim_state_dict_to_load(model, optimizer, copy.deepcopy(state))
