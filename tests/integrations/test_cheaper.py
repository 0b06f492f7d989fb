"""The time of a step in this thread in each trainer: on flatparam's runtime, torch's class, and that with our handle.

Measured from the end of one step of the optimizer to that of the next, so all that a trainer does in between counts.
"""

import functools
import statistics
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp
from fsdp_models import Block, data, loss_of, make
from gloo import note, run_ranks
from test_accelerate import an_accelerator, train
from test_lightning import fit, with_fabric
from test_peft import adapted
from test_t5 import run as t5_script
from test_timm import trained
from test_transformers import SETTINGS, a_llama, a_trainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from trainers import KINDS, Wider, needs, seconds_of_steps, under

for package in ("accelerate", "lightning", "peft", "timm", "torchao"):
    needs(package)

LAYERS, TURNS, STEPS = 12, 3, 8


def by_accelerate(kind, folder):
    with under(kind):
        accelerator = an_accelerator("FULL_STATE_DICT", None, use_orig_params=True)
        model = accelerator.prepare(make(cls=Wider, blocks=LAYERS))
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
        train(accelerator, model, optimizer, range(STEPS))


def by_transformers(kind, folder, make=a_llama):
    with under(kind):
        a_trainer(folder, *SETTINGS[0], saves=False, make=functools.partial(make, layers=LAYERS)).train()


def by_lightning(kind, folder):
    with under(kind):
        fit(folder, "32-true", False, blocks=LAYERS)


def by_fabric(kind, folder):
    with under(kind):
        with_fabric(folder, "32-true", False, "full", blocks=LAYERS)


def by_timm(kind, folder):
    trained(kind, "vit_tiny_patch16_224", False, steps=STEPS, depth=LAYERS)


def by_the_t5_script(kind, folder):
    with under(kind):
        t5_script(kind, f"{folder}.pt", None, "FULL_SHARD", layers=LAYERS // 2)  # of encoder and decoder


def wrapped(**settings):
    module, policy = make(cls=Wider, blocks=LAYERS), ModuleWrapPolicy({Block})
    return fsdp.FullyShardedDataParallel(module, auto_wrap_policy=policy, use_orig_params=True, **settings)


def by_an_optimizer(kind, folder, cls, **settings):
    with under(kind):
        model = wrapped()
    optimizer = cls(model.parameters(), lr=0.01, **settings)
    for i in range(STEPS):
        loss_of(model, data(i)).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_torchao(kind, folder):
    from torchao.optim import AdamW8bit

    torch.compile = lambda function, **settings: function  # torchao compiles each step
    by_an_optimizer(kind, folder, AdamW8bit)


TRAINERS = {
    "accelerate": by_accelerate,
    "transformers.Trainer": by_transformers,
    "PEFT in it": functools.partial(by_transformers, make=adapted),
    "Lightning's Trainer": by_lightning,
    "Lightning's Fabric": by_fabric,
    "timm's ViT": by_timm,
    "the T5 script": by_the_t5_script,
    "torch.optim.AdamW, foreach": functools.partial(by_an_optimizer, cls=torch.optim.AdamW, foreach=True),
    "torch.optim.AdamW, fused": functools.partial(by_an_optimizer, cls=torch.optim.AdamW, fused=True),
    "torchao's AdamW8bit": by_torchao,
}


def costs(name, folder):
    """Milliseconds of a step on each kind, taken in turn. The first two of each turn warm up."""
    found = {kind: [] for kind in KINDS}
    for turn in range(TURNS):
        for kind in KINDS:
            note(f"{name} {kind} {turn}")
            with seconds_of_steps() as seconds:
                TRAINERS[name](kind, f"{folder}/{turn}-{kind}")
            found[kind] += [1000 * each for each in seconds[2:]]
            dist.barrier()
    return {kind: statistics.median(each) for kind, each in found.items()}


def told(capsys, name, ranks):
    """Of the slower rank, in milliseconds; said where the tests are run."""
    found = {kind: max(rank[kind] for rank in ranks) for kind in KINDS}
    with capsys.disabled():
        print(f"\n{name}: " + ", ".join(f"{kind} {value:.1f} ms" for kind, value in found.items()), end=" ")
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", TRAINERS)
def test_a_step_is_cheaper_than_on_torchs_class(capsys, tmp_path, name):
    found = told(capsys, name, run_ranks(costs, 2, name, str(tmp_path), timeout=240))
    assert found["runtime"] < found["torch"]


def saving_and_loading(folder, meshed):
    """The least that a distributed checkpoint of model and optimizer takes, most of which is torch's own."""
    settings = {"device_mesh": init_device_mesh("cpu", (2,))} if meshed else {}
    found = {kind: [] for kind in KINDS}
    for turn in range(6):
        for kind in KINDS:
            note(f"{kind} {turn}")
            with under(kind):
                model = wrapped(**settings)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                loss_of(model, data(0)).backward()
                optimizer.step()
                start = time.thread_time()
                states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
                dcp.save(states, checkpoint_id=f"{folder}/{turn}-{kind}")
                dcp.load(states, checkpoint_id=f"{folder}/{turn}-{kind}")
                set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
                found[kind].append(1000 * (time.thread_time() - start))
            dist.barrier()
    return {kind: min(each) for kind, each in found.items()}


@pytest.mark.multiprocess
@pytest.mark.parametrize("meshed", [False, True], ids=["ShardedTensor", "DTensor"])
def test_a_distributed_checkpoint_is_cheaper_than_on_torchs_class(capsys, tmp_path, meshed):
    what = f"torch.distributed.checkpoint, of {'DTensors' if meshed else 'ShardedTensors'}"
    found = told(capsys, what, run_ranks(saving_and_loading, 2, str(tmp_path), meshed))
    assert found["runtime"] < found["torch"]
