"""Whether flatparam's handle answers as torch's does: both are driven by hand on a tiny module, in this process alone.

A release of torch may keep every name and do something else behind it. ``install()`` asks here before it takes over.
No backward is run: after one, torch refuses backwards in processes that are forked.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ..common.torch_private import HandleShardingStrategy, HandleTrainingState

_LISTS = ("_fqns", "_shapes", "_strides", "_contiguities", "_numels", "_numels_with_padding", "_is_padding_mask")


class _Rank:
    """What a handle asks of its process group when it communicates nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class _Tiny(nn.Module):
    """A parameter that the shard cuts, one that is shared, and one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = _param(2, 3), _param(3)
        self.inner = nn.Module()
        self.inner.tied, self.inner.scale = self.weight, _param(1)


def _param(*shape: int) -> nn.Parameter:
    numel = torch.Size(shape).numel()
    return nn.Parameter(torch.arange(1.0, numel + 1, dtype=torch.float32, device="cpu").view(shape))


@torch.inference_mode(False)
@torch.enable_grad()
def differences(ours: Any, theirs: Any) -> list[str]:
    """Return what the handle class ``ours`` answers otherwise than ``theirs``, a line each; none: they behave alike."""
    found = []
    for use_orig_params in (True, False):
        for rank, size in ((0, 1), (0, 2), (1, 2)):
            answers = zip(
                _answers(ours, rank, size, use_orig_params), _answers(theirs, rank, size, use_orig_params), strict=False
            )
            for (what, answer), (_, expected) in answers:
                if answer != expected:
                    where = f"use_orig_params={use_orig_params}, rank {rank} of {size}"
                    found.append(f"{what} ({where}): torch's answers {expected}, flatparam's {answer}")
                    break  # what follows is of other data
    return found


def _answers(kind: Any, rank: int, size: int, use_orig_params: bool) -> Iterator[tuple[str, Any]]:
    try:
        yield from _steps(kind, rank, size, use_orig_params)
    except Exception as error:
        yield "a step", f"{type(error).__name__}: {error}"


def _steps(kind: Any, rank: int, size: int, use_orig_params: bool) -> Iterator[tuple[str, Any]]:
    module, cpu = _Tiny(), torch.device("cpu")
    strategy = HandleShardingStrategy.FULL_SHARD if size > 1 else HandleShardingStrategy.NO_SHARD
    params = list(module.parameters())
    settings = (strategy, False, None, None, False, _Rank(rank, size), use_orig_params)
    handle = kind(params, module, cpu, *settings)
    flat_param = handle.flat_param
    for name in _LISTS:
        yield name, [tuple(item) if isinstance(item, tuple) else item for item in getattr(flat_param, name)]
    yield "the flat parameter", flat_param.tolist()
    yield "param_module_names()", list(handle.param_module_names())
    handle.shard()
    yield "the shard", flat_param.tolist()
    yield "_shard_param_infos", [tuple(info) for info in flat_param._shard_param_infos]
    yield "shard_metadata()", tuple(handle.shard_metadata())
    yield "parameters after shard()", _shown(module)
    handle.init_flat_param_attributes()
    handle._training_state = HandleTrainingState.FORWARD
    yield "needs_unshard()", handle.needs_unshard()
    padded = flat_param
    if size > 1:
        padded = handle._alloc_padded_unsharded_flat_param()
        padded.copy_(torch.arange(float(padded.numel()), dtype=padded.dtype, device=cpu))
    handle._use_unsharded_flat_param(padded)
    yield "parameters in forward", _shown(module)
    handle._training_state = HandleTrainingState.BACKWARD_POST
    handle.reshard(size > 1)
    yield "the shard after backward", flat_param.tolist()
    yield "parameters after backward", _shown(module)
    handle._training_state = HandleTrainingState.IDLE
    if use_orig_params:
        flat_param.grad = torch.arange(float(flat_param.numel()), dtype=torch.float32, device=cpu)
        handle._use_sharded_grad_views()
        grads = [param.grad for param in module.parameters()]
        yield "gradients", [None if grad is None else grad.tolist() for grad in grads]


def _shown(module: nn.Module) -> list[tuple[str, str, Any]]:
    """The parameters that modules have now: by name, their class, and their values where they have memory."""
    found = []
    for name, inner in module.named_modules():
        for attribute in ("weight", "bias", "tied", "scale"):
            value = getattr(inner, attribute, None)
            if isinstance(value, Tensor):
                has_memory = value.untyped_storage().size() > 0
                found.append(
                    (f"{name}.{attribute}", type(value).__name__, value.tolist() if has_memory else value.shape)
                )
    return found
