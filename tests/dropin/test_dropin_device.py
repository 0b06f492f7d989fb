"""The drop-in on an accelerator: a simulated one (simulated.py). The oracle is torch's handle on the same device."""

import itertools

import pytest
import simulated
import torch
from fsdp_models import data, loss_of, make, wrap_blocks
from gloo import handle_of, note, run_ranks
from pairs import cover
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def trained(kind, group, strategy, precision, orig):
    """Losses, the gradients of each step and the parameters after them, on this rank."""
    sim = torch.device("sim", 0)
    with handle_of(kind):
        arguments = {"mixed_precision": precision, "use_orig_params": orig, "process_group": group, "device_id": sim}
        model = wrap_blocks(make().to(sim), FullyShardedDataParallel, sharding_strategy=strategy, **arguments)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        seen = []
        for step in range(3):
            with model.no_sync():
                loss_of(model, data(10 + step).to(sim)).backward()
            loss = loss_of(model, data(step).to(sim))
            loss.backward()
            seen += [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]
            seen = [value.cpu().clone() for value in seen]
            optimizer.step()
            optimizer.zero_grad()
        return seen + [param.detach().cpu().clone() for param in model.parameters()]


STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
CASES = list(itertools.product(("others", "computing"), STRATEGIES, (None, LOW), (True, False)))


def as_torch(library, cases):
    device = simulated.use(library)
    group = simulated.new_group()
    for late, *settings in cases:
        note(f"{late} {settings}")
        device.late(late)
        expected, found = (trained(kind, group, *settings) for kind in ("torch", "flatparam"))
        assert len(found) == len(expected), settings
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), settings


@pytest.mark.multiprocess
def test_training_is_torchs():
    cases = cover(CASES)
    assert len(cases) >= 6
    run_ranks(as_torch, 2, str(simulated.build()), cases)


@pytest.mark.multiprocess
@pytest.mark.thorough
def test_training_is_torchs_in_all_settings():
    run_ranks(as_torch, 2, str(simulated.build()), CASES)
