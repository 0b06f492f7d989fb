"""A forward of the drop-in inside a transform of torch.func: right under vmap; refused where the transform
differentiates, before anything has changed. torch's handle crashes the interpreter there.
"""

import copy

import pytest
import torch
from gloo import fake_world, handle_of
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones(2, 3)),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x),
    "hessian": lambda model, x: torch.func.hessian(lambda x: model(x).sum())(x),
    "vmap of grad": lambda model, x: torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x),
}


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy")
@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("used", [True, False], ids=["used", "first-forward"])
def test_transforms_are_right_or_refused(strategy, orig, used):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.randn(2, 4)
    with fake_world(1 if strategy == "NO_SHARD" else 2), handle_of("flatparam"):
        keywords = {
            "device_id": torch.device("cpu"),
            "use_orig_params": orig,
            "sharding_strategy": ShardingStrategy[strategy],
        }
        inner = copy.deepcopy(plain)
        inner[0] = FullyShardedDataParallel(inner[0], **keywords)
        model = FullyShardedDataParallel(inner, **keywords)
        if used:
            model(x).sum().backward()
            model.zero_grad()
        for name, transform in TRANSFORMS.items():
            with pytest.raises(RuntimeError, match=r"do not work through torch's FullyShardedDataParallel.*weight"):
                transform(model, x)
            with torch.no_grad():
                assert model(x).shape == (2, 3), name
        if strategy == "NO_SHARD":  # where the values are known without other ranks
            assert torch.equal(torch.func.vmap(model)(x), torch.func.vmap(plain)(x))
            model(x).sum().backward()
            plain(x).sum().backward()
            grads = [p.grad.flatten() for p in model.parameters()]
            expected = [p.grad.flatten() for p in plain.parameters()]
            assert sorted(torch.cat(grads).tolist()) == sorted(torch.cat(expected).tolist())
