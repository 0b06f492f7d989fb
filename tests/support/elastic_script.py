"""A script of ``flatparam.elastic`` for real processes. It prints what each step had; see tests/elastic/test_launch.py.

Arguments: the number of steps, and faults as ``MEMBER:STEP:KIND``, where KIND is "kill", "raise", "stop" or "exit".
They strike in torchrun's first start. The environment's ELASTIC_DEVICE: "cuda", "sim", or "sim:staged", whose
collectives go through the host.
"""

import datetime
import functools
import os
import signal
import sys
import time

import simulated
import staged
import torch
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import elastic
from flatparam.elastic.epochs import MEMBER


class Weights(nn.Module):
    """Its gradients are whole numbers, so that sums of them have the same bits in each order."""

    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(rows * 8.0).view(rows, 8) / 64)

    def forward(self, x):
        return x, (self.weight * x[: len(self.weight)]).sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Weights(rows) for rows in (3, 5, 7))

    def forward(self, x):
        return sum(part(x)[1] for part in self.parts)


def optimizer_of(module):
    return torch.optim.AdamW(module.parameters(), lr=0.125, foreach=False)


def batch(step, rank):
    return torch.randint(-4, 5, (7, 8), generator=torch.Generator().manual_seed(100 * step + rank)).float()


def chosen():
    """(the device, the backend of the world, what is called at the end): ranks may share a GPU."""
    kind = os.environ.get("ELASTIC_DEVICE", "cpu")
    if kind == "cuda":
        ranks, count = int(os.environ["WORLD_SIZE"]), torch.cuda.device_count()
        if ranks > count:
            staged.use(staged.build(), "cuda")
        device = torch.device("cuda", int(os.environ["RANK"]) % count)
        torch.cuda.set_device(device)
        return device, "cpu:gloo,cuda:staged" if ranks > count else None, torch.cuda.synchronize
    if kind.startswith("sim"):
        module, backend = simulated.use(simulated.build()), None
        if kind == "sim:staged":
            staged.use(staged.build(), "sim")
            backend = "cpu:gloo,sim:staged"
        return torch.device("sim", 0), backend, module.synchronize  # which tells of writes to memory that was freed
    return torch.device("cpu"), None, lambda: None


def built(device):
    net = Net()
    for i in range(len(net.parts)):
        net.parts[i] = FSDP(net.parts[i], device_id=device)
    model = FSDP(net, device_id=device)
    return model, optimizer_of(model)


def strike(kind):
    if kind == "raise":
        raise ValueError("this batch is bad")
    if kind == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def say(text):
    os.write(1, f"{text}\n".encode())  # at once: other ranks write, too


def main(until, *faults):
    me = os.environ[MEMBER]
    strikes = {(member, int(step)): kind for member, step, kind in (fault.split(":") for fault in faults)}
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        strikes = {}
    device, backend, synchronize = chosen()
    # a wait of the staged backend cannot be cut, so a stopped rank is known at its time-out alone
    settings = {"timeout": datetime.timedelta(seconds=20)} if backend else {}
    model, optimizer = elastic.start(functools.partial(built, device), backend=backend, **settings)
    for step in elastic.steps(model, optimizer, int(until)):
        with elastic.survive():
            time.sleep(0.1 if elastic.size() == int(os.environ["WORLD_SIZE"]) else 0.4)  # new processes need seconds
            begin = time.time()
            loss = model(batch(step, elastic.rank()).to(device))
            if kind := strikes.pop((me, step), None):
                say(f"struck {me} {time.time()}")
                strike(kind)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            say(f"step {step} {elastic.size()} {me} {begin}")
    params = torch.cat([value.flatten() for value in model.state_dict().values()]).cpu()
    synchronize()
    say(f"end {params.numpy().tobytes().hex()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
