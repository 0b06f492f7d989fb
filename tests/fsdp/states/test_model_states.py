"""State dicts in every form. The oracles: the unwrapped module, and torch's FSDP1.

Promises:
- sharded and local state dicts are torch's, rank by rank, and each loads the other's; every form goes into another
  model
"""

import contextlib
import itertools
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from fsdp_models import assert_same, data, first_rank_warns, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from simulated_ranks import simulate_ranks
from test_optimizer_states import OPTIMIZERS, Odd, assert_states, equal, wrapped
from torch.distributed.checkpoint.state_dict import get_model_state_dict  # noqa: F401  (half a second, once)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Torchs
from torch.distributed.fsdp import StateDictType

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp.sharding.flat_param import FlatParam

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)


def local(value):
    """What this rank has of a sharded tensor."""
    if hasattr(value, "to_local"):
        return value.to_local()
    if hasattr(value, "local_shards"):
        shards = value.local_shards()
        return shards[0].tensor if shards else None
    return value


def theirs(module, **settings):
    return wrap_blocks(module, Torchs, device_id=torch.device("cpu"), **settings)


def as_torchs(uo, meshed):
    """Keys, rows, offsets, specs and values of sharded and local states are torch's, and each loads the other's."""
    note(f"uo={uo} mesh={meshed}")
    settings = {"use_orig_params": uo, **({"device_mesh": init_device_mesh("cpu", (2,))} if meshed else {})}
    ours, torchs = wrap_blocks(make(), **settings), theirs(make(), **settings)
    kinds = (FULL, SHARDED) if meshed or uo else (FULL, SHARDED, LOCAL)
    for kind in kinds:
        with FSDP.state_dict_type(ours, kind):
            mine = ours.state_dict()
        with Torchs.state_dict_type(torchs, kind):
            wanted = torchs.state_dict()
        assert sorted(mine) == sorted(wanted)
        assert kind is LOCAL or list(mine) == list(make().state_dict())
        for name, value in wanted.items():
            assert type(mine[name]) is type(value), (name, type(mine[name]), type(value))
            assert mine[name].size() == value.size()
            assert equal(local(mine[name]), local(value)), (kind, name)
            if hasattr(value, "local_shards"):
                assert [s.metadata for s in mine[name].local_shards()] == [s.metadata for s in value.local_shards()]
                assert mine[name].metadata().shards_metadata == value.metadata().shards_metadata
            if hasattr(value, "to_local"):
                assert (mine[name].placements, mine[name].device_mesh) == (value.placements, value.device_mesh)
        for state in (mine, wanted):
            other = wrap_blocks(make(seed=9), **settings)
            with FSDP.state_dict_type(other, kind):
                assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
            assert_same(other, make())
        other = theirs(make(seed=9), **settings)
        with Torchs.state_dict_type(other, kind):
            other.load_state_dict(mine)
        with Torchs.summon_full_params(other):
            for name, param in make().named_parameters():
                assert torch.equal(other.get_parameter(name), param)


@pytest.mark.sweep(2)
@pytest.mark.multiprocess
@pytest.mark.parametrize(("uo", "meshed"), itertools.product([False, True], repeat=2))
def test_states_are_torchs(uo, meshed):
    run_ranks(as_torchs, 2, uo, meshed)


def forms(strategy, uo, mesh, more):
    """Every form of an odd model and of its optimizer's state goes into another one."""
    note(f"{strategy} uo={uo} mesh={mesh}")
    if more.get("process_group") == "a pair":
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        more["process_group"] = (rows[dist.get_rank() // 2], dist.group.WORLD)
    warns = strategy == "NO_SHARD"
    settings = {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))} if mesh else {}
    model = wrapped(make(cls=Odd), strategy, uo, **settings, **more)
    optimizer = OPTIMIZERS["adam"]([p for p in model.parameters() if p.requires_grad])
    for step in range(2):
        loss_of(model, data(step)).backward()
        dist.all_reduce(model.ignored.grad)
        optimizer.step()
        optimizer.zero_grad()
    full, full_optim = model.state_dict(), FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert list(full) == list(make(cls=Odd).state_dict())
    assert full._metadata == make(cls=Odd).state_dict()._metadata
    assert len({value.untyped_storage().data_ptr() for value in full.values()}) == len(full)
    meshed = mesh or ("process_group" not in more and strategy in ("HYBRID_SHARD", "LAYER_ZERO", "LAYER_ZERO_NESTED"))
    for kind in (FULL, SHARDED) if meshed else (FULL, SHARDED, LOCAL):
        note(f"{kind}")
        other = wrapped(make(cls=Odd, seed=8), strategy, uo, **settings, **more)
        other_optimizer = OPTIMIZERS["adam"]([p for p in other.parameters() if p.requires_grad])
        quiet = first_rank_warns("not sharded") if warns and kind is not FULL else contextlib.nullcontext()
        with FSDP.state_dict_type(model, kind), quiet:
            state, optim = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        with FSDP.state_dict_type(other, kind):
            other.load_state_dict({name: value.clone() for name, value in state.items()})
            FSDP.optim_state_dict_to_load(other, other_optimizer, optim, load_directly=True)
        if kind is not FULL:
            again = FSDP.flatten_sharded_optim_state_dict(optim, other, other_optimizer)
            mine = optimizer.state_dict()["state"]
            assert list(again["state"]) == list(mine)
            assert not uo or all(equal(again["state"][number], mine[number]) for number in mine)
        assert equal(dict(other.state_dict()), dict(full))
        assert_states(FSDP.full_optim_state_dict(other, other_optimizer, rank0_only=False), full_optim)
        loss_of(other, data(5)).backward()
        optimizer.zero_grad()


@pytest.mark.sweep(4)
@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh", [False, True])
@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1"])
def test_forms(strategy, uo, mesh):
    simulate_ranks(forms, 2, strategy, uo, mesh, {})


@pytest.mark.sweep(4)
@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "LAYER_ZERO", "LAYER_ZERO_NESTED"])
def test_forms_of_four_ranks(strategy, uo):
    simulate_ranks(forms, 4, strategy, uo, False, {})


@pytest.mark.sweep(2)
@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("strategy", ["LAYER_ZERO", "LAYER_ZERO_NESTED"])
def test_forms_of_pairs_of_groups(strategy, uo):
    simulate_ranks(forms, 4, strategy, uo, False, {"process_group": "a pair"})


@pytest.mark.multiprocess
def test_forms_of_blocks():
    simulate_ranks(forms, 2, "FULL_SHARD", True, False, {"atomic": "row"})


def gathers_of(call):
    """How often units are gathered in ``call``, and the most bytes that lie in what was gathered at one time.

    gloo's thread refers to what it gathered until it runs again: milliseconds on a busy machine. It gets the time to
    let go of it here, where ``call`` waits, so that what is left is what ``call`` refers to.
    """
    alive, most, calls, gather = [], [0], [0], FlatParam.gather

    def watched(self, shard):
        whole = gather(self, shard)
        end = time.monotonic() + 10.0
        while any(storage() is not None for storage, _ in alive) and time.monotonic() < end:
            time.sleep(0.001)
        alive.append((weakref.ref(whole.untyped_storage()), whole.untyped_storage().nbytes()))
        calls[0] += 1
        most[0] = max(most[0], sum(size for storage, size in alive if storage() is not None))
        return whole

    FlatParam.gather = watched
    try:
        result = call()
    finally:
        FlatParam.gather = gather
    return calls[0], most[0], result


def streamed(uo):
    """Units are gathered one at a time, once for each key; nothing is told by objects a parameter."""
    model = wrap_blocks(make(width=9), use_orig_params=uo)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    loss_of(model, data(0)).backward()
    optimizer.step()
    units = [unit._unit.flat_params[0] for unit in FSDP.fsdp_modules(model)]
    largest = max(flat_param.layout.padded_numel for flat_param in units) * 4
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind):
            assert gathers_of(model.state_dict)[:2] == (len(units), largest)
            calls, most, _ = gathers_of(lambda: FSDP.optim_state_dict(model, optimizer))
            assert (calls, most) == (3 * len(units), largest)
    with FSDP.state_dict_type(model, LOCAL):
        calls, _, state = gathers_of(model.state_dict)
        assert calls == 0
        assert state["_flat_param"].local_shards()[0].tensor.data_ptr() == units[0].flat.data_ptr()


@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
def test_units_are_gathered_one_at_a_time(uo):
    run_ranks(streamed, 2, uo)
