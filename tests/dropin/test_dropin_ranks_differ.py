"""Ranks whose flat parameters differ are told so by name, all of them, before the first gather.

torch's handle crashes in it where sizes differ, and trains a mixture where they do not.
"""

import pytest
import torch
import torch.distributed as dist
from gloo import handle_of, note, run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

POLICY = ModuleWrapPolicy({nn.Linear})
BF16, FP16 = (MixedPrecision(param_dtype=dtype) for dtype in (torch.bfloat16, torch.float16))


def net(shape=(6, 4), dtype=torch.float32):
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(*shape), nn.Flatten()).to(dtype)


def renamed():
    class Renamed(nn.Linear):
        def __init__(self):
            super().__init__(6, 4)
            self.other = self._parameters.pop("weight")

    return nn.Sequential(nn.Linear(6, 6), Renamed())


DIFFERENCES = {  # the second rank's module, and its settings; what both are told, in rank order
    "shape": (lambda: net((4, 6)), {}, r"shape \(4, 6\).*shape \(6, 4\)"),
    "dtype": (lambda: net(dtype=torch.float64), {}, r"torch\.float32\), rank 1 has.*torch\.float64"),
    "name": (renamed, {}, r"`weight`.*rank 1 has parameter `bias`"),
    "precision": (net, {"mixed_precision": BF16}, r"param_dtype=torch\.float32.*param_dtype=torch\.bfloat16"),
    "reductions": (
        net,
        {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)},
        r"reduce_dtype=torch\.float32.*reduce_dtype=torch\.bfloat16",
    ),
    "strategy": (net, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, r"FULL_SHARD.*SHARD_GRAD_OP"),
}


def wrapped(module, orig, **settings):
    settings = {"auto_wrap_policy": POLICY, "use_orig_params": orig, "device_id": torch.device("cpu"), **settings}
    return FullyShardedDataParallel(module, **settings)


def told(rank, orig):
    with handle_of("flatparam"):
        for difference, (make, settings, pattern) in DIFFERENCES.items():
            note(difference)
            torch.manual_seed(0)
            model = wrapped(make() if rank else net(), orig, **(settings if rank else {}))
            x = torch.ones(2, 6, dtype=torch.float64 if rank and difference == "dtype" else torch.float32)
            for _ in range(2):
                with pytest.raises(ValueError, match=rf"different units: rank 0 has .*{pattern}"):
                    model(x)
        grads = []
        for precision in (None, BF16, FP16):  # a model that is the same everywhere, after those
            torch.manual_seed(0)
            model = wrapped(net(), orig, mixed_precision=precision)
            model(torch.ones(2, 6)).sum().backward()
            grads.append([param.grad.float().norm().item() for param in model.parameters() if param.grad is not None])
    return [difference for difference in DIFFERENCES], len(grads)


def rank_told(orig):
    return told(dist.get_rank(), orig)


@pytest.mark.multiprocess
@pytest.mark.parametrize("orig", [True, False])
def test_ranks_that_differ_are_told_alike(orig):
    assert all(found == ([*DIFFERENCES], 3) for found in run_ranks(rank_told, 2, orig))


def counted():
    """The functions of torch.distributed that a step calls, as users and torch's tests count them."""
    calls = []
    with handle_of("flatparam"), pytest.MonkeyPatch.context() as patched:
        for name in ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "broadcast", "gather"):
            original = getattr(dist, name)
            patched.setattr(
                dist, name, lambda *args, n=name, f=original, **kwargs: (calls.append(n), f(*args, **kwargs))[1]
            )
        model = wrapped(net(), True)
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
    return sorted(calls)


@pytest.mark.multiprocess
def test_a_comparison_is_none_of_the_collectives_that_are_counted():
    for calls in run_ranks(counted, 2):
        assert calls == ["all_gather"] * len(calls)
        assert len(calls) == 8  # two units, in forward and backward of two steps
