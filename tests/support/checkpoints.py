"""Models that are saved and loaded, at any strategy, and what they have: read through summoned parameters alone."""

import itertools

import torch
import torch.distributed as dist
from fsdp_models import Model, data, full_params, loss_of
from layer_zero_ranks import group_of, rows
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy as S

STRATEGIES = ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD", "ZERO_1", "LAYER_ZERO", "LAYER_ZERO_NESTED")


class Odd(Model):
    """With tied weights, a transposed one, a 4-D one in another memory format, a scalar, and a buffer."""

    def __init__(self):
        super().__init__()
        self.tied = nn.Linear(5, 3, bias=False)
        self.tied.weight = nn.Parameter(self.first.weight.detach().t().clone())
        self.again = nn.Linear(5, 3, bias=False)
        self.again.weight = self.tied.weight
        self.turned = nn.Parameter(torch.randn(7, 6).t())
        self.image = nn.Parameter(torch.randn(3, 4, 2, 5).to(memory_format=torch.channels_last))
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.register_buffer("seen", torch.zeros(2, 3))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen += 1
        more = (self.turned * self.turned).sum() + self.image.pow(3).sum() * 1e-3
        return super().forward(x) * self.gain + self.again(super().forward(x) * self.tied.weight.sum(0)) + more


def groups(strategy, inner=2):
    """Arguments for the process group of a strategy in this world."""
    world = dist.get_world_size()
    if strategy in ("LAYER_ZERO", "LAYER_ZERO_NESTED"):
        mine = next(row for row in rows(min(inner, world)) if dist.get_rank() in row)
        for row in rows(min(inner, world)):
            group_of(row)
        return (group_of(mine), dist.group.WORLD)
    if strategy == "HYBRID_SHARD":
        inner = min(inner, world)
        ranks = range(world)
        shards = [list(ranks[i : i + inner]) for i in range(0, world, inner)]
        columns = [list(column) for column in zip(*shards, strict=True)]
        made = {tuple(row): group_of(row) for row in itertools.chain(shards, columns)}
        me = dist.get_rank()
        return tuple(next(made[tuple(row)] for row in side if me in row) for side in (shards, columns))
    return None


def wrapped(strategy, use_orig_params=True, units=True, cls=Odd, seed=0, **arguments):
    """A model of that strategy; with ``units`` its blocks are units of their own, else it is one."""
    torch.manual_seed(seed)
    module = cls()
    arguments |= {
        "process_group": groups(strategy),
        "sharding_strategy": S[strategy],
        "use_orig_params": use_orig_params,
    }
    if units:
        for i, block in enumerate(module.blocks):
            module.blocks[i] = FSDP(block, **arguments)
    return FSDP(module, **arguments)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)


def train(model, optimizer, first, steps):
    """Returns the losses."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, data(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def full_state(model, optimizer=None):
    """Parameters, buffers, and each of the optimizer's tensors, whole: shown through the parameters' own places."""
    found = {name: value for name, value in full_params(model).items()}
    found |= {
        name.replace("_fsdp_wrapped_module.", ""): b.clone() for name, b in model.named_buffers() if "seen" in name
    }
    if optimizer is None:
        return found
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [param.detach().clone() for param in params]
    for key in ("exp_avg", "exp_avg_sq", "step"):
        for param in params:
            value = optimizer.state.get(param, {}).get(key)
            param.detach().copy_(torch.zeros_like(param) if value is None else value)
        found |= {f"{key} of {name}": value for name, value in full_params(model).items()}
    for param, value in zip(params, before, strict=True):
        param.detach().copy_(value)
    return found


def differing(a, b):
    """The names of what is not the same bit for bit."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    return [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]
