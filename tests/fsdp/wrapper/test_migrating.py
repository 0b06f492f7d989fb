"""The programs of docs/migrating.md run as they stand, and train as the unsharded module does."""

import itertools
import os
import pathlib
import re
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import Averaged, Block, Model, data, full_params, loss_of, make, wrap_blocks
from gloo import run_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

TEXT = (pathlib.Path(__file__).parents[3] / "docs" / "migrating.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def program(number, folder):
    """What it has defined at its end."""
    os.chdir(folder)
    if dist.get_rank() == 0:
        save_file(make().state_dict(), "weights.safetensors")
    dist.barrier()
    yours = sys.modules["my_training"] = types.ModuleType("my_training")
    yours.Transformer = Model if number == 2 else make
    yours.Block, yours.batches, yours.loss = Block, [data(i) for i in range(3)], loss_of
    scope = {}
    exec(PROGRAMS[number], scope)
    dist.barrier()
    return scope


def from_fsdp2(folder):
    """One step of all batches, in bf16."""
    scope, module = program(1, folder), make()
    before = {name: param.clone() for name, param in module.named_parameters()}
    Averaged(module, 2).backward(lambda rank: [data(i, rank) for i in range(3)])
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    torch.optim.AdamW(module.parameters()).step()
    found = full_params(scope["model"])
    for name, param in module.named_parameters():
        moved, expected = found[name] - before[name], param - before[name]
        assert (moved - expected).abs().mean() < 0.1 * expected.abs().mean(), name


def from_deepspeed(folder):
    """A step of each batch, from weights in a file to weights in a file."""
    scope, module = program(2, folder), make()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.001)
    for i in range(3):
        Averaged(module, 2).backward(lambda rank, i=i: [data(i, rank)])
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, param in load_file("model.safetensors").items():
        torch.testing.assert_close(param, dict(module.named_parameters())[name])
    torch.testing.assert_close(scope["total"], sum(param.sum() for param in module.parameters()))


def checkpoints(folder):
    """What torch's helpers save of FSDP2 is loaded here, and the other way."""
    mesh = init_device_mesh("cpu", (2,))
    saved = {}
    for kind, seed in itertools.product(("theirs", "ours"), (0, 1)):
        model = make(seed=seed)
        if kind == "theirs":
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh)
        else:
            model = wrap_blocks(model, use_orig_params=True, device_mesh=mesh)
        saved[kind, seed] = model, torch.optim.AdamW(model.parameters(), lr=0.01)
        for i in range(3):
            loss_of(model, data(i)).backward()
            saved[kind, seed][1].step()
            saved[kind, seed][1].zero_grad()
    whole = StateDictOptions(full_state_dict=True)
    for kind, other in (("theirs", "ours"), ("ours", "theirs")):
        states = get_state_dict(*saved[kind, 0])
        dcp.save(dict(enumerate(states)), checkpoint_id=f"{folder}/{kind}")
        found = dict(enumerate(get_state_dict(*saved[other, 1])))
        dcp.load(found, checkpoint_id=f"{folder}/{kind}")
        set_state_dict(*saved[other, 1], model_state_dict=found[0], optim_state_dict=found[1])
        for loaded, expected in zip(
            *(get_state_dict(*saved[of], options=whole) for of in ((other, 1), (kind, 0))), strict=True
        ):
            same(loaded, expected)


def same(value, expected):
    if isinstance(expected, dict):
        assert set(value) == set(expected)
        for key in expected:
            same(value[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(value, expected)
    else:
        assert value == expected


@pytest.mark.multiprocess
def test_distributed_checkpoints_go_from_fsdp2_to_here_and_back(tmp_path):
    run_ranks(checkpoints, 2, str(tmp_path))


def test_there_are_three_programs():
    assert len(PROGRAMS) == 3
    exec(PROGRAMS[0], {})


@pytest.mark.multiprocess
@pytest.mark.parametrize("checked", [from_fsdp2, from_deepspeed])
def test_a_program_trains_as_the_unsharded_module(checked, tmp_path):
    run_ranks(checked, 2, str(tmp_path))
