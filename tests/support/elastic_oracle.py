"""The oracle of elastic jobs: the unsharded module, trained on the batches of the ranks that each step had."""

import math

import elastic_script
import torch

from tests.simulation.reference import divisors


class Unsharded:
    """The module of elastic_script.py, on ``device``. ``clip``: the largest gradient that a step may have."""

    def __init__(self, device="cpu", clip=math.inf):
        self.device = device
        self.net = elastic_script.Net().to(device)
        self.optimizer = elastic_script.optimizer_of(self.net)
        self.clip = clip

    def params(self):
        return torch.cat([param.detach().flatten() for param in self.net.parameters()])

    def step(self, step, size):
        """Train one step of ``size`` ranks. Returns: the loss of each."""
        before, after = divisors(size)
        params, losses = list(self.net.parameters()), []
        sums = [torch.zeros_like(param) for param in params]
        for rank in range(size):
            loss = self.net(elastic_script.batch(step, rank).to(self.device))
            losses.append(loss.item())
            for total, grad in zip(sums, torch.autograd.grad(loss, params), strict=True):
                total += grad / before
        for param, total in zip(params, sums, strict=True):
            param.grad = total / after
        torch.nn.utils.clip_grad_norm_(params, self.clip, math.inf)
        self.optimizer.step()
        return losses
