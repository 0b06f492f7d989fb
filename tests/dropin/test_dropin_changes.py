"""What users do to a wrapped model between two steps has the same effect as on torch's handle: values written, tensors
and parameters exchanged, gradients set and removed, requires_grad changed, full parameters summoned and changed.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from dropin_scenarios import Scenario, batches, build, make_optimizer, one_pass, wrap
from gloo import check_handles, run_both
from recording import Recorder, first_difference
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

pytestmark = pytest.mark.multiprocess

S = Scenario


def parameters(model):
    return [p for p in model.parameters() if p.numel()]


def fill(model, step):
    """In place, as an initialisation does."""
    with torch.no_grad():
        for number, p in enumerate(parameters(model)):
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p) / (number + 1))


def set_data(model, step):
    """Another storage of the same shape."""
    for p in parameters(model)[::2]:
        p.data = p.data.clone() * 0.5


def exchange_parameter(model, step):
    """Another parameter object under the same name."""
    for module in list(model.modules())[1:]:
        for name, p in list(module._parameters.items()):
            if p is not None and p.numel() and name == "weight" and isinstance(module, nn.LayerNorm):
                setattr(module, name, nn.Parameter(p.detach().clone() + 0.25))


def scale_gradients(model, step):
    for p in parameters(model):
        if p.grad is not None:
            p.grad.mul_(0.5)


def exchange_gradients(model, step):
    """Another gradient tensor, as clipping or unscaling out of place does."""
    for p in parameters(model)[1::2]:
        if p.grad is not None:
            p.grad = p.grad.clone() * 2


def drop_some_gradients(model, step):
    for p in parameters(model)[::3]:
        p.grad = None


def set_gradients_first(model, step):
    for p in parameters(model):
        p.grad = torch.ones_like(p)


def freeze_some(model, step):
    for number, p in enumerate(model.parameters()):
        p.requires_grad_((number + step) % 3 != 0)


def freeze_all_then_thaw(model, step):
    model.requires_grad_(step % 2 == 0)


def summon_and_write(model, step):
    with FullyShardedDataParallel.summon_full_params(model):
        for number, p in enumerate(model.parameters()):
            p.data.add_(0.01 * number)
            assert p.numel()


def summon_without_writeback(model, step):
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        for p in model.parameters():
            p.data.zero_()


def summon_each_unit(model, step):
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False), torch.no_grad():
            for p in unit.parameters():
                p.mul_(1.125)


def nothing_but_forward(model, step):
    x = model.module.batch(torch.Generator().manual_seed(step))
    with torch.no_grad():
        model(x, step)
    model(x, step)  # a graph that is dropped


def apply_in_place(model, step):
    def double(module):
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.mul_(1.5)

    model.apply(double)


BEFORE_FORWARD = (
    fill,
    set_data,
    exchange_parameter,
    set_gradients_first,
    freeze_some,
    freeze_all_then_thaw,
    summon_and_write,
    summon_without_writeback,
    summon_each_unit,
    nothing_but_forward,
    apply_in_place,
)
BEFORE_STEP = (scale_gradients, exchange_gradients, drop_some_gradients, summon_and_write)
CHANGES = {change.__name__: change for change in (*BEFORE_FORWARD, *BEFORE_STEP)}


def train_each(kind, scenarios, name, when):
    """Train one scenario after the other; return their events."""
    return [train(kind, scenario, name, when) for scenario in scenarios]


def train(kind, scenario, name, when):
    """Train three steps with the change made at its place in each; return the events, ending in an error's type."""
    recorder = Recorder()
    plain = build(scenario)
    data = batches(plain, scenario, dist.get_rank())
    change = CHANGES[name]
    with recorder.collectives():
        model = wrap(plain, scenario)
        check_handles(model, kind)
        optimizer = make_optimizer(scenario, model.parameters())
        try:
            for step in range(3):
                if when == "before forward":
                    change(model, step)
                    recorder.parameters(f"step {step} changed", model)
                one_pass(model, next(data), step, recorder, f"step {step}")
                if when == "before step":
                    change(model, step)
                    recorder.parameters(f"step {step} changed", model)
                optimizer.step()
                recorder.parameters(f"step {step} stepped", model)
                if when == "between passes":  # with the gradients of the pass before still there
                    change(model, step)
                else:
                    optimizer.zero_grad(set_to_none=scenario.set_to_none)
        except Exception as error:
            recorder.add("raised", type(error).__name__)
    return recorder.events


def assert_equal_training(scenarios, world, name, when):
    for rank, both in enumerate(run_both(train_each, world, scenarios, name, when)):
        for scenario, expected, got in zip(scenarios, *both, strict=True):
            difference = first_difference(expected, got)
            assert difference is None, f"{scenario}, rank {rank}: {difference}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "when"),
    [
        *((change.__name__, "before forward") for change in BEFORE_FORWARD),
        *((change.__name__, "before step") for change in BEFORE_STEP),
        ("drop_some_gradients", "between passes"),
        ("exchange_gradients", "between passes"),
        ("set_data", "between passes"),
    ],
)
def test_a_change_between_steps(name, when):
    strategies = [
        ("FULL_SHARD", True),
        ("SHARD_GRAD_OP", True),
        ("NO_SHARD", True),
        ("FULL_SHARD", False),
        ("NO_SHARD", False),
    ]
    if name == "set_data":  # of a flat parameter: torch's next forward undoes it, ours does not (test_dropin_moved.py)
        strategies = [(strategy, orig) for strategy, orig in strategies if orig]
    assert_equal_training([S(strategy=strategy, orig=orig) for strategy, orig in strategies], 2, name, when)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["fill", "set_data", "summon_and_write", "freeze_some"])
def test_a_change_under_mixed_precision(name):
    scenarios = [S(precision="bf16", model="tied"), S(precision="bf16", model="images", strategy="NO_SHARD")]
    assert_equal_training(scenarios, 2, name, "before forward")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["fill", "set_data", "summon_and_write", "freeze_some"])
def test_a_change_on_three_ranks(name):
    scenarios = [S(precision="bf16", strategy="SHARD_GRAD_OP", world=3), S(model="tied", world=3)]
    assert_equal_training(scenarios, 3, name, "before forward")


def test_every_change_is_tried():
    assert len(CHANGES) == len(set(itertools.chain(BEFORE_FORWARD, BEFORE_STEP)))
