"""Building, using and deleting handles leaves nothing behind: no tensor, no module, no reference, no memory.

Counted are the live tensors, the reference counts of what was passed in, and the objects of Python; on the ways that
succeed and on those that raise. After some rounds of warm-up the counts of two rounds must be the same.
"""

import gc
import sys
import weakref

import pytest
import torch
from gloo import fake_world, handle_of, run_ranks
from one_handle import (
    MODE_IDS,
    MODES,
    make_handle,
    outcome,
    ready_for_forward,
    reshard,
    unshard,
)
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import HandleTrainingState

import flatparam
from flatparam import _C

OURS = flatparam.FlatParamHandle
every_mode = pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
WARM_UP, ROUNDS, WINDOWS = 6, 30, 3
NOTHING = {"tensors": 0, "modules": 0, "objects": 0, "references to None": 0, "blocks": 0}


@pytest.fixture(autouse=True)
def _only_new_objects():
    """Have the collector look at what a test makes, not at all of torch: ten times faster."""
    gc.collect()
    gc.freeze()


def count():
    gc.collect()
    objects = gc.get_objects()
    return {
        "tensors": sum(isinstance(o, torch.Tensor) for o in objects),
        "modules": sum(isinstance(o, nn.Module) for o in objects),
        "objects": len(objects),
        "references to None": sys.getrefcount(None),
        "blocks": sys.getallocatedblocks(),
    }


def growth(once, rounds=ROUNDS, alone=True):
    """Call ``once`` many times; return by how much each count grew after the warm-up, in the best window of rounds.

    A leak grows in every window: a process that is ``alone`` ends with the first that shows none. The interpreter's
    blocks also change by its caches: only four a round are counted.
    """
    for _ in range(WARM_UP):
        once()
    best = {}
    for _ in range(WINDOWS):
        before = count()
        for _ in range(rounds):
            once()
        after = count()
        grew = {name: max(0, after[name] - before[name]) for name in before}
        grew["blocks"] //= 4 * rounds
        best = {name: min(best.get(name, grew[name]), grew[name]) for name in NOTHING}
        if alone and best == NOTHING:
            break
    return best


def model():
    module = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3), nn.Linear(3, 5))
    module[3].weight = module[0].weight
    return module


def step(handle, module):
    unshard(handle, HandleTrainingState.FORWARD)
    module(torch.ones(2, 3)).sum().backward()
    handle.flat_param.grad = None
    reshard(handle, HandleTrainingState.BACKWARD_POST)
    handle._training_state = HandleTrainingState.IDLE


@every_mode
def test_build_and_delete(mode):
    with fake_world():
        assert growth(lambda: make_handle(OURS, model(), mode)) == NOTHING


@every_mode
def test_train_and_delete(mode):
    def once():
        module = model()
        handle = ready_for_forward(OURS, module, mode)
        reshard(handle, HandleTrainingState.FORWARD)
        for _ in range(2):
            step(handle, module)

    with fake_world():
        assert growth(once) == NOTHING


@every_mode
def test_train_on_and_on(mode):
    """One model, many steps."""
    with fake_world():
        module = model()
        handle = ready_for_forward(OURS, module, mode)
        reshard(handle, HandleTrainingState.FORWARD)
        assert growth(lambda: step(handle, module)) == NOTHING


@every_mode
def test_views_made_again_and_again(mode):
    with fake_world():
        module = model()
        handle = ready_for_forward(OURS, module, mode)
        assert growth(lambda: handle._use_unsharded_views(as_params=False)) == NOTHING
        assert growth(lambda: list(handle._get_unflat_views())) == NOTHING
        assert growth(lambda: module(torch.ones(2, 3))) == NOTHING  # a graph that is dropped


@every_mode
def test_reference_counts_of_what_is_passed_in(mode):
    with fake_world() as group:
        watched = [group, torch.float32, nn.Linear, OURS]
        make_handle(OURS, model(), mode)
        gc.collect()
        before = [sys.getrefcount(o) for o in watched]
        for _ in range(50):
            make_handle(OURS, model(), mode)
        gc.collect()
        after = [sys.getrefcount(o) for o in watched]
    assert max(b - a for a, b in zip(before, after, strict=True)) < 25


@every_mode
def test_reference_counts_of_the_parameters(mode):
    """Every switch of the views puts back the references that it took."""
    with fake_world():
        module = model()
        handle = ready_for_forward(OURS, module, mode)
        flat = handle.flat_param
        watched = [flat, module, module[0], *(flat._params or []), *(flat._shared_params or []), flat._local_shard]

        def cycle():
            reshard(handle, HandleTrainingState.BACKWARD_POST)
            unshard(handle, HandleTrainingState.FORWARD)

        for _ in range(3):
            cycle()
        before = [sys.getrefcount(o) for o in watched]
        for _ in range(20):
            cycle()
        assert [sys.getrefcount(o) for o in watched] == before


def bad_models():
    good = model()
    mixed = model()
    mixed[2].weight = nn.Parameter(mixed[2].weight.detach().double())
    sparse = model()
    sparse[2].weight = nn.Parameter(torch.eye(5).to_sparse())
    integer = model()
    integer[2].weight = nn.Parameter(torch.ones(3, 5, dtype=torch.int32), requires_grad=False)
    return {"empty": (good, []), "mixed": (mixed, None), "sparse": (sparse, None), "integer": (integer, None)}


@every_mode
@pytest.mark.parametrize("name", bad_models())
def test_refused_parameters(name, mode):
    def once():
        module, parameters = bad_models()[name]
        state, _ = outcome(make_handle, OURS, module, mode, parameters)
        assert state == "error"

    with fake_world():
        assert growth(once) == NOTHING


@every_mode
def test_a_module_that_refuses_its_attributes(mode):
    """The views cannot be set: the error comes through, and nothing that was made for them is kept."""

    class Refusing(nn.Linear):
        closed = False

        def __setattr__(self, name, value):
            if Refusing.closed:
                raise KeyError("closed")
            super().__setattr__(name, value)

    def once():
        Refusing.closed = False
        module = nn.Sequential(nn.Linear(3, 3), Refusing(3, 3))
        handle = ready_for_forward(OURS, module, mode)
        Refusing.closed = True
        with pytest.raises(KeyError, match="closed"):
            handle._use_unsharded_views(as_params=False)
        Refusing.closed = False

    with fake_world():
        assert growth(once) == NOTHING


@every_mode
def test_a_backward_that_raises(mode):
    def once():
        module = model()
        handle = ready_for_forward(OURS, module, mode)

        def refuse(gradient):
            raise KeyError("from the hook")

        module[2].weight.register_hook(refuse)
        with pytest.raises(KeyError, match="from the hook"):
            module(torch.ones(2, 3)).sum().backward()
        reshard(handle, HandleTrainingState.BACKWARD_POST)

    with fake_world():
        assert growth(once) == NOTHING


SHARD = ((True, 0, 4, 2, 5), (False, None, None, None, None))


def test_wrong_arguments_to_the_extension():
    flat = torch.arange(10.0)
    linear = nn.Linear(3, 2)
    good = [(linear, "weight", [2, 3], None, 0), (linear, "bias", [2], None, 6)]
    unit = _C.ModuleParams(good, [], 8)
    layout = _C.Layout([10, 2], 2, 1, 1)
    calls = [
        lambda: _C.ModuleParams([(linear, "weight", [2, 3], None, 0), (linear, "bias", [2], None)], [], 8),
        lambda: _C.ModuleParams(good, [(linear, "weight", 7)], 8),
        lambda: _C.ModuleParams(good, [], -1),
        lambda: unit.views([flat]),
        lambda: unit.views(flat[:5]),
        lambda: layout.flatten([flat, "x"], 1.0, 0, 12),
        lambda: layout.flatten([flat[:6].view(2, 3)], 1.0, 0, 12),
        lambda: layout.flatten([flat, flat[:2]], "x", 0, 12),
        lambda: layout.flatten([flat, flat[:2]], 1.0, 3, 2),
        lambda: _C.survey(3),
        lambda: _C.held([(True, 0, 4, 0, 3), 3], [1, 2]),
        lambda: _C.held([(True, 0, 4, 0, 3)] * 2, [1]),
        lambda: unit.use_parameters(flat[:4], [nn.Parameter(flat)], [], False),
        lambda: unit.set_grads(flat.double()),
        lambda: unit.register_tensors([flat], True, False),
        lambda: unit.use_unsharded(flat.clone(), flat[:4], None, False, True, False),
        lambda: unit.use_sharded(flat.clone(), flat[:4], [linear.weight], [], SHARD, False),
        lambda: _C.is_as_defined(unit, {}, ["views"]),
        lambda: _C.grad_summary(3),
        lambda: _C.versions(3),
        lambda: _C.convert(flat, flat[:4], True),
        lambda: _C.clear_grads(flat[0]),
        lambda: _C.same_storage(flat, None),
        lambda: _C.allocate(flat, "x"),
        lambda: _C.storage_numel(None),
    ]

    def once():
        for number, call in enumerate(calls):
            state, _ = outcome(call)
            assert state == "error", number

    assert growth(once) == NOTHING
    watched = [flat, linear, linear.weight, good, unit]
    before = [sys.getrefcount(o) for o in watched]
    for _ in range(200):
        once()
    after = [sys.getrefcount(o) for o in watched]
    assert max(b - a for a, b in zip(before, after, strict=True)) < 100


def train_and_delete(strategy, orig):
    """On a rank: wrap, train and delete a model some times; return what grew, and whether each model went at once."""
    gone = []

    def once():
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(3, 5), FullyShardedDataParallel(nn.Linear(5, 3), **settings)), **settings
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        flat = weakref.ref(model._handle.flat_param)
        del model, optimizer
        gc.collect()
        gone.append(flat() is None)

    gc.freeze()
    with handle_of("flatparam"):
        settings = {
            "sharding_strategy": ShardingStrategy[strategy],
            "use_orig_params": orig,
            "device_id": torch.device("cpu"),
        }
        grown = growth(once, rounds=8, alone=False)
    return grown, all(gone)


@pytest.mark.sweep(2)
@pytest.mark.multiprocess
@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_wrap_train_and_delete(strategy, orig):
    for grown, gone in run_ranks(train_and_delete, 2, strategy, orig):
        assert {**grown, "blocks": 0} == NOTHING  # torch's wrapper has caches of its own
        assert gone
