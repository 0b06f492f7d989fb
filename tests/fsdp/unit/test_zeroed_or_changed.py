"""Between micro-batches .grad shows the accumulated gradient: clearing it differs from changing it, even to zeros.

One rule for the runtime, its LayerZero strategies and the drop-in: csrc/tensor/fp_gradients.h has the table. The oracle
is the mean over the ranks of an unsharded module's gradients.

Promises:
- between micro-batches, gradients that are zeros can be cleared, and count as zeros if they are scaled; a rank whose
  gradients are zeros does the same as the others; in the runtime, LayerZero and the drop-in:
  `test_layer_zero_phases.py` (`clearing`)
"""

import itertools

import pytest
import torch
from fsdp_models import FSDP, Averaged, Model, data, full_grads, loss_of, make, wrap_blocks
from gloo import handle_of, note
from layer_zero_ranks import layer_zero
from pairs import cover
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP

from flatparam import ShardingStrategy

pytestmark = pytest.mark.multiprocess

RUNTIME = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1")
LAYER_ZERO = ("LAYER_ZERO", "LAYER_ZERO_NESTED")
DROPIN = ("dropin FULL_SHARD", "dropin SHARD_GRAD_OP")


def wrapped(strategy, uo, module=None):
    if strategy in LAYER_ZERO:
        return layer_zero(2, strategy, module, use_orig_params=uo)
    module = make() if module is None else module
    if strategy in DROPIN:
        settings = {"sharding_strategy": getattr(ShardingStrategy, strategy.split()[1]), "use_orig_params": uo}
        return wrap_blocks(module, TorchsFSDP, device_id=torch.device("cpu"), **settings)
    return wrap_blocks(module, sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)


def grads_of(model, uo, cls=Model):
    """Of all parameters by name; of the drop-in by a step, as it shows none with flat parameters."""
    if isinstance(model, FSDP) and not isinstance(model, TorchsFSDP):
        return full_grads(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    with TorchsFSDP.summon_full_params(model, writeback=False):
        after = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {name: param.detach() - after[name] for name, param in make(cls=cls).named_parameters()}


def means(ranks):
    found = []
    for step in (0, 1):
        module = make()
        Averaged(module, ranks).backward(lambda rank, step=step: [data(step, rank)])
        found.append({name: param.grad for name, param in module.named_parameters()})
    return found


def of_nothing(model):
    return loss_of(model, data(9)) * 0.0


def of_an_input_of_zeros(model):
    """The first weight gets a gradient of zeros, and others do not."""
    return loss_of(model, torch.zeros(4, 3))


def gradients(model):
    return [param.grad for param in model.parameters() if param.grad is not None]


def one_by_one(change):
    return lambda model: [change(grad) for grad in gradients(model)]


CLEAR = {
    "set_to_none": lambda model: model.zero_grad(),
    "in place": lambda model: model.zero_grad(set_to_none=False),
    "an optimizer's": lambda model: torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False),
    "copies": one_by_one(lambda grad: grad.copy_(torch.zeros_like(grad))),
}
CHANGE = {
    "by one": one_by_one(lambda grad: grad.mul_(1.0)),
    "by half": one_by_one(lambda grad: grad.mul_(0.5)),
    "by a third": one_by_one(lambda grad: grad.div_(3.0)),
    "together": lambda model: torch._foreach_mul_(gradients(model), 0.5),
    "clipped": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
}


def one_weight(model):
    return [model.first.weight]


def assert_close(model, uo, wanted, what, cls=Model):
    found = grads_of(model, uo, cls)
    for name, grad in wanted.items():
        if found[name] is None:
            assert not grad.any(), (what, name)
        else:
            torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")


def backward(model, loss, synced):
    if synced:
        loss(model).backward()
        return
    with model.no_sync():
        loss(model).backward()


def begun(strategy, uo, loss, kept):
    """A model after a synced backward and ``kept`` micro-batches of zeros."""
    model = wrapped(strategy, uo)
    backward(model, lambda m: loss_of(m, data(0)), True)
    for _ in range(kept):
        backward(model, loss, False)
    return model


def last(model):
    loss_of(model, data(1)).backward()


def refused(strategy):
    """Nested: by the ranks that have a piece, which the others are told."""
    said = r"the gradient of .* was changed (in place )?between micro-batches"
    if strategy == "LAYER_ZERO_NESTED":
        return pytest.raises((ValueError, RuntimeError), match=rf"{said}|rank \d has raised an error")
    return pytest.raises(ValueError, match=said)


LEFT = "left as it is"
CASES = list(itertools.product((*RUNTIME, *DROPIN, *LAYER_ZERO), (False, True), (1, 2), (LEFT, *CLEAR, *CHANGE)))


def of_all(strategy, uo, kept, name, ranks):
    zeroth, first = means(ranks)
    both = {name: grad + first[name] for name, grad in zeroth.items()}
    what = f"{strategy} uo={uo} kept={kept} {name}"
    note(what)
    model = begun(strategy, uo, of_nothing, kept)
    if name in CLEAR:
        CLEAR[name](model)
        last(model)
        assert_close(model, uo, first, what)
        return
    if name in CHANGE:
        CHANGE[name](model)
    if name == LEFT or strategy in DROPIN:  # what is kept is changed alone, as with torch
        last(model)
        assert_close(model, uo, both, what)
        return
    with refused(strategy):
        last(model)
    if strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):  # else all go on to the end
        assert_close(model, uo, zeroth, what)


def of_one(strategy, uo, ranks):
    """A gradient of zeros beside others, and one that is cleared beside others."""
    zeroth, first = means(ranks)
    module = make()
    of_an_input_of_zeros(module).backward()
    kept = {name: param.grad for name, param in module.named_parameters()}
    assert not kept["first.weight"].any()
    sums = {name: zeroth[name] + kept[name] + first[name] for name in kept}
    what = f"{strategy} uo={uo} one of zeros"
    model = begun(strategy, uo, of_an_input_of_zeros, 1)
    last(model)
    assert_close(model, uo, sums, what)
    for weight in ("first.weight", "last.weight") if uo else ():
        note(f"{what}, {weight}")
        model = begun(strategy, uo, of_an_input_of_zeros, 1)
        for grad in [param.grad for name, param in model.named_parameters() if name.endswith(weight)]:
            if grad is not None:
                grad.zero_()
        last(model)
        assert_close(model, uo, {**sums, weight: first[weight]}, f"{what}, {weight} zeroed")
        model = begun(strategy, uo, of_an_input_of_zeros, 1)
        for grad in [param.grad for name, param in model.named_parameters() if name.endswith(weight)]:
            if grad is not None:
                grad.mul_(0.5)
        if strategy in DROPIN:
            last(model)
            halved = zeroth[weight] + 0.5 * kept[weight] + first[weight]
            assert_close(model, uo, {**sums, weight: halved}, f"{what}, {weight} changed")
            continue
        with refused(strategy):
            last(model)


def all_of(cases, ranks):
    with handle_of("flatparam"):
        for case in cases:
            of_all(*case, ranks)
        for strategy, uo in {case[:2]: None for case in cases}:
            of_one(strategy, uo, ranks)


def check(strategy, cases):
    ranks = 4 if strategy in LAYER_ZERO else 2
    cases = [case for case in cases if case[0] == strategy]
    assert {name for *_, name in cases} == {LEFT, *CLEAR, *CHANGE}
    assert {uo for _, uo, *_ in cases} == {False, True}
    simulate_ranks(all_of, ranks, cases, ranks)


@pytest.mark.parametrize("strategy", [*RUNTIME, *DROPIN, *LAYER_ZERO])
def test_clearing_gradients_of_zeros_is_told_from_changing_them(strategy):
    check(strategy, cover(CASES))


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", [*RUNTIME, *DROPIN, *LAYER_ZERO])
def test_clearing_gradients_of_zeros_is_told_from_changing_them_in_all_settings(strategy):
    check(strategy, CASES)


class Factor(nn.Module):
    """One element, so one rank has none of it."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x):
        return self.factor * x


class Skipping(Model):
    """Its middle block is one element, and the last backward of a test comes to neither that nor the next one."""

    skips = False

    def __init__(self):
        super().__init__()
        self.blocks[1] = Factor()

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks[:1] if self.skips else self.blocks:
            x = block(x)
        return self.last(x)


ALONE = {
    "left as it is": lambda model: None,
    "by half": one_by_one(lambda grad: grad.mul_(0.5)),
    "together": lambda model: torch._foreach_mul_(gradients(model), 0.5),
    "turned round": one_by_one(lambda grad: grad.neg_()),
    "added to": one_by_one(lambda grad: grad.add_(0.0)),
    "cleared": lambda model: model.zero_grad(set_to_none=False),
}
FACTORS = {"left as it is": 1.0, "by half": 0.5, "together": 0.5, "turned round": -1.0, "added to": 1.0, "cleared": 0.0}


def zeros_on_one_rank(strategy, uo, ranks, alone, reduced):
    """The first rank gets gradients in no_sync, the others zeros; ``reduced``: after a synced backward."""
    wanted = {name: torch.zeros_like(param) for name, param in make(cls=Skipping).named_parameters()}

    def add(factor, batches, of=range(ranks), skips=False):
        module = make(cls=Skipping)
        module.skips = skips
        for rank in of:
            loss_of(module, data(batches, rank)).backward()
        for name, param in module.named_parameters():
            if param.grad is not None:
                wanted[name] += factor * param.grad / ranks

    model = wrapped(strategy, uo, make(cls=Skipping))
    if reduced:
        backward(model, lambda m: loss_of(m, data(0)), True)
        add(FACTORS[alone], 0)  # as of a user who has one gradient
    first = torch.distributed.get_rank() == 0
    backward(model, lambda m: loss_of(m, data(1)) * (1.0 if first else 0.0), False)
    add(FACTORS[alone], 1, of=[0])
    ALONE[alone](model)
    for module in model.modules():
        module.skips = isinstance(module, Skipping) and strategy not in DROPIN  # which torch refuses then
    last(model)
    add(1.0, 1, skips=strategy not in DROPIN)
    assert_close(model, uo, wanted, f"{strategy} uo={uo} {alone} reduced={reduced}", Skipping)


def zeros_on_one_rank_of_all(strategy, uo, ranks):
    with handle_of("flatparam"):
        for alone, reduced in itertools.product(ALONE, (False, True)):
            changes = alone not in ("left as it is", "cleared")
            if strategy in DROPIN and reduced and not uo:
                continue  # torch takes a reduced gradient of one element for an unsharded one
            if not changes or (not reduced and strategy != "LAYER_ZERO_NESTED"):  # else it is refused, or torch's
                note(f"{alone} {reduced}")
                zeros_on_one_rank(strategy, uo, ranks, alone, reduced)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("strategy", "uo"), list(itertools.product((*RUNTIME, *LAYER_ZERO, *DROPIN), (False, True))))
def test_one_rank_with_gradients_of_zeros_does_as_the_others(strategy, uo):
    """What is kept counts on all ranks or on none, also if the next backward does not come to the unit."""
    ranks = 4 if strategy in LAYER_ZERO else 2
    simulate_ranks(zeros_on_one_rank_of_all, ranks, strategy, uo, ranks)
