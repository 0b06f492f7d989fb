"""The drop-in trains as the unsharded module if the user moves the model, or writes to it, between two steps.

Oracle: the unsharded module, to which the same is done. A plan is a word: s is a pass, n a pass in no_sync(), z is
zero_grad(), u an update, e an evaluation; c is model.cpu(), where nothing moves, k moves all to other memory, f is
model.float(), and model.double() the next time; p takes some gradients away, g puts other gradients in their place,
d other data; w writes the trainable parameters in place, as optimizers that average do when they change between
training and evaluation.
"""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from dropin_behaviours import Setting
from dropin_models import Block
from gloo import handle_of, note
from pairs import cover
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

pytestmark = pytest.mark.multiprocess

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
MOVED = ("szcsu", "sudsu", "skusu", "skzsu", "ncsu", "ekusue", "sckusu")
CAST = ("suf", "sufsue", "fsufsu", "sfsu", "sufe", "sufzsfsu", "ncfsu")
MOVED_WITH_ORIG = ("spcsu", "sgcu", "sdcsu")
WRITTEN = ("suewe", "suewsue", "ewsu", "suekwe")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block(5)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(self.block(x))))


def cases_of_all():
    """All (strategy, orig, plan, offload)."""
    cases = []
    for strategy, orig in itertools.product(STRATEGIES, (True, False)):
        plans = MOVED + WRITTEN + (MOVED_WITH_ORIG if orig else ()) + CAST
        offloaded = [(plan, True) for plan in ("szcskusu", "sufsu", "sfsu")]
        cases += [(strategy, orig, *rest) for rest in [(plan, False) for plan in plans] + offloaded]
    return cases


def differences(cases):
    """Return for each plan and setting the largest difference to the unsharded module: of outputs and parameters."""
    found = {}
    with handle_of("flatparam"):
        for strategy, orig, plan, offload in cases:
            name = f"{plan} {strategy} orig={orig} offload={offload}"
            note(name)
            found[name] = difference(Setting("flatparam", strategy, orig), plan, offload)
        for strategy in STRATEGIES:
            name = f"suewsue {strategy}, one rank holds no trainable parameter"
            note(name)
            found[name] = difference(Setting("flatparam", strategy, True), "suewsue", False, trainable=("last.bias",))
    return found


def difference(setting, plan, offload, trainable=None):
    torch.manual_seed(0)
    plain = Net().double()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(trainable is None or name in trainable)
    model = setting.wrap(copy.deepcopy(plain), cpu_offload=CPUOffload(offload_params=offload))
    both = (plain, model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in both]
    worst = 0.0
    for number, move in enumerate(plan):
        x = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        x = x.to(plain.last.weight.dtype)
        mine = x[dist.get_rank()]
        if move == "e":
            with torch.no_grad():
                worst = max(worst, float((model(mine) - plain(mine)).abs().max()))
        elif move in "sn":
            sum(plain(each).square().sum() / 2 for each in x).backward()
            with model.no_sync() if move == "n" else contextlib.nullcontext():
                model(mine).square().sum().backward()
        elif move in "zu":
            for optimizer in optimizers:
                optimizer.step() if move == "u" else optimizer.zero_grad()
        else:
            for each in both:
                do(move, each)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        pairs = list(zip(plain.parameters(), model.parameters(), strict=True))
        assert all(a.dtype == b.dtype for a, b in pairs)
        return max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))


def do(move, model):
    parameters = list(model.parameters())
    if move == "c":
        model.cpu()
    elif move == "k":
        model._apply(torch.clone)
    elif move == "f":
        model.float() if parameters[0].dtype == torch.float64 else model.double()
    elif move == "p":
        for layer in (model.first, model.block.up):
            layer.zero_grad()
    elif move == "g":
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 2
    elif move == "d":
        for parameter in parameters:
            parameter.data = parameter.data * 1.5
    else:
        with torch.no_grad():
            for parameter in parameters:
                if parameter.requires_grad and parameter.numel():
                    parameter.mul_(1.25)
        for handle in getattr(model, "_all_handles", ()):  # as a warning says
            if handle.uses_sharded_strategy:
                handle.reshard(True)


def check(cases):
    for found in simulate_ranks(differences, 2, cases):
        wrong = {name: value for name, value in found.items() if not value < (1e-5 if "f" in name.split()[0] else 1e-9)}
        assert not wrong, wrong
        assert len(found) == len(cases) + len(STRATEGIES)


def test_what_the_user_does_between_steps_is_not_undone():
    cases = cover(cases_of_all())
    assert len(cases) >= len(STRATEGIES) * len(MOVED + WRITTEN + CAST + MOVED_WITH_ORIG)
    check(cases)


@pytest.mark.thorough
def test_what_the_user_does_between_steps_is_not_undone_in_all_settings():
    check(cases_of_all())
