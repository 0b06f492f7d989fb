"""Training on our handle equals, bit for bit, training of the unsharded module.

Oracle: the plain module, which computes the gradient of both ranks' batches by itself and adds the two halves. The sum
of two numbers has no order, so with two ranks nothing may differ. This holds also where torch's own handle is wrong.
"""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from dropin_scenarios import (
    MODEL_DTYPES,
    PRECISIONS,
    Scenario,
    batches,
    build,
    loss_of,
    make_optimizer,
    wrap,
)
from gloo import check_handles, handle_of, run_ranks
from recording import describe, digest
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

pytestmark = pytest.mark.multiprocess

S = Scenario
STEPS = 4
SCENARIOS = [
    *(
        S(model=model, strategy=strategy, orig=orig, optimizer=optimizer)
        for model, strategy, orig, optimizer in itertools.product(
            ("mlp", "tied", "conv", "twice"),
            ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"),
            (True, False),
            ("sgd", "adamw"),
        )
        if (optimizer == "adamw") == (model in ("mlp", "conv"))
    ),
    S(model="frozen", optimizer="adamw"),
    S(model="frozen", strategy="NO_SHARD"),
    S(model="frozen_blocks", orig=False),
    S(model="unused", wrap="nested"),
    S(precision="fp64", model="conv", strategy="NO_SHARD"),
    S(precision="fp64", strategy="SHARD_GRAD_OP", optimizer="adamw"),
    S(precision="bf16", model="tied"),
    S(precision="bf16", strategy="NO_SHARD", optimizer="adamw"),
    S(precision="bf16", strategy="NO_SHARD", model="strided"),
    S(precision="fp32_reduce", model="mlp", strategy="SHARD_GRAD_OP"),
    S(precision="fp32_reduce", model="strided", strategy="NO_SHARD"),
    S(precision="bf16_reduce", model="mlp", orig=False),
    S(strategy="HYBRID_SHARD", optimizer="adamw"),
    S(checkpointing="reentrant_outside"),
    S(checkpointing="other_outside", strategy="SHARD_GRAD_OP"),
    *(
        S(abandon=True, strategy=strategy, orig=orig, precision=precision, model=model)
        for strategy, orig, precision, model in (
            ("FULL_SHARD", True, "bf16", "tied"),
            ("FULL_SHARD", False, "bf16", "mlp"),
            ("SHARD_GRAD_OP", True, "bf16", "tied"),
            ("SHARD_GRAD_OP", False, "fp32_reduce", "mlp"),
            ("NO_SHARD", True, "bf16", "strided"),
            ("NO_SHARD", False, "bf16", "mlp"),
            ("FULL_SHARD", True, "fp32", "tied"),
            ("NO_SHARD", True, "fp32", "conv"),
        )
    ),
    S(accumulate="sync", model="conv", strategy="NO_SHARD"),
    S(accumulate="sync", model="images", strategy="NO_SHARD"),
    S(accumulate="sync", model="tied"),
    S(accumulate="no_sync", model="conv", strategy="NO_SHARD"),
    S(accumulate="no_sync", orig=False),
    S(accumulate="no_sync", strategy="SHARD_GRAD_OP"),
]


class Plain:
    """The unsharded module with the ranks' arithmetic done in one process."""

    def __init__(self, scenario):
        self.scenario = scenario
        self.model = build(scenario)
        precision = PRECISIONS[scenario.precision]
        self.compute_dtype = getattr(precision, "param_dtype", None)
        self.reduce_dtype = getattr(precision, "reduce_dtype", None) or self.compute_dtype
        self.optimizer = make_optimizer(scenario, self.model.parameters())
        self.data = [batches(self.model, scenario, rank) for rank in range(scenario.world)]
        self.low = [copy.deepcopy(self.model) for _ in self.data]  # one for each rank: each has its own buffers

    def gradients_of(self, rank, step, passes):
        """Add up the gradients of one rank's passes, in the dtype in which the module computes."""
        model = self.low[rank]
        for low, parameter in zip(model.parameters(), self.model.parameters(), strict=True):
            low.data = parameter.detach().clone().to(self.compute_dtype or parameter.dtype)
            low.grad = None
        for _ in range(passes):
            x = next(self.data[rank])
            if self.compute_dtype is not None and x.is_floating_point():
                x = x.detach().to(self.compute_dtype).requires_grad_()
            loss = loss_of(model(x, step))
            loss.backward()
        return loss, [p.grad for p in model.parameters()]

    def step(self, step):
        """Do one optimizer step; return the losses of the ranks' last passes."""
        self.optimizer.zero_grad(set_to_none=self.scenario.set_to_none)
        accumulate = self.scenario.accumulate
        for _ in range(2 if accumulate == "sync" else 1):
            results = [self.gradients_of(rank, step, 2 if accumulate == "no_sync" else 1) for rank in (0, 1)]
            for parameter, first, second in zip(self.model.parameters(), results[0][1], results[1][1], strict=True):
                if first is None:
                    continue
                dtype = self.reduce_dtype or parameter.dtype
                first, second, before = first.to(dtype), second.to(dtype), parameter.grad
                if before is not None and self.scenario.strategy == "NO_SHARD":
                    # each rank adds its new gradient to the common old one, and all that is averaged again
                    first, second, before = before + first, before + second, None
                mean = (first / 2 + second / 2).to(parameter.dtype)
                parameter.grad = mean if before is None else before + mean
        self.optimizer.step()
        return [loss for loss, _ in results]


def compare(scenario):
    """Train both on this rank; return the differences found, and how many values were compared."""
    rank = dist.get_rank()
    plain = Plain(scenario)
    with handle_of("flatparam"):
        inner = build(scenario)
        data = batches(inner, scenario, rank)
        model = wrap(inner, scenario)
        check_handles(model, "flatparam")
        optimizer = make_optimizer(scenario, model.parameters())
        differences, compared = [], 0
        for step in range(STEPS):
            if scenario.abandon:
                model(inner.batch(torch.Generator().manual_seed(step)), step)
            optimizer.zero_grad(set_to_none=scenario.set_to_none)
            for number in range(1 if scenario.accumulate == "none" else 2):
                silent = scenario.accumulate == "no_sync" and number == 0
                with model.no_sync() if silent else contextlib.nullcontext():
                    loss = loss_of(model(next(data), step))
                    loss.backward()
            optimizer.step()
            expected = plain.step(step)[rank]
            pairs = [("loss", expected, loss)]
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                state = {name.replace(".block.", "."): value for name, value in model.state_dict().items()}
            for name, parameter in plain.model.named_parameters(remove_duplicate=False):
                pairs.append((name, parameter, state[name]))
            for name, a, b in pairs:
                compared += 1
                if digest(a) != digest(b):
                    differences.append(f"step {step} {name}\n  unsharded: {describe(a)}\n  ours:      {describe(b)}")
    return differences, compared


@pytest.mark.sweep(8)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_trains_as_the_unsharded_module(scenario):
    for rank, (differences, compared) in enumerate(run_ranks(compare, scenario.world, scenario)):
        assert not differences, f"rank {rank}: " + "\n".join(differences[:4])
        assert compared > 5 * STEPS


def test_covers_what_torch_gets_wrong():
    assert sum(scenario.torch_is_wrong for scenario in SCENARIOS) >= 5
    assert all(
        scenario.world == 2 and scenario.precision not in MODEL_DTYPES.keys() - {"fp64"} for scenario in SCENARIOS
    )
