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
    text = pathlib.Path(__file__).parents[2].joinpath("docs", "layerzero.md").read_text()
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
    parts = [torch.empty_like(tensor, device="cpu") for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach().cpu().contiguous(), group=group)
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


class AsTheReference:
    """Makes the calls that the reference's own runtime makes, in its order, of units that follow each other.

    The last unit is kept after forward, the first one after a backward that reduces nothing; units are gathered ahead;
    a unit's backward ends when the next one's begins; gradients are reset as backward begins; the last unit is not
    offloaded; flags are set from outside.
    """

    def __init__(self, units, inner, dtype=None, offload=False):
        self.sync, self.offload, self.queue, self.reducing, self.copying = True, offload, [], [], []
        self.handles = [one(unit, inner, dtype, offload=offload) for unit in units]
        for unit, handle in zip(units, self.handles, strict=True):
            unit.register_forward_pre_hook(lambda _, args, handle=handle: self.pre_forward(handle))
            unit.register_forward_hook(lambda _, args, output, handle=handle: self.post_forward(handle, output))

    def unshard(self, handle):
        if handle.needs_unshard():
            handle.pre_unshard()
            handle.unshard()
            handle.post_unshard()

    def prefetch(self, handle, distance, state):
        i = self.handles.index(handle) + distance
        if 0 <= i < len(self.handles) and not self.handles[i]._prefetched:
            other = self.handles[i]
            before, other._training_state = other._training_state, state
            self.unshard(other)
            other._training_state, other._prefetched = before, True

    def reshard(self, handle, free):
        handle.reshard(free)
        handle._prefetched = not free

    def pre_forward(self, handle):
        handle._training_state = State.FORWARD
        self.unshard(handle)
        self.prefetch(handle, 1, State.FORWARD)
        handle._use_unsharded_views(as_params=False)

    def post_forward(self, handle, output):
        self.reshard(handle, handle is not self.handles[-1])
        if output.requires_grad:
            output.register_hook(lambda grad: self.pre_backward(handle))
        handle._training_state = State.IDLE

    def pre_backward(self, handle):
        if handle._ran_pre_backward_hook:
            return
        if handle is self.handles[-1]:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self.run_queue()
        handle._training_state = State.BACKWARD_PRE
        self.unshard(handle)
        handle._check_unsharded(handle.flat_param.data)
        self.prefetch(handle, -1, State.BACKWARD_PRE)
        tensors = [tensor for tensor in handle.flat_param._tensors if tensor.requires_grad]
        torch.autograd.graph.register_multi_grad_hook(tensors, lambda grads: self.queue.append(handle))
        if self.offload:
            if not handle.already_load_full_prec_grad():
                handle.alloc_full_prec_grad()
            handle.reload_full_prec_grad()
            handle._check_padded_unsharded(handle.flat_param._full_prec_grad_padded)
        handle.prepare_gradient_for_backward()
        if handle is self.handles[-1]:  # the root's hook on the same output comes after it
            for other in self.handles:
                other._reset_flat_param_grad_info_if_needed()
        handle._ran_pre_backward_hook = True

    @torch.no_grad()
    def run_queue(self):
        while self.queue:
            self.post_backward(self.queue.pop(0))

    def post_backward(self, handle):
        handle._training_state = State.BACKWARD_POST
        if handle.flat_param.grad is None:
            return
        self.reshard(handle, self.sync or handle is not self.handles[0])
        if not handle.already_load_full_prec_grad():
            handle.alloc_full_prec_grad()
        handle.accumulate_grad()
        handle.free_runtime_unshard_grad()
        if self.offload and not self.sync and handle is not self.handles[-1]:
            self.end_copies()
            handle.offload_grad()
            self.copying.append(handle)
        if self.sync:
            while self.reducing:
                self.reducing.pop().wait_reduce_scatter()
            whole, shard = handle._get_reduce_scatter_tensors()
            whole.div_(handle.zero1_world_size)
            group = handle._get_reduce_scatter_group()
            handle._rs_handle = dist.reduce_scatter_tensor(shard, whole, group=group, async_op=True)
            self.reducing.append(handle)
            handle.set_shard_grad(shard)

    def end_copies(self):
        while self.copying:
            self.copying.pop().free_full_prec_grad()

    @torch.no_grad()
    def finish(self):
        self.run_queue()
        for handle in self.handles:
            handle._ran_pre_backward_hook = False
            flat = handle.flat_param
            if self.sync and flat.data_ptr() != flat._zero1_shard.data_ptr():
                self.reshard(handle, True)
            handle._training_state = State.IDLE
            if self.sync:
                handle._prefetched = handle._param_synced = handle._grad_synced = False
                handle._needs_param_sync, flat._zero3_shard = True, None
        self.end_copies()
        while self.reducing:
            self.reducing.pop().wait_reduce_scatter()
        for handle in self.handles:
            if self.sync and handle.flat_param.requires_grad:
                handle.prepare_gradient_for_zero1()

    def backward(self, losses):
        for i, loss in enumerate(losses):
            self.sync = i == len(losses) - 1
            loss().backward()
