"""LAYER_ZERO trains as the unsharded module does, whatever the groups, micro-batches and precision.

Promises:
- steps equal the unsharded module's, by SGD and Adam, 1 to 4 micro-batches, in bf16; two ranks and nested bit for bit
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import assert_same, assert_same_grads, data, full_grads, full_params, make
from gloo import note, run_ranks
from layer_zero_ranks import MODES, Reference, layer_zero, micro_batches

from flatparam import MixedPrecision

pytestmark = pytest.mark.multiprocess

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, 0.01),
}
LOW = MixedPrecision(param_dtype=torch.bfloat16)


def batches(step, count, rank=None):
    return [data(100 * step + k, rank) for k in range(count)]


def is_exact(mode, inner):
    """Whether every sum over ranks is of two terms, so that its order is no question."""
    world = dist.get_world_size()
    return world == 2 or (mode == "LAYER_ZERO_NESTED" and inner == 2 and world == 4)


def training(mode, inner, count, uo, optimizer, low):
    what = f"{mode} inner={inner} micro-batches={count} uo={uo} {optimizer} low={low}"
    note(what)
    module = make()
    model = layer_zero(inner, mode, use_orig_params=uo, mixed_precision=LOW if low else None)
    oracle = Reference(module, mode, inner, torch.bfloat16 if low else None)
    optims = [OPTIMIZERS[optimizer](m.parameters()) for m in (module, model)]
    exact = is_exact(mode, inner)
    for step in range(5):
        micro_batches(model, batches(step, count))
        bounds = oracle.backward(lambda rank, step=step, count=count: batches(step, count, rank), count)
        if exact:
            assert_same_grads(model, module, what)
        else:
            found = full_grads(model).values()
            for grad, param, bound in zip(found, module.parameters(), bounds, strict=True):
                assert bool(((grad - param.grad).abs() <= bound).all()), what
        for optim in optims:
            optim.step()
            optim.zero_grad()
        if exact:
            assert_same(model, module, f"{what} step={step}")
            continue
        with torch.no_grad():  # the next step begins alike, so that its bound is that of its sums
            for value, param in zip(full_params(model).values(), module.parameters(), strict=True):
                torch.testing.assert_close(value, param, rtol=1e-4 if low else 1e-6, atol=1e-5 if low else 1e-6)
                param.copy_(value)


def cases(pairs, counts):
    """Each pair (mode, ranks in an inner group) with each count of micro-batches; the other settings take turns."""
    settings = itertools.cycle(
        [(False, "sgd", False), (True, "adam", True), (True, "sgd", False), (False, "adam", False)]
    )
    return [
        (*pair, count, *setting)
        for (pair, count), setting in zip(itertools.product(pairs, counts), settings, strict=False)
    ]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("case", cases([("LAYER_ZERO", 1), ("LAYER_ZERO", 2)], (1, 2, 4)), ids=str)
def test_it_trains_as_the_unsharded_module_on_two_ranks(case):
    run_ranks(training, 2, *case)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", cases([(MODES[0], 1), (MODES[0], 2), (MODES[1], 2), (MODES[0], 4)], (1, 2, 4)), ids=str
)
def test_it_trains_as_the_unsharded_module_on_four_ranks(case):
    run_ranks(training, 4, *case)
