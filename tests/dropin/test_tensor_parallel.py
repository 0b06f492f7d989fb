"""Tensor parallelism inside of FSDP, on a mesh of 2 by 2 ranks: the same as with torch's handle, bit for bit."""

import traceback

import pytest
import torch
import torch.distributed as dist
from gloo import check_handles, note, run_both
from recording import Recorder, first_difference, units
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.multiprocess
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
SETTINGS = [
    ("FULL_SHARD", True, None),
    ("FULL_SHARD", False, None),
    ("SHARD_GRAD_OP", True, BF16),
    ("SHARD_GRAD_OP", False, BF16),
    ("NO_SHARD", False, None),
]


class Layer(nn.Module):
    """Both linear layers are cut between the ranks of a pair; the norm is whole on each."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def record(recorder, label, value):
    """Record a tensor; of a DTensor also where it lies on which mesh."""
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        recorder.add(f"{label} placement", str(value.placements), str(mesh.mesh_dim_names), tuple(value.shape))
    recorder.tensor(label, value if value is None else local(value))


def record_parameters(recorder, label, model):
    for name, parameter in model.named_parameters():
        record(recorder, f"{label} {name}", parameter)
        record(recorder, f"{label} {name}.grad", parameter.grad)
    for number, unit in enumerate(units(model)):
        record(recorder, f"{label} unit {number}", unit._handle.flat_param)
        record(recorder, f"{label} unit {number} grad", unit._handle.flat_param.grad)


def train(kind, recorder, strategy, orig, precision):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = nn.Sequential(Layer(), Layer())
    for layer in net:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = FullyShardedDataParallel(
        net,
        device_mesh=mesh["data"],
        use_orig_params=orig,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        mixed_precision=precision,
    )
    check_handles(model, kind)
    assert all(unit._handle._fsdp_extension is not None for unit in units(model))
    for unit in units(model):
        extensions = unit._handle.flat_param._param_extensions
        recorder.add("extensions", [extension is not None for extension in extensions])
        assert any(extension is not None for extension in extensions)
    record_parameters(recorder, "wrapped", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        for number in range(2):
            generator = torch.Generator().manual_seed(10 * step + number + 100 * mesh["data"].get_local_rank())
            output = model(torch.randn(3, 6, generator=generator))
            recorder.tensor(f"step {step} output", output)
            output.float().square().sum().backward()
            record_parameters(recorder, f"step {step} after backward {number}", model)
        optimizer.step()
        optimizer.zero_grad()
        state_dicts(recorder, model, optimizer, f"step {step}")
    with FullyShardedDataParallel.summon_full_params(model, writeback=True):
        record_parameters(recorder, "summoned", model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
    record_parameters(recorder, "doubled", model)


def state_dicts(recorder, model, optimizer, label):
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
        with FullyShardedDataParallel.state_dict_type(model, kind):
            try:
                saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
            except RuntimeError as error:
                recorder.add(f"{label} {kind.name} refused", str(error))
                continue
            for name, value in saved.items():
                record(recorder, f"{label} {kind.name} {name}", value)
            changed = {name: value * 2 + 1 for name, value in saved.items()}
            recorder.add(f"{label} {kind.name} loaded", str(model.load_state_dict(changed)))
            record_parameters(recorder, f"{label} {kind.name} loaded", model)
            for name, value in model.state_dict().items():
                assert torch.equal(local(value), local(changed[name])), name
            model.load_state_dict(saved)
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    for name, values in state["state"].items():
        for key, value in values.items():
            record(recorder, f"{label} optimizer {name} {key}", value)


def run(kind):
    """Return the events of each setting, or the traceback of what it raised."""
    results = []
    for setting in SETTINGS:
        note(f"{setting} with the handle of {kind}")
        torch.manual_seed(11)
        recorder = Recorder()
        try:
            with recorder.collectives():
                train(kind, recorder, *setting)
        except Exception:
            recorder.add("raised", traceback.format_exc())
        results.append(recorder.events)
        dist.barrier()
    return results


@pytest.mark.thorough
def test_tensor_parallel_units_train_and_save_as_with_torchs_handle():
    for rank, (expected, got) in enumerate(run_both(run, 4)):
        for setting, theirs, ours in zip(SETTINGS, expected, got, strict=True):
            where = f"rank {rank}, {setting}"
            for events in (theirs, ours):
                assert "raised" not in dict(events), f"{where}: {dict(events)['raised']}"
            assert first_difference(theirs, ours) is None, f"{where}: {first_difference(theirs, ours)}"
            assert len(theirs) > 100
