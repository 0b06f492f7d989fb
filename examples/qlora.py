"""QLoRA: PEFT's adapters on bitsandbytes' 4-bit weights, sharded, in a training loop of your own.

    torchrun --nproc-per-node 2 examples/qlora.py
    torchrun --nproc-per-node 8 examples/qlora.py --model meta-llama/Llama-3.1-8B

The 4-bit weights stay in bytes: they are sharded and gathered as they are. Needs transformers, peft and bitsandbytes.
Without --model it makes a tiny random Llama. The last lines:

    step 30: loss 3.16
    each rank holds 20,480 bytes of 4-bit weights, and trains 8,704 elements of adapters
    adapters.safetensors: 69,632 bytes
"""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from flatparam import FullyShardedDataParallel, ModuleWrapPolicy, checkpoint


def make_tiny(folder: Path) -> str:
    """Save a random Llama in ``folder``, and return it."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    if dist.get_rank() == 0:
        LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(folder)
    dist.barrier()
    return str(folder)


def load_in_4_bits(source: str) -> nn.Module:
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    base = AutoModelForCausalLM.from_pretrained(source, quantization_config=bits)
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # it would repack 4-bit weights in an evaluation on a CPU
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(base, adapters)
    return adapted


def train(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    module = load_in_4_bits(options.model or make_tiny(options.out / "base"))
    blocks = {type(inner) for inner in module.modules() if type(inner).__name__.endswith("DecoderLayer")}
    model = FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy(blocks),
        segments=True,  # 4-bit, frozen and trained parameters lie in flat parameters of their own
        use_orig_params=True,
        sync_module_states=True,  # PEFT draws other first values of the adapters on each rank
        device_id=device,
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    for step in range(1, options.steps + 1):
        tokens = ((torch.randint(64, (8, 1)) + torch.arange(12)) % 64).to(device)  # your text goes here
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            say(f"step {step}: loss {loss.item():.2f}")
    in_bytes = sum(parameter.nbytes for parameter in model.parameters() if parameter.dtype == torch.uint8)
    held = sum(parameter.numel() for parameter in trained)
    say(f"each rank holds {in_bytes:,} bytes of 4-bit weights, and trains {held:,} elements of adapters")
    checkpoint.save(options.out / "adapters", model, optimizer, trainable_only=True, overwrite=True)
    if dist.get_rank() == 0:
        written = checkpoint.export(options.out / "adapters", options.out / "adapters.safetensors")
        say(f"adapters.safetensors: {written.bytes:,} bytes")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train PEFT's adapters on bitsandbytes' 4-bit weights, sharded.")
    parser.add_argument("--model", help="a model of the hub, or a folder; else a tiny random one")
    parser.add_argument("--steps", type=int, default=30, help="steps to train")
    parser.add_argument("--out", type=Path, default=Path("run/qlora"), help="folder of the checkpoint and the adapters")
    options = parser.parse_args()
    if "RANK" not in os.environ:  # started without torchrun: this process is the only rank
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    train(options, device)
    gc.collect()  # deletes the model, which holds the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
