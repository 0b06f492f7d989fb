"""Train a Llama with transformers' Trainer on flatparam: one line is new.

    torchrun --nproc-per-node 2 examples/hf_trainer.py

`flatparam.install(runtime=True)` puts flatparam's class in the place of torch's FullyShardedDataParallel. The Trainer
wraps, trains and saves as before. Needs transformers, accelerate and GPUs: accelerate does not shard on a CPU. The last
lines:

    20 steps by flatparam.fsdp.wrapper.fully_sharded: mean loss 2.52
    the saved model loads as LlamaForCausalLM of 24,736 parameters
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import flatparam


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def rows() -> list[dict[str, torch.Tensor]]:
    """Token numbers that count up from somewhere, which a model can learn."""
    counted = (torch.arange(start, start + 12) % 64 for start in range(64))
    return [{"input_ids": row, "labels": row} for row in counted]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a Llama with transformers' Trainer on flatparam.")
    parser.add_argument("--steps", type=int, default=20, help="steps to train")
    parser.add_argument("--out", type=Path, default=Path("run/hf_trainer"), help="folder of the Trainer's files")
    options = parser.parse_args()
    flatparam.install(runtime=True)  # the new line, before Trainer()
    arguments = TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        fsdp=True,
        fsdp_config={"version": 1, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    trainer = Trainer(tiny_llama(), arguments, train_dataset=rows())
    result = trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"{result.global_step} steps by {type(trainer.model).__module__}: mean loss {result.training_loss:.2f}")
        model = AutoModelForCausalLM.from_pretrained(options.out)
        print(f"the saved model loads as {type(model).__name__} of {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
