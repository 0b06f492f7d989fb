"""A handle with shards that are not dense, and modules that refuse an attribute; the oracle is torch's handle."""

import pytest
import torch
from one_handle import assert_same, outcome, ready_for_forward, reshard, under_both, unshard
from torch import nn
from torch.distributed.fsdp._common_utils import HandleTrainingState

FORWARD, POST = HandleTrainingState.FORWARD, HandleTrainingState.BACKWARD_POST


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def every_other(kind, orig, grad_too):
    """A shard that is every other element of a tensor, and a gradient like that."""
    handle = ready_for_forward(kind, model(), ("FULL_SHARD", orig))
    reshard(handle, FORWARD)
    flat = handle.flat_param
    spread = torch.arange(2.0 * flat._local_shard.numel())
    flat._local_shard = spread[::2]
    if grad_too:
        flat.grad = None
        flat.data = flat._local_shard
        flat.grad = spread[1::2]
        flat._saved_grad_shard = flat.grad
    unshard(handle, FORWARD)
    reshard(handle, POST if grad_too else FORWARD)
    params = flat._params if orig else [flat]
    return [(p.tolist(), p.stride(), None if p.grad is None else p.grad.tolist()) for p in params]


@pytest.mark.parametrize("grad_too", [False, True])
@pytest.mark.parametrize("orig", [False, True])
def test_a_shard_that_is_not_contiguous(orig, grad_too):
    assert_same(every_other, orig, grad_too)


class Refuses(nn.Linear):
    """Takes no tensor for its weight, when told so."""

    refuses = False

    def __setattr__(self, name, value):
        if self.refuses and name == "weight" and not isinstance(value, nn.Parameter):
            raise KeyError(name)
        super().__setattr__(name, value)


def refused_views(kind):
    """What a handle holds of the views of a forward in which a module has refused one."""
    module = nn.Sequential(nn.Linear(3, 4), Refuses(4, 2))
    handle = ready_for_forward(kind, module, ("FULL_SHARD", True))
    reshard(handle, FORWARD)
    handle.flat_param._tensors[:] = [None] * 4
    module[1].refuses = True
    state, error = outcome(unshard, handle, FORWARD)
    assert (state, type(error)) == ("error", KeyError)
    return [tensor is not None for tensor in handle.flat_param._tensors]


def test_a_module_that_refuses_a_view():
    (_, torchs), (_, ours) = under_both(refused_views)
    assert torchs == [True, True, True, False]
    assert all(mine or not theirs for mine, theirs in zip(ours, torchs, strict=True)), ours
