"""Tensor parallelism inside of units with other features: checkpoints, deferred values, other strategies."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo import note
from parallel_models import PLAN, Cut, Mean, Net, batch, net, new_mesh, passed, said, same, wrap
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from flatparam import CPUOffload, ShardingStrategy, defer_init
from flatparam import FullyShardedDataParallel as FSDP

pytestmark = pytest.mark.multiprocess

FROZEN = ("layers.0.up.weight", "layers.1.down.bias", "layers.1.norm.weight")


def state(model):
    return {name: said(value) for name, value in model.state_dict().items()}


def stepped(model, optimizer):
    model.zero_grad()
    passed(model)
    optimizer.step()
    return state(model)


def checkpoints(folder):
    """One loads into a model with the other use_orig_params, which goes on bit for bit, and into the plain one."""
    for orig in (True, False):
        note(f"use_orig_params={orig}")
        mesh = new_mesh()
        models = [wrap(FSDP, net(mesh), mesh, use_orig_params=value) for value in (orig, not orig)]
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in models]
        stepped(models[0], optimizers[0])
        (saved, of_optimizer), found = (get_state_dict(*pair) for pair in zip(models, optimizers, strict=True))
        dcp.save({"model": saved, "optimizer": of_optimizer}, checkpoint_id=f"{folder}/{orig}")
        dcp.load({"model": found[0], "optimizer": found[1]}, checkpoint_id=f"{folder}/{orig}")
        set_state_dict(models[1], optimizers[1], model_state_dict=found[0], optim_state_dict=found[1])
        same(state(models[1]), state(models[0]))
        whole = net().state_dict()
        dcp.load({"model": whole}, checkpoint_id=f"{folder}/{orig}")
        for name, value in models[0].state_dict().items():
            assert torch.equal(whole[name], value.full_tensor() if isinstance(value, DTensor) else value), name
        same(*(stepped(*pair) for pair in zip(models, optimizers, strict=True)))


def test_distributed_checkpoints(tmp_path):
    simulate_ranks(checkpoints, 4, str(tmp_path))


def beside_the_module():
    mesh, row = new_mesh(), dist.get_rank() // 2
    grid = [init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner", "t")) for shape in ((2, 1, 2), (1, 2, 2))]
    settings = [
        (mesh["data"], FROZEN, {"segments": True}),
        (mesh["data"], (), {"use_orig_params": True, "atomic": "row"}),
        (mesh["data"], (), {"use_orig_params": True, "atomic": torch.Tensor.numel}),
        (mesh["data"], (), {"cpu_offload": CPUOffload(offload_params=True)}),
        (mesh["data"], (), {"use_orig_params": True, "sharding_strategy": ShardingStrategy.ZERO_1}),
        (grid[0]["outer", "inner"], (), {"sharding_strategy": ShardingStrategy.LAYER_ZERO}),
        (
            grid[1]["outer", "inner"],
            (),
            {"use_orig_params": True, "sharding_strategy": ShardingStrategy.LAYER_ZERO_NESTED},
        ),
    ]
    for place, frozen, arguments in settings:
        note(arguments)
        oracle, module = Mean(2, frozen), net(mesh, torch.float64)
        for name in frozen:
            module.get_parameter(name).requires_grad_(False)
        model = wrap(FSDP, module, {"data": place}, **arguments)
        for number in range(2):
            model(batch(number, row, torch.float64)).square().sum().backward()
            oracle.backward(number)
        oracle.check(model, arguments, gradients=True)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.load_state_dict(model.state_dict())
        oracle.check(model, arguments)


def test_other_settings_equal_the_unparallelised_module():
    simulate_ranks(beside_the_module, 4)


class Shared(nn.Module):
    """Two modules with one DTensor parameter."""

    def __init__(self, mesh):
        super().__init__()
        self.one, self.two = Cut(mesh), Cut(mesh)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def shared_and_deferred():
    mesh, row = new_mesh(), dist.get_rank() // 2
    note("shared")
    for orig in (True, False):
        bare, model = (
            Shared(mesh["tensor"]),
            FSDP(Shared(mesh["tensor"]), device_mesh=mesh["data"], use_orig_params=orig),
        )
        loss = passed(model)[0]
        same(loss, said(bare(batch(20, row)).square().sum()))
        for other in (0, 1):
            (bare(batch(20, other)).square().sum() / 2).backward()
        with FSDP.summon_full_params(model, with_grads=True):
            assert model.one.weight is model.two.weight
            same(said(model.one.weight.grad), said(bare.one.weight.grad))
    note("deferred")
    source = wrap(FSDP, net(mesh), mesh)
    with torch.device("meta"):
        made = Net()
    for layer in made.layers:
        parallelize_module(layer, mesh["tensor"], PLAN)
    model = wrap(FSDP, made, mesh, param_init_fn=defer_init)
    with FSDP.state_dict_type(source, StateDictType.SHARDED_STATE_DICT):
        rows = source.state_dict()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(rows)
    same(passed(model), passed(source))
    note("modes")
    bare = net(mesh)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            same(*(said(one(batch(5, row))) for one in (model, bare)))
    same(said(torch.compile(model, backend="eager")(batch(5, row))), said(bare(batch(5, row))))


def test_shared_deferred_and_compiled():
    simulate_ranks(shared_and_deferred, 4)
