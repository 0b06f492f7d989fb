"""LAYER_ZERO on real ranks: its groups, its oracle, and the collectives that a step makes."""

import contextlib

import replacing
import torch
import torch.distributed as dist
from fsdp_models import loss_of, make, wrap_blocks

from flatparam import ShardingStrategy

MODES = ("LAYER_ZERO", "LAYER_ZERO_NESTED")
_groups = {}


def group_of(ranks):
    """One group for each set of ranks; every rank of the world calls it for every group, in one order."""
    key = dist.get_rank(), tuple(ranks)  # simulated ranks share this module
    if key not in _groups:
        _groups[key] = dist.new_group(list(ranks))
    return _groups[key]


def rows(inner, strided=False):
    """The world cut into inner groups: runs of ranks, or every n-th rank."""
    world = dist.get_world_size()
    count = world // inner
    return [list(range(world))[i::count] if strided else list(range(i * inner, (i + 1) * inner)) for i in range(count)]


def pair(inner, strided=False):
    """``(zero3 group, zero1 group)`` of this rank; the latter is the world."""
    groups = [(row, group_of(row)) for row in rows(inner, strided)]
    return next(group for row, group in groups if dist.get_rank() in row), dist.group.WORLD


def layer_zero(inner, mode="LAYER_ZERO", module=None, wrap=wrap_blocks, strided=False, **arguments):
    """The tests' model, or ``module``, wrapped under ``mode``."""
    return wrap(
        make() if module is None else module,
        sharding_strategy=ShardingStrategy[mode],
        process_group=pair(inner, strided),
        **arguments,
    )


def run_of(model):
    return model._unit.core.root


def micro_batches(model, batches, loss=loss_of):
    """Forward and backward of each, all but the last in ``no_sync``."""
    for x in batches[:-1]:
        with model.no_sync():
            loss(model, x).backward()
    loss(model, batches[-1]).backward()


class Reference:
    """The oracle: an unsharded module whose gradients are the mean over ranks of the sum over micro-batches.

    In the order of the mode: ``LAYER_ZERO`` adds a rank's micro-batches, then the ranks; nested with inner groups of
    some ranks adds, for each micro-batch, the ranks of a group, then the micro-batches, then the groups.
    """

    def __init__(self, module, mode, inner, dtype=None, strided=False):
        world = dist.get_world_size()
        self.module, self.dtype = module, dtype
        nested = mode == "LAYER_ZERO_NESTED" and 1 < inner < world
        self.rows = rows(inner, strided) if nested else [[rank] for rank in range(world)]

    def gradients(self, x, loss=loss_of):
        """Of one backward, in fp32; the parameters and the input cast to ``dtype`` before."""
        params = dict(self.module.named_parameters())
        if self.dtype is None:
            return list(torch.autograd.grad(loss(self.module, x), list(params.values())))
        low = {name: param.detach().to(self.dtype).requires_grad_() for name, param in params.items()}

        def call(x):
            return torch.func.functional_call(self.module, low, (x.to(self.dtype),))

        return [grad.float() for grad in torch.autograd.grad(loss(call, x), list(low.values()))]

    def backward(self, batches, count):
        """Add to ``.grad`` the mean for ``batches(rank)``, ``count`` each. Returns what bounds the error of any other
        order of the sums: ``(terms - 1) * eps * sum of magnitudes``."""
        of = {rank: [self.gradients(x) for x in batches(rank)] for row in self.rows for rank in row}
        world, terms = len(of), len(of) * count
        bounds = []
        for i, param in enumerate(self.module.parameters()):
            in_rows = []
            for row in self.rows:
                over_micro_batches = None
                for k in range(count):
                    over_row = (
                        sum(of[rank][k][i] for rank in row[1:]) + of[row[0]][k][i] if len(row) > 1 else of[row[0]][k][i]
                    )
                    over_micro_batches = over_row if k == 0 else over_micro_batches + over_row
                in_rows.append(over_micro_batches)
            total = in_rows[0]
            for other in in_rows[1:]:
                total = total + other
            total = total / world
            param.grad = total if param.grad is None else param.grad + total
            magnitudes = sum(grads[i].abs() for some in of.values() for grads in some) / world
            bounds.append((terms - 1) * torch.finfo(torch.float32).eps * magnitudes)
        return bounds


NAMES = {
    "all_gather_single": "gather",
    "all_gather_into_tensor": "gather",
    "reduce_scatter_single": "reduce",
    "reduce_scatter_tensor": "reduce",
    "all_reduce": "all_reduce",
}


@contextlib.contextmanager
def counted(inner, strided=False):
    """Collectives as users count them: ``(kind, group, bytes of the whole, dtype)``, the agreements left out."""
    log = []
    world = dist.get_world_size()

    def which(group):
        ranks = dist.get_process_group_ranks(group)
        return "wide" if len(ranks) == world else "inner" if ranks in rows(inner, strided) else "outer"

    def counting(name, original):
        def call(output, source=None, group=None, **kwargs):
            whole = source if NAMES[name] == "reduce" else output
            if whole.dtype != torch.int32:
                log.append((NAMES[name], which(group), whole.numel() * whole.itemsize, whole.dtype))
            arguments = (output,) if source is None else (output, source)
            return original(*arguments, group=group, **kwargs)

        return call

    with replacing.collectives(NAMES, counting):
        yield log
