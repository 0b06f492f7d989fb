"""Programs for ranks that fail: they train, call ``user_code()`` where users do, and catch exceptions or do not."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.fsdp.desync import checked_collectives, torch_collectives
from flatparam.fsdp.desync.events import SetupCollective
from flatparam.fsdp.errors import OrderError

from .faults import UserError, user_code

STEPS = 4
LR = 0.125
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


class CallsUserCode(torch.autograd.Function):
    """Calls ``user_code()`` in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        user_code()
        return grad


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        user_code()
        return CallsUserCode.apply(self.linear(x).tanh())


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def batch(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def wrapped(strategy, min_unit_bytes=0):
    net, arguments = model(), {"sharding_strategy": ShardingStrategy[strategy], "min_unit_bytes": min_unit_bytes}
    for i in range(len(net)):
        net[i] = FSDP(net[i], **arguments)
    return FSDP(net, **arguments)


def hook(net, optimizer):
    """Register hooks of each kind that call ``user_code()``: of modules, of their outputs, before ``step()``."""

    def call(*_):
        user_code()

    for module in (net[0], net[2].module.linear, net[3]):
        module.register_forward_pre_hook(call)
        module.register_forward_hook(call)
        module.register_forward_hook(lambda module, args, output: output.register_hook(call) and None)
        module.register_full_backward_hook(call)
    optimizer.register_step_pre_hook(call)


def train(rank, strategy="FULL_SHARD", pause=0.01, hooks=False, min_unit_bytes=0):
    """Train; an exception ends the rank. Each step begins after ``pause`` seconds. Returns the parameters, in order."""
    net = wrapped(strategy, min_unit_bytes)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    if hooks:
        hook(net, optimizer)
        optimizer.register_step_post_hook(lambda *_: user_code())
    for step in range(STEPS):
        time.sleep(pause)
        user_code()
        net(batch(step, rank)).square().mean().backward()
        net.clip_grad_norm_(1e6)
        optimizer.step()
        optimizer.zero_grad()
    state = net.state_dict()
    user_code()
    return list(state.values())


def train_and_catch(rank, strategy="FULL_SHARD", hooks=False, min_unit_bytes=0):
    """Train, and catch what user code raises. The rank then goes on with the next step.

    Returns the parameters, and the steps that raised.
    """
    net = wrapped(strategy, min_unit_bytes)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    if hooks:
        hook(net, optimizer)
    skipped = []
    for step in range(STEPS):
        try:
            user_code()
            net(batch(step, rank)).square().mean().backward()
            optimizer.step()
        except UserError:
            skipped.append(step)
        optimizer.zero_grad()
    return list(net.state_dict().values()), skipped


def begin_what_fails(rank, call):
    """Begin a collective that torch refuses at once, as the connection to rank 1, which is killed, is broken."""
    from . import ranks

    net = wrapped("FULL_SHARD")
    net(batch(0, rank)).square().mean().backward()
    if rank == 1:
        ranks.kill(rank)
    time.sleep(1.0)

    def refused(*args, **options):
        raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")

    if call == "exchange":
        checked_collectives.exchange(SetupCollective.BUILDS, refused, torch.ones(1), group=dist.group.WORLD)
    elif call == "run":
        checked_collectives.run(refused, torch.ones(1), group=dist.group.WORLD)
    elif call == "state_dict":
        torch_collectives.WATCHED = ((vars(dist), "all_gather", refused),)  # as if it were torch's
        torch_collectives._function = lambda kind: refused
        net.state_dict()
    else:
        dist.all_reduce = refused
        net.clip_grad_norm_(1.0)


def scale_a_bare_model(rank):
    """Train a wrapped model, then a bare one with torch's ``ShardedGradScaler``, to which rank 1 does not come."""
    net = wrapped("FULL_SHARD")
    net(batch(0, rank)).square().mean().backward()
    bare = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(bare.parameters(), lr=LR)
    scaler = ShardedGradScaler(device="cpu")
    scaler.scale(bare(torch.ones(1, 2)).sum()).backward()
    if rank == 1:
        raise UserError("batch 0 is bad")
    scaler.step(optimizer)


def build_beside_the_lost(rank):
    """Build two units. Before the second rank 4 is killed, and then rank 2 raises; rank 1 comes when both are known.

    Returns the text of the OrderError that the second has raised.
    """
    from . import ranks

    FSDP(nn.Linear(4, 4))
    time.sleep({4: 1.0, 2: 1.2, 1: 1.5}.get(rank, 0.0))
    if rank == 4:
        ranks.kill(rank)
    if rank == 2:
        raise UserError("batch 17 is bad")
    try:
        FSDP(nn.Linear(4, 4))
    except OrderError as error:
        time.sleep(10.0)  # else its end would tell the others the text
        return str(error)


def unsharded(size, skipped=()):
    """The parameters after the same training in one process, without the steps ``skipped``."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for step in range(STEPS):
        if step in skipped:
            continue
        grads = [
            torch.autograd.grad(net(batch(step, rank)).square().mean(), list(net.parameters())) for rank in range(size)
        ]
        for param, *of_ranks in zip(net.parameters(), *grads, strict=True):
            total = of_ranks[0] / size
            for grad in of_ranks[1:]:
                total = total + grad / size
            param.grad = total
        optimizer.step()
    return [param.detach() for param in net.parameters()]
