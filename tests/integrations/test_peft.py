"""PEFT's LoRA on flatparam's runtime: trained by transformers' Trainer beside torch's class; its reductions."""

import contextlib
import importlib.metadata
import math
import pathlib

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from gloo import fake_world, note, run_ranks
from test_transformers import ARGUMENTS, SAVED, SETTINGS, a_llama, a_trainer, results, sentences
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from trainers import needs, same_files, under

import flatparam
from flatparam.fsdp.errors import StateError

needs("peft")

# Also on torch's class: PEFT 0.21 looks for adapters by the names of modules, which have the names of units in them
LEAVES_OUT = tuple(map(int, importlib.metadata.version("peft").split(".")[:2])) >= (0, 21)


def adapted(checkpoint=None, layers=2):
    """A Llama with adapters, those of a checkpoint: PEFT loads none into a sharded model, of either class."""
    llama = a_llama(layers)
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(1)
    if checkpoint is not None:
        return PeftModel.from_pretrained(llama, checkpoint, is_trainable=True)
    return get_peft_model(llama, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_alpha=8))


@contextlib.contextmanager
def reductions():
    """The bytes of each reduce-scatter, by the names that it has in releases of torch."""
    names = [name for name in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, name)]
    functions, found, inside = {name: getattr(dist, name) for name in names}, [], []

    def counted(name):
        def call(output, whole, *args, **kwargs):
            if not inside:  # one of them may call the other
                found.append(whole.nbytes)
            inside.append(name)
            try:
                return functions[name](output, whole, *args, **kwargs)
            finally:
                inside.pop()

        return call

    for name in names:
        setattr(dist, name, counted(name))
    try:
        yield found
    finally:
        for name in names:
            setattr(dist, name, functions[name])


def trained_bytes(module, size):
    """Of what is trained, each parameter padded to what divides by the ranks at most."""
    trained = [param.numel() for param in module.parameters() if param.requires_grad]
    return 4 * sum(trained), 4 * sum(math.ceil(numel / size) * size for numel in trained)


def saves_adapters(trainer, make=adapted):
    """Let a trainer save what PEFT since 0.21 leaves out of the file (docs/integrations.md): by a model made anew."""
    from transformers import TrainerCallback

    class Saving(TrainerCallback):
        def on_save(self, arguments, state, control, **kwargs):
            values = trainer.accelerator.get_state_dict(trainer.model)
            folder = pathlib.Path(arguments.output_dir, f"checkpoint-{state.global_step}")
            if trainer.accelerator.is_main_process:
                assert (safetensors.torch.load_file(folder / "adapter_model.safetensors") == {}) is LEAVES_OUT
                anew = make()
                anew.load_state_dict({key: value for key, value in values.items() if "lora_" in key}, strict=False)
                anew.save_pretrained(folder)
                assert len(safetensors.torch.load_file(folder / "adapter_model.safetensors")) == 12
            trainer.accelerator.wait_for_everyone()

    trainer.add_callback(Saving())


def alike(folder):
    for i, settings in enumerate(SETTINGS[:2]):
        runs = {}
        for kind in ("torch", "dropin", "runtime"):
            note(f"{settings} {kind}")
            with under(kind):
                trainer = a_trainer(f"{folder}/{i}-{kind}", *settings, saves=kind != "torch", make=adapted)
                saves_adapters(trainer)
                runs[kind] = results(trainer)
        dist.barrier()
        assert runs["runtime"] == runs["dropin"] == runs["torch"]
        losses = [loss for loss, _ in runs["torch"][0]]
        assert losses[-1] < losses[0]
        if dist.get_rank() == 0:
            same_files(f"{folder}/{i}-runtime", f"{folder}/{i}-dropin", but=ARGUMENTS)
        for saved_by in ("dropin", "runtime"):
            note(f"{settings} goes on from what {saved_by} has saved")
            checkpoint = f"{folder}/{i}-{saved_by}/checkpoint-{SAVED}"
            with under("runtime"):
                trainer = a_trainer(f"{folder}/{i}-again", *settings, make=lambda at=checkpoint: adapted(at))
                assert results(trainer, checkpoint) == runs["torch"]


@pytest.mark.multiprocess
def test_the_trainer_trains_adapters_alike(tmp_path):
    run_ranks(alike, 2, str(tmp_path))


def reduced(uo):
    """A unit of frozen and trained parameters (``segments``) reduces the trained ones; no others have gradients."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    module, batch = adapted(), torch.stack([row["input_ids"] for row in sentences()[:2]])
    least, most = trained_bytes(module, 2)
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    model = flatparam.FullyShardedDataParallel(module, auto_wrap_policy=policy, segments=True, use_orig_params=uo)
    model(input_ids=batch, labels=batch).loss.backward()
    model.zero_grad()
    with reductions() as found:
        model(input_ids=batch, labels=batch).loss.backward()
    assert least <= sum(found) <= most
    grads = [param.grad.untyped_storage() for param in model.parameters() if param.grad is not None]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in grads}.values())
    assert least <= 2 * held <= most


@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
def test_gradients_are_those_of_what_is_trained(uo):
    run_ranks(reduced, 2, uo)


def test_save_pretrained_inside_of_a_wrapper_is_refused(tmp_path):
    values = a_llama().state_dict()
    with fake_world(2):
        module = adapted()
        model = flatparam.FullyShardedDataParallel(module, use_orig_params=True)
        inner = module.get_base_model()
        for save in (model.module.save_pretrained, inner.save_pretrained):
            with pytest.raises(StateError, match=r"save_pretrained\(\): .* pieces"):
                save(tmp_path)
        assert not list(tmp_path.iterdir())
        inner.save_pretrained(tmp_path, state_dict=dict(values))  # which it empties
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert len(saved) == len(values) - 1  # the tied head is left out
    assert all(torch.equal(value, values[name]) for name, value in saved.items())
