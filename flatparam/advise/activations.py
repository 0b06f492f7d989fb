"""Measure the activations that a block keeps for backward, for ``advise --activations``. No process group is needed."""

from typing import Any

import torch
from torch import Tensor, nn


def bytes_per_token(block: nn.Module, *inputs: Any, tokens: int) -> int:
    """Run one forward of ``block`` and return the bytes that autograd keeps for backward, by token, rounded up.

    Multiply the result by the number of equal blocks. ``inputs``: of the forward, in the dtype of training; a small
    batch on a CPU is enough, but the length of sequences counts if attention keeps its weights. ``tokens``: in
    ``inputs``. A storage counts once, and those of parameters and buffers do not count. Runs under autocast and with
    checkpoints of activations as training does.
    Raises: ValueError if ``tokens`` is below 1.
    """
    if tokens < 1:
        raise ValueError(f"expected tokens to be at least 1, got {tokens}")
    own = {held.untyped_storage().data_ptr() for held in (*block.parameters(), *block.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}  # they stay alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = block(*map(_of_a_block_before, inputs))
    del result  # the graph lives until here
    return -(-sum(storage.nbytes() for storage in kept.values()) // tokens)


def _of_a_block_before(value: Any) -> Any:
    """Return a floating tensor with a gradient, as the output of another block has one; other values as they are."""
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if is_floating else value
