"""accelerate's FSDP plugin (version 1) with flatparam's runtime in the place of torch's class.

The oracle is the plugin on torch's class with flatparam's handle, whose training is torch's bit for bit; torch's own
handle ends the process when the plugin saves on a CPU.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Model, data, loss_of, make
from gloo import note, run_ranks
from torch import nn
from trainers import needs, tell_accelerate_of_an_accelerator, under

import flatparam

needs("accelerate")


class Wider(Model):
    """Every parameter has a row for each rank: torch's distributed checkpoint loads no other, of neither class."""

    def __init__(self):
        super().__init__(width=6)
        self.last = nn.Linear(6, 2, bias=False)


def an_accelerator(state_dict_type, precision, **settings):
    """One that shards blocks."""
    tell_accelerate_of_an_accelerator()
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        sharding_strategy="FULL_SHARD",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type=state_dict_type,
        cpu_ram_efficient_loading=False,
        sync_module_states=False,
        **settings,
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision)


def train(accelerator, model, optimizer, steps):
    losses = []
    for step in steps:
        with accelerator.accumulate(model):
            loss = loss_of(model, data(step))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(runtime, folder, state_dict_type, precision, **settings):
    """The losses of a run that is saved in the middle and goes on twice from there, and the weights at its end."""
    with under("runtime" if runtime else "dropin"):
        accelerator = an_accelerator(state_dict_type, precision, **settings)
        model = accelerator.prepare(make(cls=Wider))
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
        assert isinstance(model, flatparam.FullyShardedDataParallel) == runtime
        losses = train(accelerator, model, optimizer, range(3))
        accelerator.save_state(folder)
        first = train(accelerator, model, optimizer, range(3, 6))
        accelerator.load_state(folder)
        assert train(accelerator, model, optimizer, range(3, 6)) == first
        return losses + first, accelerator.get_state_dict(model)


def alike(folder):
    kinds = itertools.product(("FULL_STATE_DICT", "SHARDED_STATE_DICT"), (None, "bf16"), (False, True), (False, True))
    for state_dict_type, precision, uo, recomputes in kinds:
        what = f"{state_dict_type}-{precision}-{uo}-{recomputes}"
        note(what)
        settings = {"use_orig_params": uo, "activation_checkpointing": recomputes}
        (losses, state), (expected, weights) = (
            run(runtime, f"{folder}/{what}-{runtime}", state_dict_type, precision, **settings)
            for runtime in (True, False)
        )
        assert losses == expected
        assert list(state) == list(weights)
        assert all(torch.equal(value, weights[name]) for name, value in state.items())
        assert bool(state) == (dist.get_rank() == 0)
        dist.barrier()


@pytest.mark.multiprocess
def test_the_plugin_trains_saves_and_resumes_alike(tmp_path):
    run_ranks(alike, 2, str(tmp_path))
