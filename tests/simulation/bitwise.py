"""Checks of one rank at quiet points. Each raises an AssertionError that names the first difference.

``same``: ``check_same``, or a ``Later`` for values on a device.
"""

import torch

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp.unit.local_params import local_params_of


def is_same(found, wanted):
    """Whether the tensors have the same values; training may diverge, and NaN is NaN."""
    same = (found == wanted) | (found.isnan() & wanted.isnan()) if found.shape == wanted.shape else torch.zeros(1)
    return bool(same.all())


def check_same(found, wanted, name):
    assert is_same(found, wanted), f"{name} differs by {(found - wanted).abs().max()}"


class Later:
    """Compares values of a device at the end: a look at them would wait for its late streams."""

    def __init__(self):
        self._all = []

    def __call__(self, found, wanted, name):
        self._all.append((found.detach().clone(), wanted, name))

    def settle(self):
        for found, wanted, name in self._all:
            check_same(found.cpu(), wanted, name)


def check_parameters(model, wanted, same=check_same):
    """This rank's shards are its part of the unsharded parameters."""
    for local in local_params_of(model, buffers=False):
        for name in local.names:
            same(local.flat, local.slice_of(wanted[name]), f"`{name}`")


def check_whole(model, wanted, same=check_same):
    """The parameters of a gathered model."""
    for name, param in model.named_parameters():
        same(param, wanted[name], f"whole `{name}`")


def gradient_of(local):
    """The gradient of a part of a parameter that this rank has, flat, in the memory of ``.grad``; or None."""
    grad = local.owner.grad
    if grad is None or local.unit is None or local.unit.options.use_orig_params:
        return None if grad is None else grad.reshape(-1)
    return grad.narrow(0, local.shard_slice.start, local.numel) if local.numel else local.flat[:0]


def check_gradients(model, wanted, same=check_same):
    """The gradients of this rank's shards; None counts as zeros."""
    for local in local_params_of(model, buffers=False):
        grad = gradient_of(local)
        for name in local.names:
            whole = wanted[name]
            if whole is None or grad is None:
                there = grad if whole is None else local.slice_of(whole)
                if there is not None:
                    same(there, torch.zeros(there.shape), f"`{name}` has {'no' if grad is None else 'a'} gradient: it")
            else:
                same(grad, local.slice_of(whole), f"the gradient of `{name}`")


def check_rest(model):
    """No unit is whole but those that stay whole; no gather is pending."""
    for unit in FSDP.fsdp_modules(model):
        core = unit._unit.core
        if not any(flat_param.placement.param is not None for flat_param in unit._unit.flat_params):
            continue
        assert not core.is_gathered, f"a unit of {unit.module} is whole"
