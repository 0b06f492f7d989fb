"""QLoRA: PEFT's adapters on bitsandbytes' 4-bit weights, by transformers' Trainer, beside torch's class."""

import pytest
import torch
import torch.distributed as dist
from gloo import note, run_ranks
from test_peft import saves_adapters
from test_transformers import SAVED, SETTINGS, a_llama, a_trainer, results
from torch import nn
from trainers import needs, under

import flatparam

needs("bitsandbytes")
needs("peft")


def four_bits(module):
    """Have the layers of a Llama's blocks in 4 bits, as from_pretrained() makes them: it wants an accelerator."""
    import bitsandbytes as bnb

    for name, layer in list(module.model.layers.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        made = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=False,
            compute_dtype=torch.float32,
            quant_type="nf4",
            quant_storage=torch.bfloat16,
        )
        data = layer.weight.detach().clone()
        settings = {"quant_type": "nf4", "quant_storage": torch.bfloat16, "module": made}
        made.weight = bnb.nn.Params4bit(data, requires_grad=False, **settings)
        made.support_avx512bf16_for_cpu = False  # its evaluation packs the weights anew, in no class that shards them
        parent, _, last = name.rpartition(".")
        setattr(module.model.layers.get_submodule(parent), last, made.to("cpu"))
    return module


def adapted(checkpoint=None):
    """In bfloat16 but for the 4-bit weights: torch's class flattens one dtype."""
    from peft import LoraConfig, PeftModel, get_peft_model

    llama = four_bits(a_llama().to(torch.bfloat16))
    torch.manual_seed(1)
    if checkpoint is not None:
        made = PeftModel.from_pretrained(llama, checkpoint, is_trainable=True, autocast_adapter_dtype=False)
    else:
        settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_alpha=8)
        made = get_peft_model(llama, settings, autocast_adapter_dtype=False)
    for param in made.parameters():
        if param.requires_grad:
            param.data = param.data.to(torch.bfloat16)
    return made


def alike(folder):
    import bitsandbytes as bnb

    runs = {}
    for kind in ("torch", "dropin", "runtime"):
        note(kind)
        with under(kind):
            trainer = a_trainer(f"{folder}/{kind}", *SETTINGS[0], saves=kind != "torch", make=adapted)
            if kind != "torch":
                saves_adapters(trainer, adapted)
            runs[kind] = results(trainer)
            if kind == "runtime":
                with flatparam.FullyShardedDataParallel.summon_full_params(trainer.model, writeback=False):
                    layers = [one for one in trainer.model.modules() if isinstance(one, bnb.nn.Linear4bit)]
                    assert len(layers) == 14
                    assert all(type(one.weight) is bnb.nn.Params4bit for one in layers)
                    assert all(one.weight.quant_state is one.quant_state for one in layers)
    dist.barrier()
    assert runs["runtime"] == runs["dropin"] == runs["torch"]
    losses = [loss for loss, _ in runs["torch"][0]]
    assert losses[-1] < losses[0]
    for saved_by in ("dropin", "runtime"):
        note(f"goes on from what {saved_by} has saved")
        checkpoint = f"{folder}/{saved_by}/checkpoint-{SAVED}"
        with under("runtime"):
            trainer = a_trainer(f"{folder}/again", *SETTINGS[0], make=lambda at=checkpoint: adapted(at))
            assert results(trainer, checkpoint) == runs["torch"]


@pytest.mark.multiprocess
def test_the_trainer_trains_adapters_of_4_bit_weights_alike(tmp_path):
    run_ranks(alike, 2, str(tmp_path))
