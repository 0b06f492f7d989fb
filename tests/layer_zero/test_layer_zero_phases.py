"""The content of LayerZero's handle in each phase: states, buffers, gathered values, and users' actions meanwhile.

Promises:
- which storage has memory when; writes that ranks have not agreed on, in inference mode, of one unit; SYNC_PARAMS; P of
  1 and of all ranks: `test_phases` (`buffers_by_phase`, `freshness`, `syncing`),
  `test_layer_zero_layout.py::test_layout` (`degenerate_groups`)
"""

import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from fsdp_models import data, loss_of, make
from gloo import note
from layer_zero_checks import LOW, Example, assert_close, assert_equal, named, train
from layer_zero_driver import (
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
from layer_zero_programs import chain
from layer_zero_ranks import counted
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp._flat_param import HandleTrainingState as TorchState

from flatparam.layer_zero import HandleTrainingState, agree
from flatparam.layer_zero.handle import owner_of

pytestmark = pytest.mark.multiprocess


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
    """One gather over all ranks a changed unit. `test_a_write_is_gathered_once` has the writes to all units."""
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

    def step():
        driver.backward(losses(model, 0, 2))
        optimizer.step()
        optimizer.zero_grad()

    assert changed_by(lambda: None) == each
    assert changed_by(lambda: None) == 0
    assert changed_by(in_place) == 1
    assert changed_by(lambda: None) == 0
    assert changed_by(on_one_rank) == 1
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
    with warnings.catch_warnings(record=True) as warned:
        handle.offload_grad()
    assert ["made with offload_grads=False" in str(one.message) for one in warned] == [True] * (dist.get_rank() == 0)
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


def changing_zeros(offload):
    """Beside a gradient that was reduced, a sum of zeros can be cleared, and is not taken for cleared when changed."""
    model, driver, reference = twins(2, offload=offload)
    weights = [m.blocks[0].scale for m in (model, reference)]

    def begin():
        for m in (model, reference):
            m.zero_grad()
        driver.backward(losses(model, 0, 1))
        unsharded_backward(reference, 0, 1)
        driver.sync = False
        (loss_of(model, data(77)) * 0.0).backward()
        for handle in driver.handles:
            handle._training_state = State.IDLE

    begin()
    driver.backward(losses(model, 1, 1))
    unsharded_backward(reference, 1, 1)
    assert_close(full_grads(driver.handles, model), [p.grad for p in reference.parameters()])
    begin()
    for weight in weights:
        weight.grad.zero_()
    driver.backward(losses(model, 1, 1))
    unsharded_backward(reference, 1, 1)
    assert_close(full_grads(driver.handles, model), [p.grad for p in reference.parameters()])
    for change in (lambda grad: grad.mul_(1.0), lambda grad: grad.mul_(0.5)):
        begin()
        change(weights[0].grad)
        with pytest.raises(ValueError, match="parameter `scale` of a Block was changed in place between micro-batches"):
            driver.backward(losses(model, 1, 1))
        for handle in driver.handles:
            handle.recover()
        assert_close(full_grads(driver.handles, model), [p.grad for p in reference.parameters()])


def clearing(offload):
    """Clear some gradients: a backward adds to the others. `test_cleared_micro_batches_leave_no_trace` clears all."""
    model, driver, reference = twins(2, offload=offload)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    driver.backward(losses(model, 2, 1))
    unsharded_backward(reference, 2, 1)

    def abandoned(model=model, driver=driver):
        driver.sync = False
        loss_of(model, data(77)).backward()
        for handle in driver.handles:
            handle._training_state = State.IDLE

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
    model, driver, _ = twins(min(2, dist.get_world_size()))
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
        full_params(driver.handles, model)
        check()


def a_replaced_parameter_is_taken():
    """The master gets the values of a new object, which is the handle's parameter from then on."""
    module = Example()
    handle = one(module, 2)
    module.a = new = nn.Parameter(torch.full_like(Example().a, 7.0))
    unshard(handle, State.FORWARD)
    assert torch.equal(module.a, Example().a.new_full((2, 3), 7.0))
    reshard(handle)
    assert module.a is handle.flat_param._params[0] is new
    assert owner_of(new) is handle
    module.a.data = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"Cannot writeback.*`a`.*its shape"):
        handle.pre_unshard()
    assert torch.equal(full_params([handle], module)[0], torch.full((2, 3), 7.0))


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


def changed_in_evaluation(module, args):
    with torch.no_grad():
        module.weight.mul_(1.5)


def given_data(module, args):
    module.weight.data = module.weight.data * 1.5


def given_an_object(module, args):
    module.weight = nn.Parameter(torch.ones_like(module.weight))


def written_in_a_forward(inner):
    """What a forward writes to a weight is trained on and kept; another object in its place is an error."""
    for write, records in ((changed_in_evaluation, False), (given_data, False), (given_data, True)):
        note(f"inner={inner} {write.__name__} records={records}")
        model, reference = chain(), chain()
        driver = drive(model, inner, units=list(model))
        hooks = [m[1][0].register_forward_pre_hook(write) for m in (model, reference)]
        if records:
            driver.backward(losses(model, 0, 1))
            loss_of(reference, data(0)).backward()  # the hook runs once: the gradient is taken again below
            for hook in hooks:
                hook.remove()
            with torch.no_grad():
                found = [p.clone() for p in reference.parameters()]
            reference.zero_grad()
            unsharded_backward(reference, 0, 1)
            assert_close(full_grads(driver.handles, model), [p.grad for p in reference.parameters()])
        else:
            with torch.no_grad():
                assert_equal([model(data(0))], [reference(data(0))])
            for hook in hooks:
                hook.remove()
            found = list(reference.parameters())
        assert_equal(full_params(driver.handles, model), found)
        with torch.no_grad():
            assert_equal([model(data(1))], [reference(data(1))])
    model, reference = chain(), chain()
    driver = drive(model, inner, units=list(model))
    hook = model[1][0].register_forward_pre_hook(given_an_object)
    with pytest.raises(RuntimeError, match="parameter `weight` of a Linear was replaced by another object in"):
        model(data(0))
    hook.remove()
    for handle in driver.handles:
        handle.recover()
    assert_equal(full_params(driver.handles, model), list(reference.parameters()))


CASES = [
    (4, states),
    (4, buffers_by_phase),
    (4, freshness),
    (4, syncing),
    (4, in_flight_together),
    (4, written_in_a_forward, 2),
    (2, written_in_a_forward, 2),
    (2, written_in_a_forward, 1),
    (4, clearing, False),
    pytest.param((4, clearing, True), marks=pytest.mark.thorough),
    (4, changing_zeros, True),
    pytest.param((4, changing_zeros, False), marks=pytest.mark.thorough),
    (4, parameters_are_the_same_objects),
    (1, parameters_are_the_same_objects),
    (2, a_replaced_parameter_is_taken),
    (4, whole_gradients),
    (4, after_an_exception),
    (4, a_gradient_that_does_not_come),
    (4, a_gradient_is_not_thrown_away),
    (1, deleted_units_are_gone),
]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_phases(case):
    world_size, function, *arguments = case
    simulate_ranks(function, world_size, *arguments)


def nothing_is_offloaded():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            one(Example()).offload_grad()
    return [(str(each.message), each.filename == __file__) for each in told]


def test_the_first_rank_is_told_that_nothing_is_offloaded():
    first, second = simulate_ranks(nothing_is_offloaded, 2)  # Python shows equal warnings of one line once
    assert first == 2 * [("offload_grad() does nothing: the handle was made with offload_grads=False", True)]
    assert second == []
