"""A program of ``flatparam.elastic`` for ranks that are lost and join, and what it must compute."""

import datetime
import time

import torch
import torch.distributed as dist
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint, elastic
from flatparam.elastic import training
from flatparam.elastic.snapshot import checksum
from flatparam.fsdp.desync.stores import store_of_world
from flatparam.fsdp.errors import OrderError

from .faults import user_code
from .reference import divisors

UNTIL = 6


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def optimizer_of(module):
    return torch.optim.AdamW(module.parameters(), lr=0.125, foreach=False)


def built(device=None):
    module = net()
    for i in range(len(module)):
        module[i] = FSDP(module[i], device_id=device)
    model = FSDP(module, device_id=device)
    return model, optimizer_of(model)


def batch(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(module, step, rank, device="cpu"):
    return module(batch(step, rank).to(device)).square().mean()


def change(tensor):
    """Flip a bit in the middle of the bytes of ``tensor``."""
    tensor[tensor.numel() // 2 + 1] ^= 4


def harm(generation, before, what):
    """Spoil a rank's part of a committed step. ``before``: its part of the step before."""
    if what == "copy changes":
        change(generation.data)
    elif what == "parity changes":
        change(generation.parity)
    elif what == "parity is made of changed bytes":
        change(generation.parity)
        generation._sums = checksum(generation.parity)
    elif what == "copy is of the step before":
        generation.data.copy_(before.data)
    else:
        assert what == "parity is of the step before"
        generation.parity, generation._sums = before.parity, before._sums


def meet(session, what, folder):
    """Do to this rank ``what`` a test wants."""
    if what == "is killed":
        from .ranks import kill

        kill(dist.get_rank())
    elif what == "loses a connection":
        raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection reset by peer")
    elif what == "saves":
        checkpoint.save(folder, session.model, session.optimizer, overwrite=True)
    else:
        harm(session.generations[-1], session.generations[-2], what)


def happen(session, rank, step, events, folder, most):
    """Let the first of ``events`` happen that are of this step, at most ``most``, and remove them."""
    for _ in range(most):
        if not events or events[0][0] != step:
            return
        _, one, what = events.pop(0)
        if one in (rank, None):
            meet(session, what, folder)


def train(rank, size, redundancy="parity", joins=(), pause=0.05, events=(), folder=None, at_begin=(), on_device=False):
    """Train on the first ``size`` ranks. A rank after those is a new process.

    ``joins``: for each of those its slot, and the second at which it begins; ``events``: step, rank (None: all), and
    what happens to it once, after the optimizer's step, in the order of steps; ``at_begin``: the same before the
    forward, one of them in each attempt of a step; ``folder``: of checkpoints; ``on_device``: whether to train on this
    rank's simulated device.
    Returns: step -> number of ranks and loss of the last attempt; the parameters, None if a rank is lost after the
    training; the scheduler's step and the next random number. None for a process that comes after the end.
    """
    store = store_of_world()
    dist.destroy_process_group()
    member = f"{rank}.0"
    if rank >= size:
        slot, second = joins[rank - size]
        member = f"{slot}.1"
        time.sleep(second)
    device = torch.device("sim", torch.sim.current_device()) if on_device else torch.device("cpu")
    session = training.Session(store, member, size, redundancy, 1, datetime.timedelta(seconds=60))
    try:
        model, optimizer = training.begin_session(session, lambda: built(device if on_device else None))
    except SystemExit as error:
        if error.code:
            raise
        return None
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    log, events, at_begin = {}, list(events), list(at_begin)
    for step in elastic.steps(model, optimizer, UNTIL, extra=schedule):
        with elastic.survive():
            time.sleep(pause)
            happen(session, rank, step, at_begin, folder, 1)
            user_code()
            torch.rand(())
            loss = loss_of(model, step, elastic.rank(), device)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            log[step] = (elastic.size(), loss.item())
            assert len(session.generations) <= 3
            happen(session, rank, step, events, folder, len(events))
    end = (schedule.last_epoch, torch.rand(()).item())
    try:
        return log, [value.cpu() for value in model.state_dict().values()], end
    except OrderError:
        return log, None, end


def train_on_device(rank, size, at_begin=()):
    """Train as ``train``, on the simulated device of this rank."""
    return train(rank, size, at_begin=at_begin, on_device=True)


def unsharded(sizes):
    """Train the module alone, on the batches of ``sizes[step]`` ranks.

    Returns: losses by step and rank; the parameters; the scheduler's step and the next random number.
    """
    module = net()
    optimizer = optimizer_of(module)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for step, size in enumerate(sizes):
        before, after = divisors(size)
        sums = [torch.zeros_like(param) for param in module.parameters()]
        losses.append([])
        for rank in range(size):
            loss = loss_of(module, step, rank)
            losses[-1].append(loss.item())
            grads = torch.autograd.grad(loss, list(module.parameters()))
            for total, grad in zip(sums, grads, strict=True):
                total += grad / before
        for param, total in zip(module.parameters(), sums, strict=True):
            param.grad = total / after
        optimizer.step()
        schedule.step()
        torch.rand(())
    end = (schedule.last_epoch, torch.rand(()).item())
    return losses, [param.detach() for param in module.parameters()], end
