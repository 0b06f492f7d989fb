"""The driver of docs/layerzero.md as it stands there, and what tests do with the handles that it drives."""

import contextlib
import pathlib
import re

import torch
import torch.distributed as dist
from fsdp_models import data, loss_of, make
from layer_zero_ranks import pair

from flatparam.layer_zero import FlatParamHandle, HandleTrainingState

State = HandleTrainingState
CPU = torch.device("cpu")


def _from_the_docs():
    text = pathlib.Path(__file__).parents[1].joinpath("docs", "layerzero.md").read_text()
    found = next(found for found in re.finditer(r"```python\n(.*?)```", text, re.S) if "class Driver" in found[1])
    before = "\n" * text.count("\n", 0, found.start(1))  # so that tracebacks show the right lines
    names = {}
    exec(compile(before + found[1], "docs/layerzero.md", "exec"), names)
    return names["Driver"]


Driver = _from_the_docs()


def drive(model, inner, param_dtype=None, offload=False, units=None, strided=False):
    """Blocks and the rest of ``model`` as units."""
    units = [*model.blocks, model] if units is None else units
    return Driver(units, CPU, *pair(inner, strided), param_dtype, offload)


def one(module, inner=1, param_dtype=None, reduce_dtype=None, offload=False, shard=True, params=None):
    """A handle of all parameters of ``module``, ready for a step."""
    params = list(module.parameters()) if params is None else params
    handle = FlatParamHandle(params, module, CPU, param_dtype, reduce_dtype, *pair(inner), offload)
    if shard:
        handle.shard()
        handle.init_flat_param_attributes()
    return handle


def losses(model, step, count, loss=loss_of):
    return [lambda k=k: loss(model, data(100 * step + k)) for k in range(count)]


def unsharded_backward(model, step, count, loss=loss_of):
    """Add to ``.grad`` the mean over ranks of the sum over micro-batches, each rank's sum taken first."""
    world, params = dist.get_world_size(), list(model.parameters())
    total = None
    for rank in range(world):
        of_rank = None
        for k in range(count):
            grads = torch.autograd.grad(
                loss(model, data(100 * step + k, rank)), params, allow_unused=True, materialize_grads=True
            )
            of_rank = grads if of_rank is None else [a + b for a, b in zip(of_rank, grads, strict=True)]
        total = of_rank if total is None else [a + b for a, b in zip(total, of_rank, strict=True)]
    for param, grad in zip(params, total, strict=True):
        grad = grad / world
        param.grad = grad if param.grad is None else param.grad + grad


def unshard(handle, state):
    handle._training_state = state
    handle.pre_unshard()
    handle.unshard()
    handle.post_unshard()


def reshard(handle, free=True):
    handle.reshard(free)
    handle.post_reshard()
    handle._training_state = State.IDLE


@contextlib.contextmanager
def summoned(handles):
    for handle in handles:
        unshard(handle, State.SUMMON_FULL_PARAMS)
    try:
        yield
    finally:
        for handle in handles:
            reshard(handle)


def gathered(tensor, group=None):
    """All ranks' ``tensor`` of one size, joined in rank order."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def full_params(handles, model):
    with summoned(handles):
        return [param.detach().clone() for param in model.parameters()]


def full_grads(handles, model):
    """Whole reduced gradients, from the shards and the layout."""
    found = {}
    for handle in handles:
        flat = handle.flat_param
        grad = flat.grad if flat.grad is not None else torch.zeros_like(flat)
        whole = gathered(grad)
        for param, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            found[param] = whole[info.flat_param_start_idx : info.flat_param_end_idx + 1].view(shape)
    return [found[param] for param in model.parameters()]


def held(tensor):
    """Bytes of its memory."""
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


def twins(inner, **arguments):
    """A model that is driven, its driver, and the same model unsharded."""
    model = make()
    return model, drive(model, inner, **arguments), make()
