"""Events that one rank alone causes or sees decide no collective of the drop-in.

Each rank is disturbed at random, and differently: optimizers of other models step, by a thread too, models of a group
of its own train, tensors get new versions, garbage is collected, and evaluations are of another mode. The oracle is
torch's handle in the same program, bit for bit; it looks at none of these.
"""

import contextlib
import gc
import itertools
import random

import pytest
import torch
import torch.distributed as dist
from disturbing import stepping_in_a_thread
from fsdp_models import data, loss_of, make, wrap_blocks
from gloo import handle_of, note, run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

pytestmark = pytest.mark.multiprocess
CPU = torch.device("cpu")
WAYS = list(itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), (True, False), (True, False)))


class Disturbing:
    """What happens on this rank alone: call it wherever a program may do something."""

    def __init__(self, model, seed, group):
        self.model, self.random = model, random.Random(seed)
        self.probe = nn.Linear(2, 2)
        self.other = FSDP(nn.Linear(3, 3), process_group=group, use_orig_params=True, device_id=CPU)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.probe, self.other)]
        self.calls = 0

    def __call__(self, *of_hook):
        self.calls += 1
        between_passes = () if of_hook else (self.write_the_same,)
        for act in (self.step_probe, self.train_other, self.collect, *between_passes):
            if self.random.random() < 0.4:
                act()

    def step_probe(self):
        for param in self.probe.parameters():
            param.grad = torch.ones_like(param)
        self.optimizers[0].step()

    def train_other(self):
        with torch.enable_grad():
            self.other(torch.ones(1, 3)).sum().backward()
        self.optimizers[1].step()
        self.optimizers[1].zero_grad()

    def write_the_same(self):
        """To what this rank has, on this rank alone: versions change, values do not."""
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(1.0)

    def collect(self):
        gc.collect(0)


def clamp_biases(model):
    """As programs do it: only what this rank has something of."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "bias" in name and param.numel():
                param.clamp_(-0.01, 0.01)


def whole_of(model):
    with FSDP.summon_full_params(model, writeback=False):
        return [param.detach().clone() for param in model.parameters()]


def evaluate_each_in_its_own_mode(model, step):
    """The forwards have the same collectives on all ranks, whatever the modes are."""
    found = []
    for number in range(3):
        model.train((dist.get_rank() + number) % 3 == 0)
        with torch.set_grad_enabled((dist.get_rank() + number) % 2 == 0):
            found.append(model(data(step)).detach())
    model.train()
    return found


def disturbed(strategy, uo, ahead):
    me = dist.get_rank()
    alone = [dist.new_group([rank]) for rank in range(2)][me]
    found = []
    for kind in ("torch", "flatparam"):
        with handle_of(kind):
            settings = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo, "device_id": CPU}
            model = wrap_blocks(make(), FSDP, forward_prefetch=ahead, **settings)
            disturb = Disturbing(model, 7 + me, alone)
            for inner in model.modules():
                if isinstance(inner, nn.Linear):
                    inner.register_forward_hook(disturb)
                    inner.register_full_backward_hook(disturb)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(5):
                note(f"{kind} {strategy} uo={uo} ahead={ahead} {step}")
                with stepping_in_a_thread(disturb.random) if step % 2 else contextlib.nullcontext():
                    for k in range(3):
                        with model.no_sync() if k < 2 else contextlib.nullcontext():
                            loss = loss_of(model, data(10 * step + k))
                            loss.backward()
                            disturb()
                            found.append(loss.detach())
                        if k < step:
                            clamp_biases(model)
                            disturb()
                optimizer.step()
                optimizer.zero_grad()
                disturb()
                found += [*evaluate_each_in_its_own_mode(model, step), *whole_of(model)]
                disturb()
            assert disturb.calls > 100
    half = len(found) // 2
    for number in range(half):
        assert torch.equal(found[number], found[half + number]), number


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("strategy", "uo", "ahead"), WAYS)
def test_what_one_rank_does_decides_nothing_that_ranks_do_together(strategy, uo, ahead):
    run_ranks(disturbed, 2, strategy, uo, ahead)


class Little(nn.Module):
    """Of ``scale``, a unit of its own, rank 1 has nothing but padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.scale, self.last = nn.Linear(3, 3), nn.Linear(1, 1, bias=False), nn.Linear(3, 1)

    def forward(self, x):
        return self.last(self.scale(self.first(x).unsqueeze(-1)).squeeze(-1))


def stepped(prepared):
    """Step the parameters of which this rank has something between two evaluations, with what is gathered."""
    x = torch.linspace(-1, 1, 6).view(2, 3)
    module = Little()
    with handle_of("flatparam"):
        policy = ModuleWrapPolicy({nn.Linear})
        settings = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True, "device_id": CPU}
        model = FSDP(Little(), auto_wrap_policy=policy, **settings)
        optimizers = [
            torch.optim.SGD([param for param in m.parameters() if param.numel()], lr=0.1) for m in (module, model)
        ]
        if prepared:  # before the first forward, as programs make the states of an optimizer
            for optimizer in optimizers:
                optimizer.step()
        for _ in range(3):
            with torch.no_grad():
                assert torch.equal(model(x), module(x))
            for m in (module, model):
                m(x).square().sum().backward()
            with torch.no_grad():
                assert torch.equal(model(x), module(x))  # leaves all gathered
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return True


@pytest.mark.parametrize("prepared", [False, True])
def test_an_optimizer_of_what_a_rank_has_counts_on_all_ranks(prepared):
    assert run_ranks(stepped, 2, prepared, timeout=60) == [True, True]
