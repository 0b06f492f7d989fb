"""States of models whose parameters are offloaded, beside a simulated accelerator. The oracle: the same on the host."""

import copy
from collections import OrderedDict

import pytest
import simulated
import torch
import torch.distributed as dist
from fsdp_models import Model, data, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from test_model_states import local
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from flatparam import CPUOffload, MixedPrecision, checkpoint
from flatparam import FullyShardedDataParallel as FSDP


@pytest.fixture(scope="module")
def library():
    return str(simulated.build())


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)


def train(model, optimizer, device, steps):
    for step in steps:
        loss_of(model, data(step).to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_alike(found, wanted, where=""):
    """The same values, wherever they are."""
    if isinstance(wanted, dict):
        assert set(found) == set(wanted), (where, set(found) ^ set(wanted))
        for key, value in wanted.items():
            assert_alike(found[key], value, f"{where}.{key}")
    elif isinstance(wanted, torch.Tensor):
        one, other = local(found), local(wanted)
        assert one is other is None or torch.equal(one.cpu(), other.cpu()), where
    else:
        assert found == wanted, where


def on_host(state):
    """Of an optimizer whose parameters are."""
    for key, values in state["state"].items():
        for name, value in values.items():
            mine = local(value) if isinstance(value, torch.Tensor) else None
            assert mine is None or mine.is_cpu, (key, name)
    return state


def functions(folder, library, uo):
    simulated.use(library)
    sim, cpu = torch.device("sim", 0), torch.device("cpu")
    group = simulated.new_group()
    there = {"process_group": group, "cpu_offload": CPUOffload(True), "device_id": sim}

    def built(seed, **more):
        model = wrap_blocks(make(seed=seed), use_orig_params=uo, **more)
        return model, adam(model)

    models, optimizers = zip(built(0, **there), built(0), strict=True)
    for model, optimizer, device in zip(models, optimizers, (sim, cpu), strict=True):
        train(model, optimizer, device, range(2))
    (model, plain), (optimizer, wanted) = models, optimizers
    on_host(optimizer.state_dict())
    for only in (False, True):
        full, expected = (
            FSDP.full_optim_state_dict(m, o, rank0_only=only) for m, o in zip(models, optimizers, strict=True)
        )
        assert_alike(full, expected)
        on_host(full) if full else None
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    rows, expected = (FSDP.sharded_optim_state_dict(m, o) for m, o in zip(models, optimizers, strict=True))
    assert_alike(rows, expected)
    first = full if dist.get_rank() == 0 else None

    host = FullStateDictConfig(offload_to_cpu=True)  # parameters of this device cannot be shown where others are
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, host):
        parameters = model.state_dict()

    def fits(way, state):
        note(f"{uo} {way}")
        on_host(state)
        other, its = built(3, **there)
        its.load_state_dict(copy.deepcopy(state))
        on_host(its.state_dict())
        assert_alike(FSDP.full_optim_state_dict(other, its, rank0_only=False), full, way)
        other.load_state_dict(parameters)
        train(other, its, sim, range(2, 4))
        return FSDP.full_optim_state_dict(other, its, rank0_only=False)

    results = [
        fits("shard", FSDP.shard_full_optim_state_dict(full, model, optim=optimizer)),
        fits("scatter", FSDP.scatter_full_optim_state_dict(first, model, optim=optimizer, group=group)),
        fits("flatten", FSDP.flatten_sharded_optim_state_dict(rows, model, optimizer)),
    ]
    for kind, config, optim_config in (
        (StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()),
        (StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True)),
        (StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)),
        (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
        (
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=True),
            ShardedOptimStateDictConfig(offload_to_cpu=True),
        ),
    ):
        with FSDP.state_dict_type(model, kind, config, optim_config):
            state = FSDP.optim_state_dict(model, optimizer)
            loadable = FSDP.optim_state_dict_to_load(model, optimizer, state, group=group)
        results.append(fits(f"{kind} {optim_config}", loadable))
    ids = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, make())
    adam(make()).load_state_dict(ids)

    checkpoint.save(folder / "one", model, optimizer)
    checkpoint.async_save(folder / "two", model, optimizer).wait()
    checkpoint.save(folder / "host", plain, wanted)
    train(plain, wanted, cpu, range(2, 4))
    expected = FSDP.full_optim_state_dict(plain, wanted, rank0_only=False)
    for path in ("one", "two", "host"):
        note(f"{uo} {path}")
        other, its = built(4, **there)
        checkpoint.load(folder / path, other, its)
        on_host(its.state_dict())
        train(other, its, sim, range(2, 4))
        results.append(FSDP.full_optim_state_dict(other, its, rank0_only=False))
        with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT, host):
            assert_alike(other.state_dict(), plain.state_dict())
    for result in results:
        assert_alike(result, expected)


@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
def test_states_of_offloaded_parameters(tmp_path, library, uo):
    run_ranks(functions, 2, tmp_path, library, uo, timeout=240.0)


def local_states(library, uo):
    """What is saved of shards in pinned memory is the same as on the host, and loads into both."""
    simulated.use(library)
    sim, group, kind = torch.device("sim", 0), simulated.new_group(), StateDictType.LOCAL_STATE_DICT
    there = {"process_group": group, "cpu_offload": CPUOffload(True), "device_id": sim}
    for to_cpu in (False, True):
        models = [wrap_blocks(make(), use_orig_params=uo, **more) for more in (there, {})]
        others = [wrap_blocks(make(seed=3), use_orig_params=uo, **more) for more in ({}, there)]
        states = []
        for model, other in zip(models, others, strict=True):
            with FSDP.state_dict_type(model, kind, LocalStateDictConfig(offload_to_cpu=to_cpu)):
                states.append(model.state_dict())
            with FSDP.state_dict_type(other, kind):
                other.load_state_dict(states[-1])
        assert_alike(states[0], states[1])
        for mine, its in zip(models[::-1], others, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), its.parameters(), strict=True))


@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
def test_local_states_of_offloaded_parameters(library, uo):
    run_ranks(local_states, 2, library, uo)


class Kept(Model):
    """With a buffer, and a parameter that no unit is to shard."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.ones(3))
        self.plain = torch.nn.Parameter(torch.ones(3))


def asked_for_on_the_host(library, uo):
    """Buffers of a model on the device come to the host with the parameters; others of a given dict stay."""
    simulated.use(library)
    sim, group = torch.device("sim", 0), simulated.new_group()
    module = make(cls=Kept).to(sim)
    more = {"use_orig_params": uo, "ignored_states": [module.plain], "mixed_precision": MixedPrecision(torch.bfloat16)}
    model = wrap_blocks(module, process_group=group, device_id=sim, **more)
    for kind, config in (
        (StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)),
        (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)),
        (StateDictType.FULL_STATE_DICT, FullStateDictConfig()),
    ):
        given = OrderedDict(other=torch.ones(2, device=sim))
        with FSDP.state_dict_type(model, kind, config):
            state = model.state_dict(destination=given)
        assert state.pop("other").device == sim
        assert {local(value).is_cpu for value in state.values() if local(value) is not None} == {config.offload_to_cpu}
        assert state["shift"].tolist() == [1, 1, 1]
        assert model.module.shift.device == model.module.plain.device == sim


@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
def test_states_asked_for_on_the_host(library, uo):
    run_ranks(asked_for_on_the_host, 2, library, uo)
