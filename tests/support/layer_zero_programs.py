"""Programs of random calls, by LayerZero units driven by hand and by an unsharded model."""

import random

import pytest
import torch
import torch.distributed as dist
from fsdp_models import data, loss_of
from gloo import note
from layer_zero_driver import AsTheReference, State, drive, full_grads, full_params, summoned
from torch import nn

from flatparam.layer_zero import agree

CALLS = [
    *(
        "synced",
        "synced",
        "unsynced",
        "unsynced",
        "step",
        "step",
        "clear",
        "zero",
        "clear one",
        "write",
        "write a shard",
    ),
    *("load", "evaluate", "infer", "agree", "sync_params", "summon", "two forwards", "forward only", "raise"),
]


def chain():
    """Units that follow each other; what the last one returns is what the model returns."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)) for _ in range(3)))


class Program:
    """Runs one; ``unreduced`` are the sums of micro-batches that the unsharded model's ``.grad`` does not have yet."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.world = dist.get_world_size()
        inner = self.random.choice([n for n in (1, 2, self.world) if self.world % n == 0])
        offload = self.random.random() < 0.5
        self.as_reference = self.random.random() < 0.5
        self.model, self.reference = chain(), chain()
        if self.as_reference:
            self.driver = AsTheReference(list(self.model), inner, offload=offload)
        else:
            self.driver = drive(self.model, inner, offload=offload, units=list(self.model))
        self.handles = self.driver.handles
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (self.model, self.reference)]
        self.params = list(self.reference.parameters())
        self.unreduced = [torch.zeros_like(p) for p in self.params]
        self.has_unreduced = False
        self.data = 1000 * seed

    def run(self, calls):
        for _ in range(calls):
            call = self.random.choice(CALLS)
            note(call)
            self.data += 10
            getattr(self, call.replace(" ", "_"))()
            if not self.has_unreduced and call != "clear one":
                self.check_gradients()
        self.summon()

    def check_gradients(self):
        for handle in self.handles:
            handle.pre_unshard()  # takes notice of what was cleared
            handle._reset_flat_param_grad_info_if_needed()
            handle.reshard(True)
        wanted = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        self.compare(full_grads(self.handles, self.model), wanted)

    def compare(self, found, wanted):
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=2e-4, atol=2e-5)

    def loss(self, k=0):
        return loss_of(self.model, data(self.data + k))

    def add_unsharded(self, count=1):
        for k in range(count):
            for rank in range(self.world):
                grads = torch.autograd.grad(loss_of(self.reference, data(self.data + k, rank)), self.params)
                for total, grad in zip(self.unreduced, grads, strict=True):
                    total += grad

    def synced(self):
        count = self.random.choice((1, 2))
        self.driver.backward([lambda k=k: self.loss(k) for k in range(count)])
        self.add_unsharded(count)
        for param, total in zip(self.params, self.unreduced, strict=True):
            param.grad = total / self.world + (0 if param.grad is None else param.grad)
            total.zero_()
        self.has_unreduced = False

    def unsynced(self):
        self.driver.sync = False
        self.loss().backward()
        for handle in self.handles:
            handle._training_state = State.IDLE
        self.add_unsharded()
        self.has_unreduced = True

    def two_forwards(self):
        if self.as_reference:  # its hooks are on the tensors of the last forward
            return
        self.driver.sync = False
        for loss in [self.loss(0), self.loss(1)]:
            loss.backward()
            for handle in self.handles:
                handle._training_state = State.IDLE
        self.add_unsharded(2)
        self.has_unreduced = True

    def forward_only(self):
        self.loss()

    def step(self):
        if self.has_unreduced:
            with pytest.raises(ValueError, match="not reduced over the ranks"):
                self.optimizers[0].step()
        else:
            for optimizer in self.optimizers:
                optimizer.step()

    def clear(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for total in self.unreduced:
            total.zero_()
        self.has_unreduced = False

    def zero(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)
        for total in self.unreduced:
            total.zero_()

    def clear_one(self):
        i = self.random.randrange(len(self.params))
        list(self.model.parameters())[i].grad = self.params[i].grad = None
        self.unreduced[i].zero_()

    def write(self):
        with torch.no_grad():
            for param in [*self.model.parameters(), *self.params]:
                param.mul_(0.95)

    def write_a_shard(self):
        i = self.random.randrange(len(self.handles))
        with torch.no_grad():
            self.handles[i].flat_param._zero1_shard.mul_(1.01)
            for param in self.reference[i].parameters():
                param.mul_(1.01)

    def load(self):
        self.model.load_state_dict({name: value * 0.98 for name, value in self.model.state_dict().items()})
        with torch.no_grad():
            for param in self.params:
                param.mul_(0.98)

    def evaluate(self):
        with torch.no_grad():
            self.compare([self.model(data(self.data))], [self.reference(data(self.data))])

    def infer(self):
        with torch.inference_mode():
            found = self.model(data(self.data)).clone()
        self.compare([found], [self.reference(data(self.data))])

    def agree(self):
        agree(self.handles)
        self.evaluate()

    def sync_params(self):
        for handle in self.handles:
            handle._prefetched = False
            handle.sync_params()

    def summon(self):
        with summoned(self.handles):
            self.compare(self.model.parameters(), self.params)
        for handle in self.handles:
            handle._prefetched = False
        self.compare(full_params(self.handles, self.model), self.params)

    def raise_(self):
        def refuse(*_):
            raise KeyError("on purpose")

        forward, synced = self.random.random() < 0.5, self.random.random() < 0.5
        inside = self.model[1][0 if forward else 2]
        hook = (inside.register_forward_hook if forward else inside.register_full_backward_hook)(refuse)
        with pytest.raises(KeyError, match="on purpose"):
            self.synced() if synced else self.unsynced()
        hook.remove()
        if self.as_reference:
            for queue in (self.driver.queue, self.driver.reducing, self.driver.copying):
                queue.clear()
        for handle in self.handles:
            handle.recover()
        for total in self.unreduced:
            total.zero_()
        self.has_unreduced = False


setattr(Program, "raise", Program.raise_)


def programs(seeds, calls=14):
    for seed in seeds:
        program = Program(seed)
        try:
            program.run(calls)
        except Exception as error:
            raise AssertionError(f"program {seed}") from error
