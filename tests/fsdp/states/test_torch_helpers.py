"""torch.distributed.checkpoint and its helpers for state dicts. The oracles: an unsharded module, torch's FSDP1.

Promises:
- torch's helpers return the same as for torch's class, with every option; distributed checkpoints load into an
  unsharded module
"""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import assert_same, data, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from pairs import pairwise
from simulated_ranks import simulate_ranks
from test_model_states import local, theirs
from test_optimizer_states import equal
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy


def trained(model, steps=2):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        loss_of(model, data(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def alike(one, other, path=""):
    """Fail unless two states have the same keys and, on this rank, the same values."""
    if isinstance(one, dict):
        assert set(one) == set(other), (path, set(one) ^ set(other))
        for key in one:
            alike(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        pairs = (
            zip(sorted(one), sorted(other), strict=True) if path.endswith("params") else zip(one, other, strict=True)
        )
        for a, b in pairs:
            alike(a, b, path)
    else:
        assert type(one) is type(other), (path, type(one), type(other))
        assert equal(local(one), local(other)), (path, one, other)


KINDS = {  # full_state_dict, broadcast_from_rank0
    "sharded": (False, False),
    "full": (True, False),
    "broadcast": (True, True),
}
FACTORS = {
    "uo": (False, True),
    "meshed": (False, True),
    "kind": tuple(KINDS),
    "cpu_offload": (False, True),
    "flatten_optimizer_state_dict": (False, True),
}
EVERY = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
# And in every pair what torch's class can be asked for: see below
OF_TORCH = pairwise({**FACTORS, "uo": (False,), "cpu_offload": (False,)})


def built(case):
    return case["uo"], case["meshed"]


def helpers(cases):
    for (uo, meshed), settings in itertools.groupby(sorted(cases, key=built), built):
        of_one_model(uo, meshed, settings)


def of_one_model(uo, meshed, cases):
    settings = {"use_orig_params": uo, **({"device_mesh": init_device_mesh("cpu", (2,))} if meshed else {})}
    ours, torchs = wrap_blocks(make(), **settings), theirs(make(), **settings)
    optimizer, torchs_optimizer = trained(ours), trained(torchs)
    for case in cases:
        full, broadcast = KINDS[case["kind"]]
        rest = {name: case[name] for name in ("cpu_offload", "flatten_optimizer_state_dict")}
        options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast, **rest)
        note(f"uo={uo} mesh={meshed} {options}")
        model_state, optim_state = get_state_dict(ours, optimizer, options=options)
        alike(model_state, get_model_state_dict(ours, options=options))
        alike(optim_state, get_optimizer_state_dict(ours, optimizer, options=options))
        theirs_model = torchs_optim = None
        # torch's class frees what it offloads on a host, and mixes the states of a parameter up
        if not options.cpu_offload:
            theirs_model = get_model_state_dict(torchs, options=options)
            alike(model_state, theirs_model)
            if not uo:
                torchs_optim = get_optimizer_state_dict(torchs, torchs_optimizer, options=options)
                alike(optim_state, torchs_optim)
        others = [(model_state, optim_state), (theirs_model or model_state, torchs_optim or optim_state)]
        for given_model, given_optim in others:
            if options.cpu_offload and options.full_state_dict and not options.broadcast_from_rank0 and dist.get_rank():
                assert given_model == {}
            other = wrap_blocks(make(seed=4), **settings)
            other_optimizer = torch.optim.Adam(other.parameters(), lr=0.5)
            if not (options.cpu_offload and options.full_state_dict) or options.broadcast_from_rank0:
                set_model_state_dict(other, dict(given_model), options=options)
                set_optimizer_state_dict(other, other_optimizer, dict(given_optim), options=options)
                found = FSDP.full_optim_state_dict(other, other_optimizer, rank0_only=False)
                alike(found, FSDP.full_optim_state_dict(ours, optimizer, rank0_only=False))
                alike(dict(other.state_dict()), dict(ours.state_dict()))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "cases", [[*pairwise(FACTORS), *OF_TORCH], pytest.param(EVERY, marks=pytest.mark.thorough)], ids=len
)
def test_helpers_give_what_torchs_class_gives(cases):
    run_ranks(helpers, 2, cases)


def asked_for():
    """What is asked of ShardedTensors through Python, which takes 0.1 ms each, while they are loaded."""
    model = wrap_blocks(make(), use_orig_params=True)
    optimizer = trained(model)
    states = get_state_dict(model, optimizer)
    asked, original = [], ShardedTensor.__torch_function__.__func__

    def noting(cls, function, types, args=(), kwargs=None):
        asked.append(function.__name__)
        return original(cls, function, types, args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedTensor, "__torch_function__", classmethod(noting))
        assert all(isinstance(value, ShardedTensor) and value.size() for value in states[0].values())
        assert asked == ["size"] * len(states[0])
        asked.clear()
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        return asked


@pytest.mark.multiprocess
def test_states_are_loaded_without_asking_sharded_tensors_for_shapes_one_by_one():
    assert run_ranks(asked_for, 2) == [[], []]


def saved_and_loaded(strategy, uo, meshed, folder):
    """By dcp: saved and loaded, also asynchronously, and into an unsharded module."""
    note(f"{strategy} {uo}")
    settings = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
    if meshed and dist.get_world_size() == 2:
        settings["device_mesh"] = init_device_mesh("cpu", (2,))
    elif meshed:
        settings["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    model = wrap_blocks(make(), **settings)
    optimizer = trained(model)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    # torch loses optimizer states in a ShardedTensor of which a rank has no rows, unless they are flattened
    options = StateDictOptions(flatten_optimizer_state_dict=not meshed)
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=f"{folder}/{strategy}{uo}")
    places = [f"{folder}/{strategy}{uo}"]
    if meshed:  # torch cannot copy a ShardedTensor for it
        places.append(places[0] + " asynchronously")
        dcp.async_save({"model": model_state, "optim": optim_state}, checkpoint_id=places[1]).result()
    for where in places:
        other = wrap_blocks(make(seed=3), **settings)
        other_optimizer = torch.optim.Adam(other.parameters(), lr=0.5)
        state = dict(zip(("model", "optim"), get_state_dict(other, other_optimizer, options=options), strict=True))
        dcp.load(state, checkpoint_id=where)
        set_state_dict(
            other,
            other_optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=options,
        )
        alike(dict(other.state_dict()), dict(model.state_dict()))
        alike(FSDP.full_optim_state_dict(other, other_optimizer, rank0_only=False), full)
    plain = make(seed=2)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/{strategy}{uo}")
    plain.load_state_dict(state["model"])
    assert_same(model, plain)


@pytest.mark.sweep(3)
@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("meshed", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "ZERO_1"])
def test_distributed_checkpoints(strategy, meshed, uo, tmp_path):
    simulate_ranks(saved_and_loaded, 2, strategy, uo, meshed, str(tmp_path))


@pytest.mark.multiprocess
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "LAYER_ZERO", "LAYER_ZERO_NESTED"])
def test_distributed_checkpoints_of_grids(strategy, tmp_path):
    simulate_ranks(saved_and_loaded, 4, strategy, True, True, str(tmp_path))
