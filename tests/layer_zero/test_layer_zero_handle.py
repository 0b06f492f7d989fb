"""LayerZero's handle, driven step by step without a wrapper, as its reference's runtime does."""

import copy
import gc
import inspect
import itertools
import pickle
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from fsdp_models import data, loss_of, make
from gloo import note, run_ranks
from layer_zero_driver import (
    CPU,
    AsTheReference,
    State,
    drive,
    full_grads,
    full_params,
    gathered,
    held,
    losses,
    one,
    reshard,
    summoned,
    twins,
    unshard,
    unsharded_backward,
)
from layer_zero_programs import chain, programs
from layer_zero_ranks import counted, group_of, pair
from torch import nn
from torch.distributed.fsdp._flat_param import HandleTrainingState as TorchState

import flatparam
from flatparam.layer_zero import FlatParamHandle, HandleTrainingState, ShardParamInfo, agree

pytestmark = pytest.mark.multiprocess

LOW = torch.bfloat16


def assert_close(found, expected, atol=1e-6):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=atol)


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


# Layout


class Example(nn.Module):
    """The parameters of a known layout: 6, 3 and 2 elements."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.arange(6.0).view(2, 3) + 1)
        self.b = nn.Parameter(torch.arange(3.0) + 11)
        self.c = nn.Parameter(torch.arange(2.0) + 21)

    def forward(self, x):
        return (x @ self.a.t()).sum(-1) * self.b.sum() + self.c.sum()


OUT = (False, None, None, None, None)
# rank -> (offset, numel, first, last) of a, b, c in the zero1 shard; then the places of the parameters
LAYOUTS = {
    LOW: (
        20,
        [
            [(True, 0, 5, 0, 4), OUT, OUT],
            [(True, 0, 1, 5, 5), (True, 3, 2, 0, 1), OUT],
            [OUT, (True, 0, 1, 2, 2), OUT],
            [OUT, OUT, (True, 1, 2, 0, 1)],
        ],
        [(0, 5), (8, 10), (16, 17)],
    ),
    None: (
        16,
        [
            [(True, 0, 4, 0, 3), OUT, OUT],
            [(True, 0, 2, 4, 5), OUT, OUT],
            [OUT, (True, 0, 3, 0, 2), OUT],
            [OUT, OUT, (True, 0, 2, 0, 1)],
        ],
        [(0, 5), (8, 10), (12, 13)],
    ),
}


def layout():
    rank = dist.get_rank()
    for dtype, (numel, shards, places) in LAYOUTS.items():
        module = Example()
        originals = list(module.parameters())
        handle = one(module, 2, dtype)
        flat = handle.flat_param
        expected = tuple(ShardParamInfo(*part, *place) for part, place in zip(shards[rank], places, strict=True))
        assert flat._shard_param_infos == expected
        assert flat._padded_unsharded_size == torch.Size([numel])
        assert flat._sharded_size == flat._zero1_shard.size() == torch.Size([numel // 4])
        assert flat._zero1_shard.dtype == torch.float32
        assert flat._shard_numel_padded == 0
        assert [id(p) for p in module.parameters()] == [id(p) for p in originals]
        for param, info, whole in zip(originals, expected, Example().parameters(), strict=True):
            first, last = info.intra_param_start_idx, info.intra_param_end_idx
            part = whole.flatten()[first : last + 1] if info.in_shard else torch.empty(0)
            assert torch.equal(param, part)
        whole = gathered(flat._zero1_shard)
        unshard(handle, State.FORWARD)
        assert torch.equal(flat._full_param_padded, whole.to(dtype or torch.float32))
        assert not isinstance(module.a, nn.Parameter)
        assert torch.equal(module.a.float(), Example().a)
        reshard(handle)
        size, inner = numel // 2, rank % 2
        assert torch.equal(flat._zero3_shard, whole[inner * size : (inner + 1) * size].to(dtype or torch.float32))
        with pytest.raises(ValueError, match="expected div to be 4"):
            handle.flatten_tensors([torch.ones(3)], 4, 3)
        assert handle.flatten_tensors([torch.ones(3), torch.ones(2)], 4, 4).numel() == 8


ARGUMENTS = [
    *("params", "zero3_module", "device", "mp_param_dtype", "mp_reduce_dtype"),
    *("zero3_process_group", "zero1_process_group", "offload_grads"),
]
METHODS = """
    initialize shard init_flat_param_attributes pre_unshard unshard wait_unshard post_unshard needs_unshard reshard
    post_reshard unshard_grad reshard_grad offload_grad alloc_full_prec_grad reload_full_prec_grad free_full_prec_grad
    already_load_full_prec_grad accumulate_grad prepare_gradient_for_backward set_shard_grad free_runtime_unshard_grad
    prepare_gradient_for_zero1 wait_reduce_scatter flatten_tensors flatten_tensors_into_flat_param unflatten_as_params
    is_sharded param_module_names shared_param_module_names
"""


def names_of_the_reference():
    assert list(inspect.signature(FlatParamHandle).parameters) == ARGUMENTS
    assert list(inspect.signature(FlatParamHandle.initialize).parameters) == ["self", *ARGUMENTS]
    assert all(callable(getattr(FlatParamHandle, name)) for name in METHODS.split())
    assert list(inspect.signature(FlatParamHandle.reshard).parameters) == ["self", "free_unsharded_flat_param"]
    handle = one(Example(), 2, LOW)
    assert (handle.zero1_world_size, handle.zero1_group_rank) == (4, dist.get_rank())
    assert (handle.zero3_group_size, handle.zero3_group_rank) == (2, dist.get_rank() % 2)
    assert (handle.param_dtype, handle.grad_dtype, handle.full_prec_dtype) == (LOW, torch.float32, torch.float32)
    assert one(Example(), 2, LOW, LOW).grad_dtype == LOW
    assert one(Example().double(), 2).flat_param._zero1_shard.dtype == torch.float64
    assert one(Example().to(LOW), 2).flat_param._zero1_shard.dtype == torch.float32
    for name in ("needs_param_sync", "param_synced", "grad_synced", "ran_pre_backward_hook", "prefetched"):
        assert getattr(handle, f"_{name}") is (name == "needs_param_sync")
    assert [name for name, _ in handle._named_module_parameters()] == ["a", "b", "c"]
    assert handle._get_orig_param_by_name("b") is handle._get_module_param_by_name("b")
    assert list(handle._shard_grad_list()) == [None] * 3
    assert handle._zero3_module.a is handle.flat_param._params[0]
    for call in (lambda: copy.deepcopy(handle), lambda: copy.copy(handle), lambda: pickle.dumps(handle)):
        with pytest.raises(TypeError, match=r"\(a, b, c\)"):
            call()


# Training


def train(model, driver, reference, count, make_optimizer, steps=3, exact=False):
    optimizers = [make_optimizer(m.parameters()) for m in (model, reference)]
    for step in range(steps):
        driver.backward(losses(model, step, count))
        unsharded_backward(reference, step, count)
        if exact:
            assert_equal(full_grads(driver.handles, model), [p.grad for p in reference.parameters()])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    compare = assert_equal if exact else assert_close
    compare(full_params(driver.handles, model), list(reference.parameters()))


def training(inners):
    for inner, count in itertools.product(inners, (1, 2, 3)):
        note(f"inner={inner} micro-batches={count}")
        exact = dist.get_world_size() <= 2
        train(*twins(inner), count, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), exact=exact)
    train(*twins(inners[-1]), 2, lambda params: torch.optim.Adam(params, 0.01))


def offloading(inner, cases):
    """What is offloaded gives the bits of what is not: all units, in all steps, however gradients are cleared."""
    for count, to_none, dtype in cases:
        note(f"offload: micro-batches={count} to none={to_none} {dtype}")
        seen = []
        for offload in (False, True):
            model = make().to(dtype or torch.float32)
            driver = drive(model, inner, dtype, offload)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                driver.backward(losses(model, step, count, of_dtype(dtype)))
                seen.append(full_grads(driver.handles, model))
                assert all(bool(grad.any()) for grad in seen[-1])
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            seen.append(full_params(driver.handles, model))
        for on, off in zip(seen[:4], seen[4:], strict=True):
            assert_equal(on, off)


def of_dtype(dtype):
    return lambda model, x: model(x if dtype is None else x.to(dtype)).float().square().mean()


def the_calls_of_the_references_runtime(inner):
    """A root that returns what its last unit does, kept units, gathers ahead, offloading all but the last unit."""
    for count, offload in itertools.product((1, 3), (False, True)):
        note(f"as the reference: micro-batches={count} offload={offload}")
        model, reference = chain(), chain()
        driver = AsTheReference(list(model), inner, offload=offload)
        train(model, driver, reference, count, lambda params: torch.optim.SGD(params, lr=0.1))
        with counted(inner) as log:
            driver.backward(losses(model, 0, count))
        units = len(driver.handles)
        over = [(kind, group) for kind, group, *_ in log]
        assert over.count(("gather", "wide")) == over.count(("reduce", "wide")) == units
        # Twice a micro-batch but for the first forward, the last unit in backward, the first in later forwards
        assert over.count(("gather", "inner")) == units * (2 * count - 1) - count - (count - 1)
        assert len(over) == 2 * units + over.count(("gather", "inner"))


def no_gradient_is_lost_in_low_precision():
    """64 equal micro-batches on all ranks: exactly 64 times the bf16 gradient of one."""
    model, reference = make().to(LOW), make().to(LOW)
    driver = drive(model, 2, LOW)
    x = data(0, rank=0).to(LOW)
    driver.backward([lambda: model(x).float().square().mean()] * 64)
    reference(x).float().square().mean().backward()
    assert_equal(full_grads(driver.handles, model), [p.grad.float() * 64 for p in reference.parameters()])


def the_dtype_of_the_reduction_is_honoured():
    handle = one(Example(), 2, LOW, LOW)
    unshard(handle, State.FORWARD)
    reshard(handle)
    whole, shard = handle._get_reduce_scatter_tensors()
    assert whole.dtype == shard.dtype == LOW
    handle.set_shard_grad(shard.fill_(1.5))
    handle.prepare_gradient_for_zero1()
    assert handle.flat_param.grad.dtype == torch.float32
    assert bool((handle.flat_param.grad == 1.5).all())


def padding_stays(steps=100):
    module = Example()
    driver = drive(module, 2, LOW, units=[module])
    optimizer = torch.optim.AdamW(module.parameters(), 0.1, weight_decay=0.5)
    [handle] = driver.handles
    before = gathered(handle.flat_param._zero1_shard)
    for _ in range(steps):
        driver.backward([lambda: module(torch.ones(2, 3, dtype=LOW)).sum()])
        assert not gathered(handle.flat_param.grad)[[6, 7, *range(11, 16), 18, 19]].any()
        optimizer.step()
        optimizer.zero_grad()
    after = gathered(handle.flat_param._zero1_shard)
    padding = [6, 7, *range(11, 16), 18, 19]
    assert torch.equal(after[padding], before[padding])
    assert not torch.equal(after, before)


# What is where, and when


def buffers_by_phase():
    """Bytes of storages after each phase; the last unit is kept after forward by hand."""
    model, driver, _ = twins(2, param_dtype=LOW, offload=True)
    model.to(LOW)
    handles, x = driver.handles, data(0)

    def bytes_of(name):
        return [held(getattr(h.flat_param, name)) for h in handles]

    numels = [h.flat_param._padded_unsharded_size.numel() for h in handles]
    assert bytes_of("_zero1_shard") == [4 * n // 4 for n in numels]
    assert bytes_of("_cpu_grad") == [4 * n for n in numels]
    none = [0] * len(handles)
    inside = {}

    def loss():
        model_output = model(x.to(LOW))
        inside["forward"] = bytes_of("_full_param_padded"), bytes_of("_zero3_shard")
        return model_output.float().square().mean()

    original = driver.after_backward

    def after_backward(handle):
        i = handles.index(handle)
        inside[f"backward {i}"] = held(handle.flat_param._full_param_padded), held(handle.flat_param._full_grad_padded)
        original(handle)

    driver.after_backward = after_backward
    driver.sync = False
    loss().backward()
    for handle in handles:
        handle._training_state = State.IDLE
    assert inside["forward"] == (none, [2 * n // 2 for n in numels])
    assert [inside[f"backward {i}"] for i in range(len(handles))] == [(2 * n, 2 * n) for n in numels]
    for name in ("_full_param_padded", "_full_grad_padded", "_full_prec_grad_padded"):
        assert bytes_of(name) == none
    assert bytes_of("_zero3_shard") == [2 * n // 2 for n in numels]
    driver.offload = False
    loss().backward()  # it brings the sum back
    assert bytes_of("_full_prec_grad_padded") == [4 * n for n in numels]
    for handle in handles:
        handle._training_state = State.IDLE
    driver.backward([loss])
    for name in ("_full_param_padded", "_full_grad_padded", "_full_prec_grad_padded", "_zero3_shard"):
        assert bytes_of(name) == none
    assert [held(h.flat_param.grad) for h in handles] == [4 * n // 4 for n in numels]
    last = handles[-1]
    unshard(last, State.FORWARD)
    last.reshard(False)
    last._training_state = State.IDLE
    assert held(last.flat_param._full_param_padded) == 2 * numels[-1]
    assert all(isinstance(p, nn.Parameter) and p.dim() == 1 for p in last.flat_param._params)


def freshness():
    """Exactly one gather over all ranks a change, whatever changes masters, seen by training and evaluation alike."""
    model = make()
    driver = drive(model, 2)
    handles, x = driver.handles, data(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    reference = make()
    each = len(handles)

    def changed_by(change):
        change()
        with summoned(handles), torch.no_grad():
            for param, other in zip(reference.parameters(), model.parameters(), strict=True):
                param.copy_(other)
        with counted(2) as log, torch.no_grad():
            agree(handles)
            found = model(x)
        torch.testing.assert_close(found, reference(x), rtol=1e-6, atol=1e-6)
        over_all = sum(1 for kind, group, *_ in log if (kind, group) == ("gather", "wide"))
        assert over_all + sum(1 for kind, group, *_ in log if (kind, group) == ("gather", "inner")) == each
        return over_all

    def in_place():
        with torch.no_grad():
            for handle in handles[:1]:
                for param in handle.flat_param._params:
                    param.mul_(1.5)

    def on_one_rank():
        if dist.get_rank() == 3:
            handles[1].flat_param._zero1_shard.add_(1)

    def replace():
        for param in handles[0].flat_param._params:
            param.data = param.data * 0.5

    def load():
        model.load_state_dict({name: value * 1.25 for name, value in model.state_dict().items()})

    def step():
        driver.backward(losses(model, 0, 2))
        optimizer.step()
        optimizer.zero_grad()

    assert changed_by(lambda: None) == each
    assert changed_by(lambda: None) == 0
    assert changed_by(in_place) == 1
    assert changed_by(lambda: None) == 0
    assert changed_by(on_one_rank) == 1
    assert changed_by(load) == each
    assert changed_by(step) == each
    assert changed_by(lambda: None) == 0
    note("replaced data")
    before = full_params(handles[:1], model.blocks[0])
    replace()
    with torch.no_grad():
        model(x)  # each unit asks for itself
    assert_equal(full_params(handles[:1], model.blocks[0]), [p * 0.5 for p in before])
    assert changed_by(lambda: None) == 0
    replace()
    with counted(2) as log, torch.no_grad():
        agree(handles)
        model(x)
    assert sum(group == "wide" for _, group, *_ in log) == 1
    note("written to after the ranks have agreed")
    agree(handles)
    in_place()
    with pytest.raises(RuntimeError, match=r"Block \(.*\) was written to after agree"):
        model(x)
    for handle in handles:
        handle.recover()
    assert changed_by(lambda: None) == each
    note("in inference mode")
    in_place()
    with torch.inference_mode():
        model(x)
    assert changed_by(lambda: None) == 0
    step()
    assert changed_by(lambda: None) == each
    note("kept unit")
    unshard(handles[0], State.FORWARD)
    handles[0].reshard(False)
    handles[0]._training_state = State.IDLE
    assert changed_by(in_place) == 1
    note("a graph of weights that are no more")
    output = model(x)
    in_place()
    model(x)
    with pytest.raises(RuntimeError, match=r"modified.* (by an )?inplace"):
        output.sum().backward()
    for handle in handles:
        handle.recover()
    step()
    assert changed_by(lambda: None) == each


def syncing():
    """SYNC_PARAMS, by one call and step by step."""
    model = make()
    driver = drive(model, 2, LOW)
    handles = driver.handles
    for handle in handles:
        handle.sync_params()
    with counted(2) as log, torch.no_grad():
        for handle in handles:
            handle.sync_params()
        model(data(0).to(LOW))
    assert [(kind, group) for kind, group, *_ in log] == [("gather", "inner")] * len(handles)
    handle = handles[0]
    flat = handle.flat_param
    handle._param_synced = False  # as the reference's runtime does after a synced backward
    with counted(2) as log:
        handle.sync_params()
        handle.sync_params()
    assert [(kind, group) for kind, group, *_ in log] == [("gather", "wide")]
    with torch.no_grad():
        for param in flat._params:
            param.add_(1)
    with counted(2) as log:
        unshard(handle, State.SYNC_PARAMS)
        assert [(group, dtype) for _, group, _, dtype in log] == [("wide", LOW)]
    assert isinstance(flat._param_infos[0].module._parameters[flat._param_infos[0].param_name], nn.Parameter)
    whole = gathered(flat._zero1_shard).to(LOW)
    for param, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
        assert torch.equal(param, whole[info.flat_param_start_idx : info.flat_param_end_idx + 1].view(shape))
    with pytest.raises(RuntimeError, match=r"FORWARD is not possible in SYNC_PARAMS, only in IDLE, FORWARD.*set IDLE"):
        handle._training_state = State.FORWARD
    reshard(handle)
    size = whole.numel() // 2
    assert torch.equal(flat._zero3_shard, whole[dist.get_rank() % 2 * size :][:size])
    for state in (State.FORWARD, State.BACKWARD_PRE, State.BACKWARD_POST, State.SUMMON_FULL_PARAMS):
        handle._training_state = State.IDLE
        handle._training_state = state
        for wrong in (lambda: setattr(handle, "_training_state", State.SYNC_PARAMS), handle.sync_params):
            with pytest.raises(RuntimeError, match=f"SYNC_PARAMS is not possible in {state.name}, only in IDLE, for"):
                wrong()
        assert handle._training_state is state
        handle._training_state = State.IDLE


def states():
    assert State.FORWARD == TorchState.FORWARD
    assert TorchState.FORWARD == State.FORWARD
    assert State.FORWARD != TorchState.IDLE
    assert hash(State.IDLE) == hash(TorchState.IDLE)
    handle = one(Example(), 2)
    handle._training_state = TorchState.FORWARD
    assert handle._training_state is HandleTrainingState.FORWARD
    for wrong in ("FORWARD", None, 3):
        with pytest.raises(ValueError, match="expected a HandleTrainingState"):
            handle._training_state = wrong
    handle._training_state = State.IDLE
    for state in (State.IDLE, State.FORWARD, State.BACKWARD_PRE):
        handle._training_state = State.IDLE
        handle._training_state = state
        with pytest.raises(
            RuntimeError, match=f"accumulate_grad\\(\\) is not possible in {state.name}, only in BACKWARD_P"
        ):
            handle.accumulate_grad()
    handle._training_state = State.BACKWARD_POST
    with pytest.raises(RuntimeError, match=r"\(a, b, c\) has no gradient to accumulate"):
        handle.accumulate_grad()
    with pytest.raises(AssertionError, match="expects to be in BACKWARD_PRE, or IDLE"):
        handle.prepare_gradient_for_backward()
    handle._training_state = State.IDLE
    with pytest.raises(AssertionError, match="call unshard"):
        handle.prepare_gradient_for_backward()
    handle._training_state = State.BACKWARD_PRE
    with pytest.raises(RuntimeError, match=r"not ended by IDLE.*recover"):
        handle._training_state = State.FORWARD
    handle._training_state = State.IDLE
    with pytest.raises(RuntimeError, match=r"unshard_grad\(\) needs the flat parameter of Example"):
        handle.unshard_grad()
    with pytest.warns(UserWarning, match="made with offload_grads=False"):
        handle.offload_grad()
    offloads = one(Example(), 2, offload=True)
    with pytest.raises(RuntimeError, match=r"\(a, b, c\) has no gradient on the device to offload \(NONE\)"):
        offloads.offload_grad()
    offloads.reload_full_prec_grad()
    assert not offloads.already_load_full_prec_grad()
    offloads.alloc_full_prec_grad()
    with pytest.raises(RuntimeError, match=r"to offload \(ZEROS\)"):
        offloads.offload_grad()
    with pytest.raises(AssertionError, match="sharded with size"):
        handle.set_shard_grad(torch.ones(3))
    for number in (1.0, 2.0):
        handle.set_shard_grad(torch.full((4,), number))
    handle.prepare_gradient_for_zero1()
    assert torch.equal(handle.flat_param.grad, torch.full((4,), 3.0))
    with pytest.raises(AssertionError, match="call shard"):
        one(Example(), 2, shard=False).init_flat_param_attributes()
    unready = one(Example(), 2, shard=False)
    unready.shard()
    with pytest.raises(AssertionError, match="call pre_unshard"):
        unready.unshard()


# Gradients that come in other ways than one after another


def in_flight_together():
    """F0 F1 B0 F2 B1 B2, as pipelines run it, and a unit that is called twice in a forward."""
    model, driver, reference = twins(2)
    driver.sync = False
    pending, order = {}, ["F0", "F1", "B0", "F2", "B1", "B2"]
    for call in order:
        k = int(call[1])
        if call[0] == "F":
            pending[k] = loss_of(model, data(k))
            continue
        driver.sync = call == order[-1]
        pending.pop(k).backward()
        for handle in driver.handles:
            handle._training_state = State.IDLE
    for handle in driver.handles:
        handle.wait_reduce_scatter()
        handle.flat_param._saved_grad /= 4
        handle.prepare_gradient_for_zero1()
    unsharded_backward(reference, 0, 3)
    assert_close(full_grads(driver.handles, model), [p.grad for p in reference.parameters()])
    for dtype in (None, LOW):
        model, reference = (nn.Sequential(nn.Linear(3, 3, dtype=dtype)) for _ in range(2))
        with torch.no_grad():
            for module in (model, reference):
                for param in module.parameters():
                    param.copy_(torch.linspace(-1, 1, param.numel()).view_as(param))
        driver = drive(model, 2, dtype, units=[model[0]])
        x = torch.ones(2, 3, dtype=dtype)
        driver.backward([lambda model=model, x=x: model(model(x)).sum()])
        reference(reference(x)).sum().backward()
        atol = 1e-6 if dtype is None else 0.05
        assert_close(full_grads(driver.handles, model), [p.grad.float() for p in reference.parameters()], atol)


def unevenly_used():
    """Units that get no gradient on some ranks, frozen ones, and a root that returns what its last unit does."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x, used=True):
            x = self.blocks[0](x * self.scale)
            aside = self.blocks[1](x)
            x = x + aside if used else x
            return self.blocks[3](self.blocks[2](x))

    model, reference = Chain(), Chain()
    for module in (model, reference):
        module.blocks[0].requires_grad_(False)
        module.blocks[2].bias.requires_grad_(False)
    driver = drive(model, 2)
    after_backward = driver.after_backward

    def without_reducing(handle):
        driver.sync, sync = False, driver.sync
        after_backward(handle)
        driver.sync = sync

    for count, least in itertools.product((1, 2), (2, 5)):
        # Where only some ranks have a gradient, all reduce at the end, in one order
        driver.after_backward = without_reducing if least == 2 else after_backward
        driver.backward([lambda least=least: model(data(0), used=dist.get_rank() >= least).square().mean()] * count)
        for _ in range(count):
            for rank in range(4):
                (reference(data(0, rank), used=rank >= least).square().mean() / 4).backward()
        expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in reference.parameters()]
        found = full_grads(driver.handles, model)
        assert_close(
            [g for g, p in zip(found, reference.parameters(), strict=True) if p.requires_grad],
            [g for g, p in zip(expected, reference.parameters(), strict=True) if p.requires_grad],
        )
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert other.requires_grad or param.grad is None
            param.grad = other.grad = None
    with pytest.raises(RuntimeError, match="nothing to reduce of the flat parameter of Linear"):
        driver.handles[0]._get_reduce_scatter_tensors()


def clearing():
    """Whatever is cleared is gone; what is not is added to."""
    for offload, to_none in itertools.product((False, True), (True, False)):
        note(f"offload={offload} to none={to_none}")
        model, driver, reference = twins(2, offload=offload)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def abandoned(model=model, driver=driver):
            driver.sync = False
            loss_of(model, data(77)).backward()
            for handle in driver.handles:
                handle._training_state = State.IDLE

        abandoned()
        assert all(p.grad is not None for p in model.parameters())
        with pytest.raises(
            ValueError, match=r"SGD.step\(\): the gradient of `.*` is the sum of this rank's micro-batc"
        ):
            optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        driver.backward(losses(model, 0, 2))
        unsharded_backward(reference, 0, 2)
        assert_close(full_grads(driver.handles, model), [p.grad for p in reference.parameters()])
        note("two synced backwards add up")
        driver.backward(losses(model, 1, 1))
        unsharded_backward(reference, 1, 1)
        assert_close(full_grads(driver.handles, model), [p.grad for p in reference.parameters()])
        note("cleared after an abandoned one, what was reduced before too")
        abandoned()
        optimizer.zero_grad(set_to_none=to_none)
        reference.zero_grad()
        driver.backward(losses(model, 2, 1))
        unsharded_backward(reference, 2, 1)
        assert_close(full_grads(driver.handles, model), [p.grad for p in reference.parameters()])
        note("one parameter cleared")
        abandoned()
        model.blocks[0].scale.grad = None
        driver.backward(losses(model, 3, 1))
        kept = reference.blocks[0].scale
        kept.grad = None
        unsharded_backward(reference, 3, 1)
        alone = kept.grad.clone()
        for rank in range(4):
            (loss_of(reference, data(77, rank)) / 4).backward()
        kept.grad = alone
        assert_close(full_grads(driver.handles, model), [p.grad for p in reference.parameters()])
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        for handle in driver.handles:
            handle._reset_flat_param_grad_info_if_needed()
            assert handle.flat_param.grad is None
            assert handle.sharded_grad is None


def parameters_are_the_same_objects():
    model, driver, _ = twins(2)
    originals = list(model.parameters())
    shapes = [p.shape for p in originals]

    def check():
        assert [id(p) for p in model.parameters()] == [id(p) for p in originals]
        assert [p.shape for p in originals] == shapes
        assert [value.shape for value in model.state_dict().values()] == shapes

    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        with torch.no_grad():
            model(data(0))
        check()
        loss = loss_of(model, data(0))
        check()
        driver.sync = False
        loss.backward()
        for handle in driver.handles:
            handle._training_state = State.IDLE
        check()
        driver.backward(losses(model, 0, 2))
        check()
        optimizer.step()
        optimizer.zero_grad()
        check()


def whole_gradients():
    model, driver, reference = twins(2, param_dtype=LOW)
    reference, low = make(), make().to(LOW)
    del reference
    handles = driver.handles
    driver.backward([lambda: model(data(0, rank=0).to(LOW)).float().square().mean()])
    low(data(0, rank=0).to(LOW)).float().square().mean().backward()
    pieces = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with summoned(handles):
        for handle in handles:
            handle.unshard_grad()
        assert_equal([p.grad for p in model.parameters()], [p.grad.float() for p in low.parameters()])
    for handle in handles:
        handle.reshard_grad()
    for param, piece in zip(model.parameters(), pieces, strict=True):
        assert (param.grad is None) == (piece is None)
        assert piece is None or torch.equal(param.grad, piece)
    model.zero_grad()
    for handle in handles:
        handle._reset_flat_param_grad_info_if_needed()
    with summoned(handles):
        for handle in handles:
            handle.unshard_grad()
        assert all(p.grad is None for p in model.parameters())
    for handle in handles:
        handle.reshard_grad()


def after_an_exception():
    for where in ("forward", "backward"):
        model, driver, reference = twins(2)
        train(model, driver, reference, 2, lambda params: torch.optim.SGD(params, lr=0.1), steps=1)
        driver.backward(losses(model, 5, 1))
        unsharded_backward(reference, 5, 1)
        driver.sync = False
        loss_of(model, data(7)).backward()
        for handle in driver.handles:
            handle._training_state = State.IDLE

        def refuse(*_):
            raise KeyError("on purpose")

        def failing(model=model):
            return loss_of(model, data(9))

        inner = model.blocks[1]
        if where == "forward":
            hook = inner.outer.register_forward_hook(refuse)
        else:
            hook = inner.outer.register_full_backward_hook(refuse)
        with pytest.raises(KeyError, match="on purpose"):
            driver.backward([failing, failing])
        hook.remove()
        if where == "backward":
            with pytest.raises(RuntimeError, match="recover"):
                loss_of(model, data(9))
        for handle in driver.handles:
            handle.recover()
            handle._reset_flat_param_grad_info_if_needed()
        assert_close(full_grads(driver.handles, model), [p.grad for p in reference.parameters()])
        driver.backward(losses(model, 6, 2))
        unsharded_backward(reference, 6, 2)
        assert_close(full_grads(driver.handles, model), [p.grad for p in reference.parameters()])


def a_gradient_that_does_not_come():
    """What was prepared is given back, and what was reduced before is the gradient again."""
    module = Example()
    handle = one(module, 2, LOW)
    flat = handle.flat_param
    handle.set_shard_grad(torch.ones(5))
    handle.prepare_gradient_for_zero1()
    pieces = [p.grad for p in module.parameters()]
    unshard(handle, State.BACKWARD_PRE)
    handle.prepare_gradient_for_backward()
    assert held(flat._full_grad_padded) == 20 * 2
    assert module.a.grad.shape == (2, 3)
    reshard(handle)
    assert held(flat._full_grad_padded) == 0
    assert flat.grad.tolist() == [1.0] * 5
    for param, piece in zip(module.parameters(), pieces, strict=True):
        assert (param.grad is None) == (piece is None)
        assert piece is None or torch.equal(param.grad, piece)
    note("cleared while unsharded")
    unshard(handle, State.FORWARD)
    cleared = next(i for i, info in enumerate(flat._shard_param_infos) if info.in_shard)
    flat._params[cleared].grad = None
    handle._training_state = State.IDLE
    unshard(handle, State.BACKWARD_PRE)
    handle.prepare_gradient_for_backward()
    reshard(handle)
    info = flat._shard_param_infos[cleared]
    pieces = sum(info.in_shard for info in flat._shard_param_infos)
    assert (flat.grad is None) == (pieces == 1)
    assert pieces == 1 or not flat.grad[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard].any()
    assert flat._params[cleared].grad is None
    with pytest.raises(AssertionError, match="expected a multiple of 2 elements, got 7"):
        handle._get_shard_from_padded_unshard_tensor(torch.ones(7), 0, 2)


def deleted_units_are_gone():
    gc.collect()
    gc.disable()
    try:
        for step in (False, True):
            module = Example()
            handle = one(module, 1, LOW)
            gone = [weakref.ref(handle), weakref.ref(handle.flat_param), weakref.ref(handle.flat_param._zero1_shard)]
            if step:
                unshard(handle, State.FORWARD)
                loss = module(torch.ones(1, 3, dtype=LOW)).sum()
                reshard(handle)
                unshard(handle, State.BACKWARD_PRE)
                handle.prepare_gradient_for_backward()
                loss.backward()
                handle._training_state = State.BACKWARD_POST
                handle.reshard(True)
                handle.accumulate_grad()
                handle.free_runtime_unshard_grad()
                handle._training_state = State.IDLE
                assert module.a.grad is not None
                del loss
            del handle, module
            assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()


def a_gradient_is_not_thrown_away():
    module = Example()
    handle = one(module, 2)
    unshard(handle, State.FORWARD)
    loss = module(torch.ones(1, 3)).sum()
    reshard(handle)
    unshard(handle, State.BACKWARD_PRE)
    handle.prepare_gradient_for_backward()
    handle._reset_flat_param_grad_info_if_needed()  # the reference's root does, and loses the gradient of its last unit
    loss.backward()
    handle._training_state = State.BACKWARD_POST
    with pytest.raises(RuntimeError, match="would be lost"):
        handle.free_runtime_unshard_grad()
    handle.reshard(True)
    handle.accumulate_grad()
    with pytest.raises(RuntimeError, match="no gradient to accumulate"):
        handle.accumulate_grad()
    handle.free_runtime_unshard_grad()
    reference = Example()
    reference(torch.ones(1, 3)).sum().backward()
    assert torch.equal(handle.flat_param._full_prec_grad_padded[:6].view(2, 3), reference.a.grad)
    handle.free_full_prec_grad()
    handle._training_state = State.IDLE
    assert all(p.grad is None for p in module.parameters())
    unshard(handle, State.FORWARD)
    loss = module(torch.ones(1, 3)).square().sum()
    reshard(handle)
    unshard(handle, State.BACKWARD_PRE)
    handle.prepare_gradient_for_backward()
    loss.backward(create_graph=True)
    handle._training_state = State.BACKWARD_POST
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        handle.accumulate_grad()


# Groups and input


def degenerate_groups():
    """All ranks in the inner group: no second shard. One rank in it: no second copy, and no collective over it."""
    world = dist.get_world_size()
    for inner in (1, world):
        model, driver, reference = twins(inner)
        units = len(driver.handles)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with counted(inner) as log:
                driver.backward(losses(model, 0, 2))
            assert {group for _, group, *_ in log} <= {"wide"}
            gathers = sum(kind == "gather" for kind, *_ in log)
            assert gathers == (0 if world == 1 else units * (1 if inner == 1 else 4))
            optimizer.step()
            optimizer.zero_grad()
            for handle in driver.handles:
                flat = handle.flat_param
                assert (held(flat._full_param_padded) > 0) == (inner == 1)
                assert flat._zero3_shard is None
        for _ in range(2):
            reference.zero_grad()
            unsharded_backward(reference, 0, 2)
            with torch.no_grad():
                for param in reference.parameters():
                    param -= 0.1 * param.grad
        assert_close(full_params(driver.handles, model), list(reference.parameters()))
        for handle in driver.handles:
            handle.sync_params()
        with summoned(driver.handles):
            pass
        with torch.no_grad():
            torch.testing.assert_close(model(data(1)), reference(data(1)), rtol=0, atol=1e-6)


def strided_groups():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, driver, reference = twins(2, strided=True)
    train(model, driver, reference, 2, lambda params: torch.optim.SGD(params, lr=0.1))


def bad_input():
    zero3, zero1 = pair(2)
    rank = dist.get_rank()

    def refused(error, match, module=None, params=None, groups=(zero3, zero1), on_all=True):
        module = Example() if module is None else module
        before = list(module.parameters())
        params = before if params is None else params
        with pytest.raises(error, match=match):
            FlatParamHandle(params, module, CPU, None, None, *groups)
        assert [id(p) for p in module.parameters()] == [id(p) for p in before]

    some = group_of([0, 1, 2])
    twos, odd = [group_of([0, 1]), group_of([2, 3])], [group_of([0, 3]), group_of([1, 2])]
    refused(ValueError, "zero3_process_group", groups=(None, zero1))
    refused(ValueError, "zero1_process_group", groups=(zero3, dist.GroupMember.NON_GROUP_MEMBER))
    refused(TypeError, "process group, got str", groups=(zero3, "world"))
    threes = [some, group_of([3])][rank // 3]
    refused(ValueError, r"one size: rank 0 has \[0, 1, 2\], rank 3 has \[3\]", groups=(threes, zero1))
    overlapping = twos[0] if rank < 2 else odd[1] if rank == 2 else twos[1]
    refused(ValueError, "zero3 groups overlap", groups=(overlapping, zero1))
    alone = [group_of([rank]) for rank in range(4)][rank]
    if rank < 3:
        match = r"zero3 ranks \[2, 3\] the ranks \[3\] are not in its zero1 group \[0, 1, 2\]"
        refused(ValueError, match, groups=(twos[rank // 2], some))
    else:
        one_of_one = Example()
        FlatParamHandle(list(one_of_one.parameters()), one_of_one, CPU, None, None, alone, alone)
    for dtypes, name in (((torch.int8, None), "mp_param_dtype"), ((None, torch.bool), "mp_reduce_dtype")):
        with pytest.raises(ValueError, match=f"expected {name} to be a floating-point dtype or None, got torch"):
            one(Example(), 2, *dtypes)
    refused(ValueError, "empty parameter list", params=[])
    refused(
        ValueError, r"params\[0\] \(shape \(2,\).*not a parameter of this Example", params=[nn.Parameter(torch.ones(2))]
    )
    wrong = Example()
    wrong.b = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    refused(ValueError, r"`b` \(shape \(3,\), torch.int64", wrong)
    wrong.b = nn.Parameter(torch.ones(3, dtype=torch.float64))
    refused(ValueError, "`a` .*torch.float32.*`b` .*torch.float64", wrong)
    wrong.b = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    refused(ValueError, r"`b` \(.*\) is complex", wrong)
    wrong.b = nn.Parameter(torch.ones(3, device="meta"))
    refused(ValueError, r"`b` \(.*meta\) has no values: give the module memory", wrong)
    wrong.b = nn.Parameter(wrong.c.data[:1])
    refused(ValueError, "`b` and `c` overlap|`c` and `b` overlap", wrong)
    handle = one(wrong := Example(), 2)
    refused(
        ValueError, r"parameter `a` of .* is flattened already: it belongs to the flat parameter of Example \(a,", wrong
    )
    holder = nn.ModuleDict({"inner": wrong})
    refused(ValueError, "parameter `inner.a` of .*ModuleDict is flattened already", holder)
    del handle
    note("ranks that differ")
    wrong = Example()
    if rank == 2:
        wrong.b = nn.Parameter(torch.ones(4))
    refused(ValueError, r"rank 0 has parameter `b` \(shape \(3,\).*rank 2 has parameter `b` \(shape \(4,\)", wrong)
    if rank == 2:
        wrong.b = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
        refused(ValueError, "^Cannot flatten integer", wrong)
    else:
        refused(ValueError, "rank 2 cannot build its part of this unit: Cannot flatten integer", wrong)
    with pytest.raises(ValueError, match="handles of one zero1 group"):
        agree(
            [
                one(Example(), 2),
                FlatParamHandle(
                    list((m := Example()).parameters()), m, CPU, None, None, twos[rank // 2], twos[rank // 2]
                ),
            ]
        )
    agree([])


def test_four_ranks():
    run_ranks(in_turn, 4, "four", timeout=240.0)


def test_two_ranks_train_bit_for_bit():
    run_ranks(in_turn, 2, "two", timeout=240.0)


def test_random_programs():
    """Of 260 that were run, on one, two and four ranks, when this was written."""
    run_ranks(programs, 2, range(12))


def test_one_rank():
    run_ranks(in_turn, 1, "one", timeout=120.0)


PARTS = {
    "four": [
        (layout,),
        (names_of_the_reference,),
        (states,),
        (bad_input,),
        (training, (2,)),
        (offloading, 2, [(1, False, None), (2, True, None), (3, False, LOW)]),
        (the_calls_of_the_references_runtime, 2),
        (no_gradient_is_lost_in_low_precision,),
        (the_dtype_of_the_reduction_is_honoured,),
        (padding_stays,),
        (buffers_by_phase,),
        (freshness,),
        (syncing,),
        (in_flight_together,),
        (unevenly_used,),
        (clearing,),
        (parameters_are_the_same_objects,),
        (whole_gradients,),
        (after_an_exception,),
        (a_gradient_that_does_not_come,),
        (a_gradient_is_not_thrown_away,),
        (degenerate_groups,),
        (strided_groups,),
    ],
    "two": [
        (training, (1, 2)),
        (offloading, 1, [(1, True, LOW), (2, False, LOW), (3, True, None), (3, False, None)]),
        (degenerate_groups,),
    ],
    "one": [(training, (1,)), (degenerate_groups,), (deleted_units_are_gone,)],
}


def in_turn(which):
    for function, *arguments in PARTS[which]:
        note(function.__name__)
        function(*arguments)
        dist.barrier()


def test_the_fused_addition_gives_torchs_bits():
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for to, of in itertools.product(dtypes, dtypes):
        source, target = torch.randn(1003, dtype=torch.float64).to(of), torch.randn(1003, dtype=torch.float64).to(to)
        added, version = target.clone(), target._version
        flatparam._C.convert(target, source, False)
        assert torch.equal(target, source.to(to))
        flatparam._C.convert(added, source, True)
        assert target._version == version + 1
        flatparam._C.convert(target, source, True)
        assert torch.equal(target, source.to(to) + source.to(to))
    whole = torch.ones(8)
    freed = torch.ones(4)
    flatparam._C.resize_storage(freed, 0)
    for bad in (whole[:4], whole.view(2, 4), freed, whole[:8:2], torch.ones(5)):
        with pytest.raises(ValueError, match="expected two"):
            flatparam._C.convert(whole[:4], bad, True)
    with pytest.raises(TypeError, match="plain"):
        flatparam._C.convert(whole, None, True)
    assert torch.equal(whole, torch.ones(8))


def test_versions_tell_of_changes_in_place():
    params = [nn.Parameter(torch.ones(3)), torch.ones(2)]
    before = flatparam._C.versions(params)
    with torch.no_grad():
        params[0].add_(1)
    assert flatparam._C.versions(params) == (before[0] + 1, 0, 0)
    params[0].grad = torch.zeros(3)
    params[0].grad.add_(1)
    assert flatparam._C.versions(params)[1:] == (1, 1)
    assert flatparam._C.versions([torch.ones(2, device="meta")]) is None
