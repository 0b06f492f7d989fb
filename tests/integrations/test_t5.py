"""A script in the manner of pytorch/examples' FSDP on T5, on flatparam's runtime and on torch's class.

T5's blocks are units (transformer_auto_wrap_policy), the embedding is shared by encoder, decoder and head, precision is
mixed, blocks are checkpointed, metrics are all-reduced, and the full state is saved on rank 0.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from gloo import note, run_ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp.fully_sharded_data_parallel import FullStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from trainers import needs, same, under

import flatparam

needs("transformers")

BF16 = fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")


def a_t5(layers=2):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": layers, "num_heads": 2, "vocab_size": 40}
    more = {"decoder_start_token_id": 0, "use_cache": False}  # a cache would be filled again by recomputation
    return T5ForConditionalGeneration(T5Config(**sizes, **more, dropout_rate=0.1))


def batches(epoch):
    """Inputs, their mask and the labels of each batch of this rank."""
    generator = torch.Generator().manual_seed(10 * epoch + dist.get_rank())
    for _ in range(3):
        ids = torch.randint(2, 40, (2, 7), generator=generator)
        yield {"input_ids": ids, "attention_mask": (ids > 5).long(), "labels": ids.flip(1)}


def run(kind, path, precision, strategy, layers=2):
    """The reduced losses of training and validation of each epoch, and the saved state."""
    module = a_t5(layers)
    from transformers.models.t5.modeling_t5 import T5Block

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    model = fsdp.FullyShardedDataParallel(
        module,
        auto_wrap_policy=policy,
        mixed_precision=precision,
        sharding_strategy=fsdp.ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        limit_all_gathers=True,
    )
    assert isinstance(model, flatparam.FullyShardedDataParallel) == (kind == "runtime")
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(model, wrapper, lambda inner: isinstance(inner, T5Block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.85)
    torch.manual_seed(dist.get_rank())  # of dropout
    results = []
    for epoch in range(2):
        model.train()
        totals = torch.zeros(2)
        for batch in batches(epoch):
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            totals += torch.tensor([loss.item(), len(batch)])
        scheduler.step()
        dist.all_reduce(totals)
        model.eval()
        with torch.no_grad():
            losses = [model(**batch)["loss"].item() for batch in batches(100)]
        results += [*totals.tolist(), losses]
    if kind == "torch":
        return results, None  # its handle ends the process when it saves on a CPU
    policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with fsdp.FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, policy):
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()
    return results, torch.load(path, weights_only=True)


def alike(folder):
    for precision in (None, BF16):
        for strategy in STRATEGIES:
            runs = {}
            for kind in ("torch", "dropin", "runtime"):
                note(f"{precision} {strategy} {kind}")
                with under(kind):
                    runs[kind] = run(kind, f"{folder}/{kind}.pt", precision, strategy)
            same(runs["runtime"], runs["dropin"])
            same(runs["runtime"][0], runs["torch"][0])
            a_t5().load_state_dict(runs["runtime"][1], strict=True)


@pytest.mark.multiprocess
def test_the_t5_script_trains_and_saves_alike(tmp_path):
    run_ranks(alike, 2, str(tmp_path))
