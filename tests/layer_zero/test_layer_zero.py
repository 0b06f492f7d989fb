"""LAYER_ZERO, by its two strategies and by its handle driven by hand, trains as the unsharded module does.

Promises:
- steps equal the unsharded module's, by SGD and Adam, 1 to 4 micro-batches, in bf16; two ranks and nested bit for bit:
  `test_it_trains_as_the_unsharded_module`
- 16 gradients in bf16 add up exactly: `test_micro_batches_add_up_in_full_precision`
- padding is zero and stays so: `test_padding_stays_zero`
- synced backwards add up, cleared micro-batches leave no trace; a step with a sum that is not reduced is refused:
  `test_cleared_micro_batches_leave_no_trace`
- each write to a master is used by the next forward, which gathers once: `test_a_write_is_gathered_once`
- offloaded gradients give the same bits, and are not on the device between micro-batches:
  `test_offloaded_gradients_give_the_same_bits`
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import data, loss_of, make
from gloo import note, run_ranks
from layer_zero_checks import assert_equal
from layer_zero_ranks import Reference, counted
from layer_zero_ways import BF16, BY_HAND, WAYS, driven
from simulated_ranks import simulate_ranks
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP

pytestmark = pytest.mark.multiprocess

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, 0.01),
}
LAYER_ZERO, NESTED, _ = WAYS
SETTINGS = [(way, uo) for way in WAYS for uo in (False, True) if uo or way != BY_HAND]
every_setting = pytest.mark.parametrize(("way", "uo"), SETTINGS)


def batches(step, count, rank=None):
    return [data(100 * step + k, rank) for k in range(count)]


def is_exact(way, inner):
    """Whether every sum over ranks is of two terms, so that its order is no question."""
    world = dist.get_world_size()
    return world <= 2 or (way == NESTED and inner == 2 and world == 4)


def grads_of(module):
    return [param.grad for param in module.parameters()]


def training(way, inner, count, uo, optimizer, low):
    note(f"{way} inner={inner} micro-batches={count} uo={uo} {optimizer} low={low}")
    module, run = make(), driven(way, inner, uo=uo, low=low)
    oracle = Reference(module, way, inner, BF16 if low else None)
    optims = [OPTIMIZERS[optimizer](m.parameters()) for m in (module, run.model)]
    for step in range(5):
        run.backward(batches(step, count))
        bounds = oracle.backward(lambda rank, step=step: batches(step, count, rank), count)
        if is_exact(way, inner):
            assert_equal(run.grads(), grads_of(module))
        for grad, wanted, bound in zip(run.grads(), grads_of(module), bounds, strict=True):
            assert bool(((grad - wanted).abs() <= bound).all())
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 0)
        if is_exact(way, inner):
            assert_equal(run.params(), list(module.parameters()))
            continue
        with torch.no_grad():  # the next step begins alike, so that its bound is that of its sums
            for value, param in zip(run.params(), module.parameters(), strict=True):
                torch.testing.assert_close(value, param, rtol=1e-4 if low else 1e-6, atol=1e-5 if low else 1e-6)
                param.copy_(value)


def cases(world, ways):
    """Each (ranks, way, ranks in an inner group) with 1, 2 and 4 micro-batches; the other settings take turns."""
    settings = itertools.cycle(
        [(False, "sgd", False), (True, "adam", True), (True, "sgd", False), (False, "adam", False)]
    )
    return [(world, *way, count, *next(settings)) for way, count in itertools.product(ways, (1, 2, 4))]


ON_TWO = cases(2, [(LAYER_ZERO, 1), (BY_HAND, 1), (LAYER_ZERO, 2), (BY_HAND, 2)])
ON_FOUR = cases(4, [(LAYER_ZERO, 1), (LAYER_ZERO, 2), (NESTED, 2), (LAYER_ZERO, 4), (BY_HAND, 2)])
ON_FOUR = [pytest.param(case, marks=pytest.mark.thorough) for case in ON_FOUR]


@pytest.mark.sweep(7)
@pytest.mark.parametrize("case", [*cases(1, [(BY_HAND, 1)]), *ON_TWO, *ON_FOUR], ids=str)
def test_it_trains_as_the_unsharded_module(case):
    world, *setting = case
    simulate_ranks(training, world, *setting)


def adding_up(way, uo):
    x = data(0, rank=0)
    run = driven(way, low=True, uo=uo)
    run.backward([x] * 16)
    assert_equal(run.grads(), [16 * grad for grad in Reference(make(), way, 2, BF16).gradients(x)])


@every_setting
def test_micro_batches_add_up_in_full_precision(way, uo):
    """The same bf16 gradient on all ranks, 16 times: summed in bf16 it would be rounded."""
    simulate_ranks(adding_up, 4, way, uo)


def padding(way, uo):
    run = driven(way, low=True, uo=uo)
    optim = torch.optim.AdamW(run.model.parameters(), lr=0.1, weight_decay=0.5)
    assert not uo or any(len(values) for values, _ in run.paddings())  # without uo it is at the end of the last shard
    for step in range(10):
        run.backward(batches(step, 2))
        for values, grads in run.paddings():
            assert not values.any()
            assert grads is None or not grads.any()
        optim.step()
        optim.zero_grad()


@every_setting
def test_padding_stays_zero(way, uo):
    simulate_ranks(padding, 4, way, uo)


def clearing(way, uo, offload):
    module, run = make(), driven(way, uo=uo, offload=offload)
    oracle = Reference(module, way, 2)
    optim = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for clear in ("none", "zeros", "each"):
        note(clear)
        if clear != "none":
            run.backward(batches(0, 2))
        run.hold_back(data(77))
        assert all(param.grad is not None for param in run.model.parameters())
        with pytest.raises(ValueError, match=r"SGD\.step\(\): the gradient of .* not reduced"):
            optim.step()
        if clear == "each":
            for param in run.model.parameters():
                param.grad = None
        else:
            optim.zero_grad(set_to_none=clear == "none")
        module.zero_grad()
        for step in (1, 2):
            run.backward(batches(step, 2))
            oracle.backward(lambda rank, step=step: batches(step, 2, rank), 2)
        if is_exact(way, 2):
            assert_equal(run.grads(), grads_of(module))
        for grad, wanted in zip(run.grads(), grads_of(module), strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-6)
        optim.step()
        with torch.no_grad():
            for value, param in zip(run.params(), module.parameters(), strict=True):
                param.copy_(value)
        optim.zero_grad()
    if way == NESTED:
        run.hold_back(data(0))
        for param in run.model.parameters():
            param.grad.mul_(0.5)
        with pytest.raises(ValueError, match=r"was changed between micro-batches"):
            run.backward([data(0)])


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("way", "uo", "offload"), [(*setting, offload) for offload in (False, True) for setting in SETTINGS]
)
def test_cleared_micro_batches_leave_no_trace(way, uo, offload):
    simulate_ranks(clearing, 4, way, uo, offload)


# Writes to the masters of a run, and the same to a module


def in_place(run, module):
    with torch.no_grad():
        for param in (*run.model.parameters(), *module.parameters()):
            param.mul_(0.5)


def load(run, module):
    run.load(lambda value: value * 1.25)
    module.load_state_dict({name: value * 1.25 for name, value in module.state_dict().items()})


def optimizer(run, module):
    for m in (run.model, module):
        for param in m.parameters():
            param.grad = torch.ones_like(param)
        torch.optim.SGD(m.parameters(), lr=0.5).step()
        m.zero_grad()


def one_rank(run, module):
    with torch.no_grad():
        for param in run.model.parameters() if dist.get_rank() == 3 else ():
            param.mul_(2.0)
    for value, param in zip(run.params(), module.parameters(), strict=True):
        param.data.copy_(value)


def replaced(run, module):
    for param in run.model.parameters():
        param.data = param.data * 3.0
    for param in module.parameters():
        param.data.mul_(3.0)


def summoned(run, module):
    with FSDP.summon_full_params(run.model):
        for param in run.model.parameters():
            param.data.add_(0.25)
    for param in module.parameters():
        param.data.add_(0.25)


def uncounted(run, module):
    for param in (*run.model.parameters(), *module.parameters()):
        param.data.mul_(0.75)
    run.model.refresh()


def nothing(run, module):
    run.model.state_dict()
    run.params()


def freshness(way, inner, uo):
    module, run, x = make(), driven(way, inner, uo=uo), data(0, rank=0)
    writes = [in_place, load, optimizer, one_rank, nothing]
    if way != BY_HAND:
        writes += [summoned, uncounted]
    if uo:
        writes.append(replaced)
    with torch.no_grad():
        run.forward(x)
    for write, moment in itertools.product(writes, ("eval", "accumulating")):
        note(f"{write.__name__} {moment}")
        if moment == "accumulating":
            run.hold_back(x)
            run.clear()
        write(run, module)
        with counted(inner) as log:
            for _ in range(2):
                with torch.no_grad():
                    assert torch.equal(run.forward(x), module(x))
            loss = loss_of(run.forward, x)
        assert torch.equal(loss, loss_of(module, x))
        over_all = [entry for entry in log if entry[:2] in (("gather", "wide"), ("gather", "outer"))]
        assert len(over_all) == (0 if write in (nothing, uncounted) else 4)  # refresh() has gathered
        run.hold_back(x, loss)
        run.clear()


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("way", "inner", "uo"),
    [(way, inner, uo) for way, uo in SETTINGS for inner in ((2,) if way == NESTED else (1, 2))],
)
def test_a_write_is_gathered_once(way, inner, uo):
    """At any idle moment, on all ranks or one: the next forward uses it."""
    run_ranks(freshness, 4, way, inner, uo)


def offloading(way, inner, uo, low):
    runs = [driven(way, inner, uo=uo, low=low, offload=offload) for offload in (False, True)]
    optims = [torch.optim.SGD(run.model.parameters(), lr=0.1) for run in runs]
    for count, (step, to_none) in itertools.product((1, 2, 3), enumerate((True, False, True))):
        note(f"{count} micro-batches, step {step}")
        for run in runs:
            run.hold_back(data(step))  # abandoned
            run.clear(to_none)
            for x in batches(step, count - 1):
                run.hold_back(x)
                on_device, sizes = run.sums()
                assert on_device == ([0] * 4 if run is runs[1] else sizes)
            run.backward([data(50 + step)])
            assert run.sums()[0] == [0] * 4
        assert_equal(runs[1].grads(), runs[0].grads())
        assert all(bool(grad.any()) for grad in runs[0].grads())
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=to_none)
        assert_equal(runs[1].params(), runs[0].params())


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("way", "inner", "uo", "low"),
    [
        (way, inner, uo, low)
        for low in (False, True)
        for way, uo in SETTINGS
        for inner in ((2,) if way == NESTED else (1, 2))
    ],
)
def test_offloaded_gradients_give_the_same_bits(way, inner, uo, low):
    """All units, in all steps, however gradients are cleared, after an abandoned micro-batch too."""
    simulate_ranks(offloading, 4, way, inner, uo, low)


def refused():
    with pytest.raises(
        ValueError, match=r"FULL_SHARD does not offload gradients: offload_grads=True is for LAYER_ZERO"
    ):
        FSDP(nn.Linear(1, 1), offload_grads=True)


def test_other_strategies_do_not_offload():
    simulate_ranks(refused, 2)
