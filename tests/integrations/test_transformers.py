"""transformers' Trainer on flatparam's runtime, beside torch's class: training, files, resuming, generation.

A Llama with tied embeddings, random, of two layers. Its FSDP (version 1) is accelerate's plugin.

Promises:
- transformers' Trainer trains a model in bf16 with bf16=True as on torch's class, saves and resumes it; trl's
  SFTTrainer too: `integrations/test_trl.py`
"""

import contextlib
import pathlib

import pytest
import torch
import torch.distributed as dist
from gloo import note, run_ranks
from trainers import look_like_torchrun, needs, same_files, tell_accelerate_of_an_accelerator, under

import flatparam

needs("transformers")

STEPS, SAVED = 6, 3
ARGUMENTS = ("training_args.bin",)  # they name the folder
SETTINGS = (
    ("FULL_STATE_DICT", {"use_orig_params": True}, {}),
    ("FULL_STATE_DICT", {"use_orig_params": False}, {"gradient_accumulation_steps": 2}),
    ("SHARDED_STATE_DICT", {"use_orig_params": True, "activation_checkpointing": True}, {"bf16": True}),
)


def a_llama(layers=2):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": layers, "num_attention_heads": 2}
    tokens = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, tie_word_embeddings=True))


def sentences():
    """Each counts from somewhere, which can be learned."""
    rows = (torch.arange(start, start + 9) % 58 + 3 for start in range(40))
    return [{"input_ids": row, "labels": row} for row in rows]


def a_trainer(folder, state_dict_type, config, arguments, saves=True, make=a_llama, fsdp=True):
    tell_accelerate_of_an_accelerator() if fsdp else look_like_torchrun()
    from transformers import Trainer, TrainingArguments

    common = {"version": 1, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "sync_module_states": False}
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        save_strategy="steps" if saves else "no",
        save_steps=SAVED,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        fsdp=fsdp,
        fsdp_config={**common, **config, "state_dict_type": state_dict_type} if fsdp else None,
        **arguments,
    )
    return Trainer(make(), arguments, train_dataset=sentences(), eval_dataset=sentences()[:5])


def results(trainer, checkpoint=None):
    """Of each step the loss and the norm of the gradient, and the loss of the evaluation at the end."""
    trainer.train(resume_from_checkpoint=checkpoint)
    history = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    assert len(history) == STEPS
    return history, trainer.evaluate()["eval_loss"]


def generated(model):
    torch.manual_seed(1)
    return model.generate(torch.arange(5, 9).repeat(2, 1), max_new_tokens=8, do_sample=True).tolist()


def check_the_trained(trainer, folder):
    """The wrapped model gives a ModelOutput, generates, and is saved as transformers wants to read it."""
    from transformers import LlamaForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    model = trainer.model
    assert isinstance(model, flatparam.FullyShardedDataParallel)
    output = model(input_ids=torch.arange(4, 10)[None], labels=torch.arange(4, 10)[None])
    assert type(output) is CausalLMOutputWithPast
    assert output.loss.requires_grad
    assert output.logits.shape == (1, 6, 61)
    trainer.save_model(folder)
    dist.barrier()
    with flatparam.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        tokens = generated(model)
        weights = model.module.state_dict()
        assert model.lm_head.weight is model.model.embed_tokens.weight
    if not pathlib.Path(folder, "model.safetensors").exists():
        return
    loaded = LlamaForCausalLM.from_pretrained(folder)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    expected = loaded.state_dict()
    assert set(weights) == set(expected)
    assert generated(loaded) == tokens


def alike(folder):
    for i, settings in enumerate(SETTINGS):
        runs = {}
        for kind in ("torch", "dropin", "runtime"):
            note(f"{settings} {kind}")
            with under(kind):
                trainer = a_trainer(f"{folder}/{i}-{kind}", *settings, saves=kind != "torch")
                runs[kind] = results(trainer)
                if kind == "runtime":
                    check_the_trained(trainer, f"{folder}/{i}-whole")
        dist.barrier()
        assert runs["runtime"] == runs["dropin"] == runs["torch"]
        losses = [loss for loss, _ in runs["torch"][0]]
        assert losses[-1] < losses[0] - 0.5, "nothing was learned"
        if dist.get_rank() == 0:
            same_files(f"{folder}/{i}-runtime", f"{folder}/{i}-dropin", but=ARGUMENTS)
        expected = runs["torch"]
        for kind, saved_by in (("dropin", "dropin"), ("runtime", "dropin"), ("runtime", "runtime")):
            note(f"{settings}: {kind} goes on from what {saved_by} has saved")
            with under(kind):
                trainer = a_trainer(f"{folder}/{i}-again", *settings)
                found = results(trainer, f"{folder}/{i}-{saved_by}/checkpoint-{SAVED}")
            if kind == "dropin" and settings[0] == "SHARDED_STATE_DICT":
                expected = found  # accelerate reads no optimizer states for an optimizer that has none yet
            assert found == expected
        if expected is runs["torch"] and dist.get_rank() == 0:
            last = f"checkpoint-{STEPS}"
            same_files(f"{folder}/{i}-again/{last}", f"{folder}/{i}-runtime/{last}", but=ARGUMENTS)


def a_low_llama():
    """As from_pretrained() of version 5 reads it: in the dtype of the checkpoint."""
    return a_llama().to(torch.bfloat16)


def upcast(folder):
    """A model in bf16 that is trained with bf16=True: accelerate puts its masters in fp32, by names in the class."""
    for i, uo in enumerate((True, False)):
        settings = ("FULL_STATE_DICT", {"use_orig_params": uo}, {"bf16": True})
        runs = {}
        for kind in ("torch", "dropin", "runtime"):
            note(f"{uo} {kind}")
            with under(kind):
                trainer = a_trainer(f"{folder}/{i}-{kind}", *settings, saves=kind != "torch", make=a_low_llama)
                runs[kind] = results(trainer)
                assert all(param.dtype == torch.float32 for param in trainer.model.parameters())
        dist.barrier()
        assert runs["runtime"] == runs["dropin"] == runs["torch"]
        if dist.get_rank() == 0:
            same_files(f"{folder}/{i}-runtime", f"{folder}/{i}-dropin", but=ARGUMENTS)
        for kind, saved_by in (("dropin", "runtime"), ("runtime", "runtime"), ("runtime", "dropin")):
            note(f"{uo}: {kind} goes on from what {saved_by} has saved")
            with under(kind):
                trainer = a_trainer(f"{folder}/{i}-again", *settings, make=a_low_llama)
                assert results(trainer, f"{folder}/{i}-{saved_by}/checkpoint-{SAVED}") == runs["torch"]


@pytest.mark.multiprocess
def test_a_model_in_bf16_trains_alike(tmp_path):
    run_ranks(upcast, 2, str(tmp_path))


def had_by_one(folder):
    """A model that only rank 0 has values of, and the others the names: sent while it is sharded, it trains alike.

    transformers' from_pretrained() of this version reads on every rank, also with cpu_ram_efficient_loading.
    """
    settings = SETTINGS[0]
    with under("torch"):
        expected = results(a_trainer(f"{folder}/torch", *settings, saves=False))

    def have():
        from accelerate import init_empty_weights

        with contextlib.nullcontext() if dist.get_rank() == 0 else init_empty_weights():
            model = a_llama()
        model.tie_weights()
        assert all(param.is_meta == (dist.get_rank() > 0) for param in model.parameters())
        return model

    config = {"cpu_ram_efficient_loading": True, "sync_module_states": True}
    with under("runtime"):
        trainer = a_trainer(
            f"{folder}/one", settings[0], {**settings[1], **config}, settings[2], saves=False, make=have
        )
        assert results(trainer) == expected
        assert isinstance(trainer.model, flatparam.FullyShardedDataParallel)


@pytest.mark.multiprocess
def test_a_model_that_one_rank_has_trains_alike(tmp_path):
    run_ranks(had_by_one, 2, str(tmp_path))


@pytest.mark.multiprocess
def test_the_trainer_trains_saves_and_resumes_alike(tmp_path):
    run_ranks(alike, 2, str(tmp_path))
