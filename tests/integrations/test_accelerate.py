"""accelerate's FSDP plugin (version 1) with flatparam's runtime in the place of torch's class.

The oracles are the plugin on torch's class, and for what it saves, that with flatparam's handle: torch's own handle
ends the process when the plugin saves on a CPU.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import data, loss_of, make
from gloo import note, run_ranks
from trainers import KINDS, Wider, needs, same, same_files, tell_accelerate_of_an_accelerator, under

import flatparam

needs("accelerate")


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
        **{"cpu_ram_efficient_loading": False, "sync_module_states": False, **settings},
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


def run(kind, folder, state_dict_type, precision, **settings):
    """The losses of a run that is saved in the middle and goes on twice from there, and the weights at its end."""
    with under(kind):
        accelerator = an_accelerator(state_dict_type, precision, **settings)
        model = accelerator.prepare(make(cls=Wider))
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
        assert isinstance(model, flatparam.FullyShardedDataParallel) == (kind == "runtime")
        losses = train(accelerator, model, optimizer, range(3))
        if kind == "torch":
            return losses + train(accelerator, model, optimizer, range(3, 6)), None
        accelerator.save_state(folder)
        first = train(accelerator, model, optimizer, range(3, 6))
        accelerator.load_state(folder)
        assert train(accelerator, model, optimizer, range(3, 6)) == first
        return losses + first, accelerator.get_state_dict(model)


def alike(folder):
    kinds = itertools.product(("FULL_STATE_DICT", "SHARDED_STATE_DICT"), (None, "bf16"), (False, True), (False, True))
    for state_dict_type, precision, uo, recomputes in kinds:
        what = f"{state_dict_type}-{precision}-{uo}-{recomputes}"
        settings = {"use_orig_params": uo, "activation_checkpointing": recomputes}
        runs = {}
        for kind in KINDS:
            note(f"{what} {kind}")
            runs[kind] = run(kind, f"{folder}/{what}-{kind}", state_dict_type, precision, **settings)
        (losses, state), (expected, weights) = runs["runtime"], runs["dropin"]
        assert losses == expected == runs["torch"][0]
        assert list(state) == list(weights)
        same(state, weights)
        assert bool(state) == (dist.get_rank() == 0)
        dist.barrier()
        if dist.get_rank() == 0:
            same_files(f"{folder}/{what}-runtime", f"{folder}/{what}-dropin")


def had_by_one():
    """With cpu_ram_efficient_loading rank 0 alone has values: they are sent while the model is sharded."""
    for uo in (False, True):
        runs = []
        for kind in ("torch", "runtime"):
            note(f"{kind} {uo}")
            one = {"cpu_ram_efficient_loading": True, "sync_module_states": True} if kind == "runtime" else {}
            with under(kind):
                accelerator = an_accelerator("FULL_STATE_DICT", None, use_orig_params=uo, **one)
                with torch.device("meta" if one and dist.get_rank() > 0 else "cpu"):
                    module = make(cls=Wider)
                assert next(module.parameters()).is_meta == (bool(one) and dist.get_rank() > 0)
                model = accelerator.prepare(module)
                assert isinstance(model, flatparam.FullyShardedDataParallel) == (kind == "runtime")
                optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
                runs.append(train(accelerator, model, optimizer, range(3)))
        assert runs[0] == runs[1]


@pytest.mark.multiprocess
def test_the_plugin_trains_saves_and_resumes_alike(tmp_path):
    run_ranks(alike, 2, str(tmp_path))


@pytest.mark.multiprocess
def test_a_model_that_one_rank_has_trains_alike():
    run_ranks(had_by_one, 2)
