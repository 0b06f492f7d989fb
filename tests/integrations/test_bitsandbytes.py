"""QLoRA: PEFT's adapters on bitsandbytes' 4-bit weights, by transformers' Trainer, beside torch's class.

torch's class takes 4-bit weights only if they are stored in a floating dtype. The oracle of weights in uint8, the
default, is torch's class with the same weights stored in bfloat16, or the unsharded model under DDP.

Promises:
- QLoRA with 4-bit weights in uint8, as from_pretrained() makes them by default, trains on the runtime to the last digit
  as torch's class with weights in bfloat16, and as the unsharded model; it is saved and resumed. torch's class and the
  drop-in refuse uint8; the drop-in names the parameter and the setting
"""

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


def four_bits(module, storage):
    """Put the layers of a Llama's blocks into 4 bits."""
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
            quant_storage=storage,
        )
        data = layer.weight.detach().clone()
        settings = {"quant_type": "nf4", "quant_storage": storage, "module": made}
        made.weight = bnb.nn.Params4bit(data, requires_grad=False, **settings)
        keeps_packing(made)
        parent, _, last = name.rpartition(".")
        setattr(module.model.layers.get_submodule(parent), last, made.to("cpu"))
    return module


def keeps_packing(layer):
    """Keep ``layer`` from packing its weights anew in an evaluation: no class that shards them gets them back."""
    layer.support_avx512bf16_for_cpu = False


def adapted(checkpoint=None, storage=torch.bfloat16):
    """In bfloat16 but for the 4-bit weights: torch's class flattens one dtype."""
    from peft import LoraConfig, PeftModel, get_peft_model

    llama = four_bits(a_llama().to(torch.bfloat16), storage)
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


def adapted_in_bytes(checkpoint=None):
    return adapted(checkpoint, torch.uint8)


def check_layers(model):
    import bitsandbytes as bnb

    with flatparam.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        layers = [one for one in model.modules() if isinstance(one, bnb.nn.Linear4bit)]
        assert len(layers) == 14
        assert all(type(one.weight) is bnb.nn.Params4bit for one in layers)
        assert all(one.weight.quant_state is one.quant_state for one in layers)


def alike(folder):
    kinds = {  # the class, the settings, the model
        "torch": ("torch", SETTINGS[0], adapted),
        "dropin": ("dropin", SETTINGS[0], adapted),
        "runtime": ("runtime", SETTINGS[0], adapted),
        "runtime, uint8": ("runtime", SETTINGS[0], adapted_in_bytes),
        "runtime, uint8, flat": ("runtime", ("FULL_STATE_DICT", {"use_orig_params": False}, {}), adapted_in_bytes),
    }
    runs = {}
    for kind, (cls, settings, make) in kinds.items():
        note(kind)
        with under(cls):
            trainer = a_trainer(f"{folder}/{kind}", *settings, saves=kind != "torch", make=make)
            if kind != "torch":
                saves_adapters(trainer, make)
            runs[kind] = results(trainer)
            if cls == "runtime":
                check_layers(trainer.model)
    dist.barrier()
    assert all(run == runs["torch"] for run in runs.values())
    losses = [loss for loss, _ in runs["torch"][0]]
    assert losses[-1] < losses[0]
    for saved_by, (_, settings, make) in list(kinds.items())[1:]:
        note(f"goes on from what {saved_by} has saved")
        checkpoint = f"{folder}/{saved_by}/checkpoint-{SAVED}"
        with under("runtime"):
            trainer = a_trainer(f"{folder}/again", *settings, make=lambda at=checkpoint, make=make: make(at))
            assert results(trainer, checkpoint) == runs["torch"]


def by_default(base, checkpoint=None):
    """A model as users read it: from_pretrained() and get_peft_model() with their defaults, so uint8 beside fp32."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    llama = LlamaForCausalLM.from_pretrained(base, quantization_config=bits)
    weights = [one for one in llama.modules() if type(one).__name__ == "Linear4bit"]
    assert {one.weight.dtype for one in weights} == {torch.uint8}
    for one in weights:
        keeps_packing(one)
    torch.manual_seed(1)
    if checkpoint is not None:
        return PeftModel.from_pretrained(llama, checkpoint, is_trainable=True)
    return get_peft_model(llama, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_alpha=8))


def as_unsharded(folder):
    base = f"{folder}/base"
    trainer = a_trainer(f"{folder}/unsharded", *SETTINGS[0], saves=False, make=lambda: by_default(base), fsdp=False)
    expected = results(trainer)
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    for uses in (True, False):
        note(f"the runtime {uses}")
        settings = ("FULL_STATE_DICT", {"use_orig_params": uses}, {})
        with under("runtime"):
            trainer = a_trainer(f"{folder}/{uses}", *settings, make=lambda: by_default(base))
            saves_adapters(trainer, lambda: by_default(base))
            found = results(trainer)
            check_layers(trainer.model)
            checkpoint = f"{folder}/{uses}/checkpoint-{SAVED}"
            again = a_trainer(f"{folder}/again", *settings, make=lambda at=checkpoint: by_default(base, at))
            assert results(again, checkpoint) == found
        assert [loss for loss, _ in found[0]] == [loss for loss, _ in expected[0]]
        assert [norm for _, norm in found[0]] == pytest.approx([norm for _, norm in expected[0]], rel=1e-6)
        assert found[1] == expected[1]
    for kind, named in (("torch", ""), ("dropin", r": parameter `self_attn.q_proj.base_layer.weight`.*quant_storage")):
        with under(kind):
            trainer = a_trainer(f"{folder}/{kind}", *SETTINGS[0], saves=False, make=lambda: by_default(base))
            with pytest.raises(ValueError, match=f"Cannot flatten integer dtype tensors{named}"):
                results(trainer)


@pytest.mark.multiprocess
def test_the_trainer_trains_adapters_of_4_bit_weights_alike(tmp_path):
    run_ranks(alike, 2, str(tmp_path), timeout=300)


@pytest.mark.multiprocess
def test_the_trainer_trains_adapters_of_weights_in_uint8_as_the_unsharded_model(tmp_path):
    a_llama().save_pretrained(tmp_path / "base")
    run_ranks(as_unsharded, 2, str(tmp_path), timeout=300)
