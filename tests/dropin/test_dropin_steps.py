"""Steps and clipping of gradients that no step may use: of no_sync(), and in memory that a user has freed.

torch's handle lets a fused optimizer step a shard with the first elements of the whole unit's gradient, silently; other
optimizers fail with shapes. Freed memory crashes the interpreter.

Promises:
- under the drop-in an optimizer's step with a gradient of no_sync(), and a step, clipping or summoning of gradients in
  freed memory, are errors that name the unit; nothing is stepped
"""

import pytest
import torch
import torch.distributed as dist
from gloo import handle_of, run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

OPTIMIZERS = {
    "fused Adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "fused SGD": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
}


def wrapped(orig, strategy=ShardingStrategy.FULL_SHARD):
    torch.manual_seed(0)
    return FullyShardedDataParallel(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=orig,
        sharding_strategy=strategy,
        device_id=torch.device("cpu"),
    )


def backward(model):
    model(torch.ones(3, 4) + dist.get_rank()).square().sum().backward()


def refused(orig, make):
    """A refused step changes nothing: the run goes on as one without it."""
    values = []
    for steps_too_early in (True, False):
        model = wrapped(orig)
        optimizer = OPTIMIZERS[make](model.parameters())
        for _ in range(2):
            with model.no_sync():
                backward(model)
            if steps_too_early:
                with pytest.raises(RuntimeError, match=r"step\(\) came after a backward in no_sync\(\).*weight, bias"):
                    optimizer.step()
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        with model.no_sync():
            backward(model)
        optimizer.zero_grad()
        optimizer.step()  # there is nothing to step
        with FullyShardedDataParallel.summon_full_params(model):
            values.append([param.tolist() for param in model.parameters()])
    assert values[0] == values[1]


def closed(orig):
    """A closure may run the last micro-batch, so its gradients are checked."""
    values = []
    for in_closure in (True, False):
        model = wrapped(orig)
        optimizer = OPTIMIZERS["fused SGD"](model.parameters())
        with model.no_sync():
            backward(model)
        if not in_closure:
            backward(model)
        optimizer.step(lambda model=model: backward(model)) if in_closure else optimizer.step()
        optimizer.zero_grad()

        def too_early(model=model):
            with model.no_sync():
                backward(model)

        with pytest.raises(RuntimeError, match=r"step\(\) came after a backward in no_sync\(\).*weight, bias"):
            optimizer.step(too_early)
        with FullyShardedDataParallel.summon_full_params(model):
            values.append([param.tolist() for param in model.parameters()])
    assert values[0] == values[1]


def with_torch(orig):
    """Unsharded units may be stepped with local gradients, as under torch's handle."""
    values = []
    for kind in ("torch", "flatparam"):
        with handle_of(kind):
            model = wrapped(orig, ShardingStrategy.NO_SHARD)
            optimizer = OPTIMIZERS["fused Adam"](model.parameters())
            with model.no_sync():
                backward(model)
            optimizer.step()
            values.append([param.tolist() for param in model.parameters()])
    assert values[0] == values[1]


def freed(orig):
    model = wrapped(orig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    backward(model)
    for param in model.parameters():
        if param.grad is not None:
            param.grad.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"the gradient .*weight, bias.* was freed or resized"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"the gradient .*weight, bias.* was freed or resized"):
        model.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="root FSDP instance"):  # as under torch's handle
        model.module[0].clip_grad_norm_(1.0)
    if orig:
        gathered = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
        with pytest.raises(ValueError, match=r"the gradient .*weight, bias.* was freed or resized"), gathered:
            raise AssertionError("gradients without memory were gathered")


def steps(orig):
    with_torch(orig)
    with handle_of("flatparam"):
        for make in OPTIMIZERS:
            refused(orig, make)
        closed(orig)
        freed(orig)


@pytest.mark.multiprocess
@pytest.mark.parametrize("orig", [True, False])
def test_steps_with_gradients_that_no_step_may_use_are_refused(orig):
    run_ranks(steps, 2, orig)
