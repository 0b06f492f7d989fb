"""trl's SFTTrainer on flatparam's runtime, beside torch's class: a model in bf16, whose masters are put in fp32."""

import pytest
import torch
import torch.distributed as dist
from gloo import note, run_ranks
from test_transformers import ARGUMENTS, a_low_llama, sentences
from trainers import needs, same_files, tell_accelerate_of_an_accelerator, under

needs("trl")

STEPS = 4


def a_trainer(folder, uo, saves):
    tell_accelerate_of_an_accelerator()
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({str(i): i for i in range(61)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", bos_token="1", eos_token="2")
    rows = [row["input_ids"].tolist() for row in sentences()]
    config = {"version": 1, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "use_orig_params": uo}
    arguments = SFTConfig(
        output_dir=folder,
        max_steps=STEPS,
        save_strategy="steps" if saves else "no",
        save_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=False,
        fsdp=True,
        fsdp_config={**config, "state_dict_type": "FULL_STATE_DICT", "sync_module_states": False},
    )
    rows = Dataset.from_dict({"input_ids": rows, "labels": rows})
    return SFTTrainer(a_low_llama(), arguments, train_dataset=rows, processing_class=tokenizer)


def alike(folder):
    for uo in (True, False):
        runs = {}
        for kind in ("torch", "dropin", "runtime"):
            note(f"{uo} {kind}")
            with under(kind):
                trainer = a_trainer(f"{folder}/{uo}-{kind}", uo, saves=kind != "torch")
                trainer.train()
                assert all(param.dtype == torch.float32 for param in trainer.model.parameters())
            history = trainer.state.log_history
            runs[kind] = [(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]
        dist.barrier()
        assert runs["runtime"] == runs["dropin"] == runs["torch"]
        assert len(runs["torch"]) == STEPS
        assert runs["torch"][-1][0] < runs["torch"][0][0] - 0.2, "nothing was learned"
        if dist.get_rank() == 0:
            same_files(f"{folder}/{uo}-runtime", f"{folder}/{uo}-dropin", but=(*ARGUMENTS, "README.md"))


@pytest.mark.multiprocess
def test_a_model_in_bf16_is_fine_tuned_alike(tmp_path):
    run_ranks(alike, 2, str(tmp_path))
