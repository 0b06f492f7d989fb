"""flatparam.optim beside torch's fused optimizers over the same pieces, or over one flat tensor; in one process.

Promises:
- a step of pieces that lie side by side has the bits of torch's fused step over one flat tensor, whatever their
  lengths, and is one call of torch's kernel for each run: `test_pieces_step_as_one_flat_tensor`
- with what breaks a run (a missing gradient, a gradient, state or parameter elsewhere, another dtype, another number of
  steps) each parameter steps as with torch: `test_a_run_that_breaks_steps_right`
- a state dict of torch's optimizer loads, torch's loads ours, and states are side by side again after a load and a
  pickle: `test_states_go_to_torch_and_back`
- an infinite gradient under torch's GradScaler skips the step and does not count it: `test_a_grad_scaler_skips_a_step`
- momentum begins with a parameter's first step that is not skipped, also if others have theirs before, where torch's
  fused SGD keeps uninitialized memory or raises: `test_momentum_begins_with_the_first_step_of_a_parameter`
- what torch's fused step does not take goes to torch: `test_torch_steps_what_is_not_for_runs`
- SGD of bf16 and fp16 on the host has the bits of torch's default step, as torch's fused kernel leaves these
  parameters as they are; Adam's are near: `test_half_precision_steps_as_by_default`,
  `test_half_precision_of_adam_is_near_the_default`
- a sparse gradient is refused at any step: `test_a_sparse_gradient_is_refused_at_any_step`
- gradients and states with other strides than the parameter's step as by default:
  `test_other_strides_step_as_by_default`
- `foreach`, `differentiable`, complex parameters and devices without fused kernels turn the default `fused=True` off,
  also in a loaded group, and a gradient scaler takes such an optimizer:
  `test_fused_is_the_default_where_it_can_be`, `test_parameters_on_meta_step_as_by_default`,
  `test_a_grad_scaler_takes_a_loaded_group`
- a step that raises counts for all parameters of a run or for none, and states of other shapes than their parameters'
  are refused by name before anything is stepped, also of other groups:
  `test_a_step_that_raises_counts_for_all_or_none`, `test_steps_of_one_element_count_for_all_of_a_run`,
  `test_a_state_of_another_shape_is_refused_by_name`
- steps without their memory end runs, and failed allocations raise:
  `test_steps_whose_storage_was_made_shorter_end_runs`, `test_allocation_failures_raise`
- a parameter that is in a group twice steps as with torch: `test_a_parameter_twice_in_a_group_steps_as_with_torch`,
  `test_a_parameter_twice_in_a_group_keeps_what_torch_does_wrong_away`
- joining the states keeps one kind of them twice at a time, and the dicts that the optimizer had:
  `test_joining_keeps_dicts_and_frees_states`
"""

import contextlib
import copy
import io
import itertools
import warnings
import weakref

import pytest
import torch
from torch import nn

from flatparam import _C, optim

VECTOR = (
    16  # elements: from a multiple of it on, torch's kernels do not step an element one by one, with other rounding
)
SETTINGS = {
    "AdamW": ("AdamW", {"lr": 0.01}),
    "AdamW amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True}),
    "AdamW maximize": ("AdamW", {"lr": torch.tensor(0.01), "maximize": True}),
    "Adam": ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": ("SGD", {"lr": 0.01, "weight_decay": 0.1}),
    "SGD momentum": ("SGD", {"lr": 0.01, "momentum": 0.9, "dampening": 0.1}),
    "SGD nesterov": ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True, "maximize": True}),
}
every_setting = pytest.mark.parametrize("setting", SETTINGS)
KERNELS = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_")


def make(setting, params, package=optim):
    name, settings = SETTINGS[setting]
    return getattr(package, name)(params, **settings, **({} if package is optim else {"fused": True}))


def side_by_side(sizes, dtype=torch.float32, seed=0):
    """Parameters that are pieces of one tensor."""
    flat = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)).to(dtype)
    return [nn.Parameter(piece) for piece in flat.split(sizes)]


def alone(params):
    """Parameters of the same values, each in memory of its own."""
    return [nn.Parameter(param.detach().clone()) for param in params]


def give_grads(step, *models):
    """Gradients side by side to the parameters of each model."""
    for params in models:
        numel = sum(param.numel() for param in params)
        flat = torch.randn(numel, generator=torch.Generator().manual_seed(100 + step)).to(params[0].dtype)
        for param, piece in zip(params, flat.split([param.numel() for param in params]), strict=True):
            param.grad = piece.view(param.shape)


def joined(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def assert_equal(mine, ours, theirs, others):
    """The same parameters and states, by element."""
    assert torch.equal(joined(mine), joined(theirs))
    keys = {key for state in others.state.values() for key in state}
    assert len(ours.state) == (len(mine) if keys else 0)
    for key in keys - {"step"}:
        left, right = ([one.state[param][key] for param in params] for one, params in ((ours, mine), (others, theirs)))
        assert [each.shape for each in left] == [param.shape for param in mine]
        assert torch.equal(joined(left), joined(right)), key
    if "step" in keys:
        steps = {float(others.state[param]["step"]) for param in theirs}
        assert {float(ours.state[param]["step"]) for param in mine} == steps


@pytest.fixture
def calls(monkeypatch):
    """The number of tensors in each call of torch's fused kernels."""
    found = []
    for name in KERNELS:
        kernel = getattr(torch, name)

        def counted(params, *args, kernel=kernel, **kwargs):
            found.append(len(params))
            return kernel(params, *args, **kwargs)

        monkeypatch.setattr(torch, name, counted)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@every_setting
def test_pieces_step_as_one_flat_tensor(setting, dtype, calls):
    if "SGD" in setting and dtype == torch.bfloat16:
        pytest.skip("torch's fused SGD leaves bf16 on the host as it is: the next test")
    sizes = [1, 7, 8, 9, 13, 16, 17, 31, 33, 100, 3]
    mine = side_by_side(sizes, dtype)
    theirs = [nn.Parameter(joined(mine).clone())]
    ours, others = make(setting, mine), make(setting, theirs, torch.optim)
    for step in range(4):
        give_grads(step, mine, theirs)
        before = [param._version for param in mine]
        others.step()
        calls.clear()
        ours.step()
        assert calls == [1]
        assert all(param._version > version for param, version in zip(mine, before, strict=True))
        assert_equal(mine, ours, theirs, others)


@pytest.mark.parametrize("way", ["default", "fused", "mode", "compiled", "scaled", "mixed", "later"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("setting", [name for name in SETTINGS if "SGD" in name])
def test_half_precision_steps_as_by_default(setting, dtype, way):
    mine = side_by_side([1, 33, 100, 3 * VECTOR], torch.float32 if way == "later" else dtype)
    mine += side_by_side([2 * VECTOR] * 2) if way == "mixed" else []
    settings = SETTINGS[setting][1]
    ours = optim.SGD(mine, **settings, **({"fused": True} if way in ("fused", "scaled", "mixed") else {}))
    for param in mine[:4]:
        param.data = param.data.to(dtype)
    theirs = alone(mine)
    others = torch.optim.SGD(theirs, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    take, others_take = ours.step, others.step
    if way == "compiled":  # torch 2.11 compiles its default step with another rounding
        take, others_take = (torch.compile(one, backend="eager") for one in (take, others_take))
    for step in range(4):
        for kind in (theirs[:4], *([theirs[4:]] if way == "mixed" else [])):
            give_grads(step, kind)
        for param, other in zip(mine, theirs, strict=True):
            param.grad = other.grad * (4 if way == "scaled" else 1)
        before = joined(mine[:4]).clone()
        with torch.device("cpu") if way == "mode" else contextlib.nullcontext():
            scaler.step(ours) if way == "scaled" else take()
        scaler._per_optimizer_states.clear()
        others_take()
        assert (joined(mine[:4]) != before).sum() > VECTOR
        assert_equal(mine, ours, theirs, others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("setting", [name for name in SETTINGS if "Adam" in name])
def test_half_precision_of_adam_is_near_the_default(setting, dtype):
    """Nearer than a step moves: torch's fused kernels of Adam compute in fp32, its loop in the parameter's dtype."""
    mine = side_by_side([1, 33, 100, 3 * VECTOR], dtype)
    theirs, before = alone(mine), joined(mine).clone()
    name, settings = SETTINGS[setting]
    ours, others = (
        getattr(kind, name)(each, **settings, eps=1e-3) for kind, each in ((optim, mine), (torch.optim, theirs))
    )
    for step in range(4):
        give_grads(step, mine, theirs)
        ours.step()
        others.step()
    moved = (joined(theirs) - before).float()
    off = (joined(mine) - joined(theirs)).float()
    assert off.norm() < 0.3 * moved.norm()


def test_torch_rounds_ends_of_pieces_otherwise():
    """So the sizes above show whose bits a step has: those of a flat tensor."""
    mine = side_by_side([VECTOR - 1] * 500)
    theirs = alone(mine)
    ours, others = make("AdamW", mine), make("AdamW", theirs, torch.optim)
    for step in range(3):
        give_grads(step, mine, theirs)
        ours.step()
        others.step()
    unlike = joined(mine) != joined(theirs)
    assert 0 < unlike.sum() < 100
    torch.testing.assert_close(joined(mine), joined(theirs), rtol=1e-6, atol=1e-6)


def test_a_matrix_is_a_piece_and_a_gap_ends_a_run(calls):
    flat = torch.randn(6 * VECTOR + 1)
    places = [
        (0, VECTOR),
        (VECTOR, VECTOR),
        (2 * VECTOR, 2 * VECTOR),
        (4 * VECTOR + 1, VECTOR),
        (5 * VECTOR + 1, VECTOR),
    ]
    mine = [nn.Parameter(flat.narrow(0, start, numel)) for start, numel in places]
    mine[2].data = mine[2].data.view(2, VECTOR)
    mine.insert(1, nn.Parameter(torch.empty(0)))
    theirs = alone(mine)
    ours, others = make("AdamW", mine), make("AdamW", theirs, torch.optim)
    for step in range(3):
        give_grads(step, mine, theirs)
        mine[1].grad = theirs[1].grad = None  # as the runtime has it where a rank has no element
        calls.clear()
        ours.step()
        assert calls == [2]
        others.step()
        assert torch.equal(joined(mine), joined(theirs))
    assert mine[1] not in ours.state
    assert all(ours.state[param]["exp_avg"].shape == param.shape for param in mine if param.numel())


def clear_grad(params, optimizer):
    params[2].grad = None


def move_grad(params, optimizer):
    params[2].grad = params[2].grad.clone()


def swap_grads(params, optimizer):
    params[1].grad, params[2].grad = params[2].grad, params[1].grad


def move_data(params, optimizer):
    params[2].data = params[2].data.clone()


def replace_param(params, optimizer):
    new = nn.Parameter(params[2].detach().clone())
    new.grad, params[2] = params[2].grad, new
    optimizer.param_groups[0]["params"][2] = new


def swap_params(params, optimizer):
    group = optimizer.param_groups[0]["params"]
    group[1], group[2] = group[2], group[1]


def changed(key, value):
    return value.clone() + (key != "step")


def replace_state(params, optimizer):
    if params[2] in optimizer.state:
        optimizer.state[params[2]] = {key: changed(key, value) for key, value in optimizer.state[params[2]].items()}


def replace_one_state(params, optimizer):
    state = optimizer.state.get(params[2], {})
    for key in [key for key in state if key != "step"][-1:]:
        state[key] = changed(key, state[key])


def move_state(params, optimizer):
    for key, value in optimizer.state.get(params[2], {}).items():
        value.data = changed(key, value)


def drop_state(params, optimizer):
    optimizer.state.pop(params[2], None)


def write_step(params, optimizer):
    if "step" in optimizer.state.get(params[2], {}):
        optimizer.state[params[2]]["step"] += 5


def use_two_groups(params, optimizer):
    group = optimizer.param_groups[0]
    group["params"] = params[:2]
    optimizer.add_param_group({**group, "params": params[2:], "lr": 0.5})


def freeze(params, optimizer):
    params[1].requires_grad_(False).grad = None


def clear_last(params, optimizer):
    params[-1].grad = None


BREAKS = {  # runs of the six parameters in that step, and later: of optimizers that count steps, and of SGD
    clear_grad: (2, 3, 1),
    move_grad: (3, 1, 1),
    swap_grads: (4, 1, 1),
    move_data: (3, 3, 3),
    replace_param: (3, 3, 3),
    swap_params: (4, 4, 4),
    replace_state: (1, 1, 1),
    replace_one_state: (1, 1, 1),
    move_state: (1, 1, 1),
    drop_state: (3, 3, 1),
    write_step: (3, 3, 1),
    use_two_groups: (2, 2, 2),
    freeze: (2, 3, 1),
    clear_last: (1, 2, 1),
}


@pytest.mark.parametrize("breaks", BREAKS)
@every_setting
def test_a_run_that_breaks_steps_right(setting, breaks, calls):
    if breaks in (drop_state, replace_param) and "momentum" in SETTINGS[setting][1]:
        pytest.skip("torch's fused SGD refuses parameters of which some have momentum")
    mine = side_by_side([2 * VECTOR] * 6)
    theirs = alone(mine)
    ours, others = make(setting, mine), make(setting, theirs, torch.optim)
    counts = []
    for step in range(6):
        give_grads(step, mine, theirs)
        if step == 2:
            breaks(mine, ours)
            breaks(theirs, others)
        calls.clear()
        ours.step()
        counts.append(sum(calls))
        others.step()
        assert torch.equal(joined(mine), joined(theirs)), step
    at_once, counting, later = BREAKS[breaks]
    if "SGD" in setting:
        at_once, counting = (1, 1) if breaks in (drop_state, write_step) else (at_once, later)
    assert counts == [1, 1, at_once, counting, counting, counting]
    if breaks not in (clear_grad, replace_param, drop_state, write_step, freeze, clear_last):
        assert_equal(mine, ours, theirs, others)


def test_another_dtype_ends_a_run(calls):
    storage = torch.randn(6 * VECTOR)
    mine = [nn.Parameter(storage[:VECTOR]), nn.Parameter(storage[VECTOR : 2 * VECTOR])]
    mine.append(nn.Parameter(storage.view(torch.bfloat16)[4 * VECTOR : 5 * VECTOR].fill_(0.5)))
    mine.append(nn.Parameter(storage.view(torch.bfloat16)[5 * VECTOR : 6 * VECTOR].fill_(0.25)))
    theirs = alone(mine)
    ours, others = make("AdamW", mine), make("AdamW", theirs, torch.optim)
    for _ in range(3):
        for params in (mine, theirs):
            for kind in (params[:2], params[2:]):
                give_grads(0, kind)
        calls.clear()
        ours.step()
        others.step()
        assert calls[:2] == [1, 1]
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def saved(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("way", ["given", "saved", "of the loop"])
@every_setting
def test_states_go_to_torch_and_back(setting, way, calls):
    mine = side_by_side([2 * VECTOR] * 5)
    theirs = alone(mine)
    ours, others = make(setting, mine), make(setting, theirs, torch.optim)
    if way == "of the loop":  # torch's optimizer without fused=True
        others = getattr(torch.optim, SETTINGS[setting][0])(theirs, **SETTINGS[setting][1])
    for step in range(2):
        give_grads(step, mine, theirs)
        ours.step()
        others.step()
    form = saved if way == "saved" else torch.optim.Optimizer.state_dict
    assert ours.state_dict().keys() == others.state_dict().keys()
    left, right = ours.state_dict()["param_groups"], others.state_dict()["param_groups"]
    assert left == right or way == "of the loop"
    new, others_new = alone(theirs), alone(theirs)
    for param, piece in zip(new, joined(new).split(2 * VECTOR), strict=True):
        param.data = piece
    loaded, by_torch = make(setting, new), make(setting, others_new, torch.optim)
    loaded.load_state_dict(form(others))
    by_torch.load_state_dict(copy.deepcopy(others.state_dict()))
    for group in by_torch.param_groups:
        group["fused"] = True
    for step in range(2, 5):
        give_grads(step, new, others_new)
        calls.clear()
        loaded.step()
        assert sum(calls) == 1
        by_torch.step()
        assert_equal(new, loaded, others_new, by_torch)
    # and back: torch's takes the state of ours
    last, mirror = alone(new), alone(others_new)
    back, straight = make(setting, last, torch.optim), make(setting, mirror, torch.optim)
    back.load_state_dict(form(loaded))
    straight.load_state_dict(copy.deepcopy(by_torch.state_dict()))
    for step in range(5, 7):
        give_grads(step, last, mirror)
        back.step()
        straight.step()
        assert_equal(last, back, mirror, straight)


def test_a_pickle_steps_runs(calls):
    mine = side_by_side([VECTOR] * 4)
    ours = make("AdamW", mine)
    give_grads(0, mine)
    ours.step()
    file = io.BytesIO()
    torch.save((mine, ours), file)
    file.seek(0)
    others, optimizer = torch.load(file, weights_only=False)
    for step in range(1, 3):
        give_grads(step, mine, others)
        for one in (ours, optimizer):
            calls.clear()
            one.step()
            assert calls == [1]
        assert_equal(mine, ours, others, optimizer)


@pytest.mark.parametrize("setting", ["AdamW", "SGD", "SGD momentum"])
def test_a_grad_scaler_skips_a_step(setting):
    mine = side_by_side([VECTOR] * 4)
    theirs = alone(mine)
    ours, others = make(setting, mine), make(setting, theirs, torch.optim)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for step in range(4):
        give_grads(step, mine, theirs)
        if step == 2:
            mine[1].grad[3] = theirs[1].grad[3] = float("inf")
        for scaler, optimizer in zip(scalers, (ours, others), strict=True):
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        assert_equal(mine, ours, theirs, others)
    if setting == "AdamW":
        assert {float(state["step"]) for state in ours.state.values()} == {3.0}


@pytest.mark.parametrize("size", [3, VECTOR])
def test_momentum_begins_with_the_first_step_of_a_parameter(size):
    """The oracle is torch's loop; products with powers of 2 have its bits in any kernel."""
    mine = side_by_side([size] * 5)
    theirs = alone(mine)
    pairs = []
    for make_one, params in ((optim.SGD, mine), (torch.optim.SGD, theirs)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        pairs.append((scaler, make_one(params, lr=0.5, momentum=0.5, dampening=0.5)))
    for step in range(8):
        give_grads(step, mine, theirs)
        for param in (*mine[2 + step // 2 :], *theirs[2 + step // 2 :]):
            param.grad = None
        if step % 2 == 0:
            mine[0].grad[1] = theirs[0].grad[1] = float("inf")
        for scaler, optimizer in pairs:
            scaler.step(optimizer)
            scaler.update()
        assert torch.equal(joined(mine), joined(theirs)), step
        for (_, optimizer), params in zip(pairs, (mine, theirs), strict=True):
            has_momentum = [optimizer.state[param].get("momentum_buffer") is not None for param in params]
            assert has_momentum == [i < 2 + (step - 1) // 2 and step > 0 for i in range(5)]


def test_torch_steps_what_is_not_for_runs(calls):
    with pytest.raises(RuntimeError, match="does not support `differentiable`"):
        optim.AdamW(side_by_side([4]), fused=True, differentiable=True)
    with pytest.raises(RuntimeError, match="cannot be `True` together"):
        optim.SGD(side_by_side([4]), fused=True, foreach=True)
    for settings in ({"fused": False}, {"fused": False, "foreach": True}):
        for name, more in (("AdamW", {}), ("SGD", {"momentum": 0.9})):
            mine = side_by_side([VECTOR] * 3)
            theirs = alone(mine)
            ours, others = (
                getattr(optim, name)(mine, **settings, **more),
                getattr(torch.optim, name)(theirs, **settings, **more),
            )
            for step in range(3):
                give_grads(step, mine, theirs)
                ours.step()
                others.step()
                assert_equal(mine, ours, theirs, others)
    assert not calls
    param = nn.Parameter(torch.randn(8, 2))
    param.grad = torch.zeros(8, 2).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse"):
        optim.AdamW([param]).step()


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_sparse_gradient_is_refused_at_any_step(momentum):
    """Not stepped as by default: torch 2.13 adds sparse tensors to the wrong place of a piece."""
    mine = side_by_side([VECTOR] * 3)
    ours = optim.SGD(mine, momentum=momentum)
    for step in range(2):
        give_grads(step, mine)
        mine[1].grad = None
        ours.step()
    before = joined(mine)
    for others in (mine[::2], []):
        mine[1].grad = torch.ones(VECTOR).to_sparse()
        with pytest.raises(RuntimeError, match="does not support sparse"):
            ours.step()
        for param in others:
            param.grad = None
    assert torch.equal(joined(mine), before)


def test_fused_is_the_default_where_it_can_be():
    for kind in (optim.AdamW, optim.Adam, optim.SGD):
        for given, wanted in (
            ({}, True),
            ({"fused": None}, True),
            ({"fused": False}, False),
            ({"foreach": True}, False),
            ({"differentiable": True}, False),
        ):
            one = kind(side_by_side([4]), **given)
            one.add_param_group({"params": side_by_side([4]), "fused": False})
            one.add_param_group({"params": [nn.Parameter(torch.ones(4, dtype=torch.complex64))]})
            for each in (one, copy.deepcopy(one)):
                assert [group["fused"] for group in each.param_groups] == [wanted, False, False]
        assert kind(side_by_side([4]), foreach=False).param_groups[0]["fused"]


@every_setting
def test_complex_parameters_step_as_by_default(setting):
    name, settings = SETTINGS[setting]
    mine = [nn.Parameter(torch.randn(VECTOR, dtype=torch.complex64)) for _ in range(2)]
    theirs = alone(mine)
    ours, others = getattr(optim, name)(mine, **settings), getattr(torch.optim, name)(theirs, **settings)
    for step in range(3):
        give_grads(step, mine, theirs)
        ours.step()
        others.step()
        assert_equal(mine, ours, theirs, others)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_grad_scaler_takes_a_loaded_group(name, foreach):
    mine = side_by_side([VECTOR] * 2)
    theirs = alone(mine)
    ours, others = getattr(optim, name)(mine), getattr(torch.optim, name)(theirs, foreach=foreach)
    ours.load_state_dict(others.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    give_grads(0, mine, theirs)
    others.step()
    for param in mine:
        param.grad *= 4
    scaler.step(ours)
    scaler.update()
    torch.testing.assert_close(joined(mine), joined(theirs))


def test_parameters_on_meta_step_as_by_default():
    for kind in (optim.AdamW, optim.Adam, optim.SGD):
        param = nn.Parameter(torch.empty(4, device="meta"))
        param.grad = torch.empty_like(param)
        one = kind([param])
        one.step()
        assert not one.param_groups[0]["fused"]


@pytest.mark.parametrize("key", ["lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"])
@pytest.mark.parametrize("wrong", ["missing", "text"])
def test_a_step_that_raises_counts_for_all_or_none(key, wrong):
    mine = side_by_side([VECTOR] * 4)
    theirs = alone(mine)
    ours, others = make("AdamW", mine), make("AdamW", theirs, torch.optim)
    for step in range(4):
        give_grads(step, mine, theirs)
        if step == 2:
            for optimizer in (ours, others):
                group = optimizer.param_groups[0]
                right = group.pop(key)
                group |= {} if wrong == "missing" else {key: "x"}
                with pytest.raises((KeyError, TypeError, ValueError)):
                    optimizer.step()
                group[key] = right
        ours.step()
        others.step()
        assert_equal(mine, ours, theirs, others)


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("numel", [3, VECTOR, 5 * VECTOR])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("setting", ["AdamW", "SGD momentum"])
def test_a_state_of_another_shape_is_refused_by_name(setting, groups, numel, names):
    """As torch loads them. Its loop then raises amid a step, and its fused kernel goes beyond the memory."""
    source, mine = side_by_side([VECTOR, numel, VECTOR]), side_by_side([VECTOR, 2 * VECTOR, VECTOR])
    give_grads(0, source)

    def in_groups(params):  # the wrong state is in the last one
        params = list(zip(("first", "second", "last"), params, strict=True)) if names else params
        return [{"params": one} for one in (params[: groups - 1], params[groups - 1 :]) if one]

    saved_from = make(setting, in_groups(source))
    saved_from.step()
    ours = make(setting, in_groups(mine))
    ours.load_state_dict(saved_from.state_dict())
    give_grads(1, mine)
    before, steps = joined(mine).clone(), [dict(ours.state[param]).get("step") for param in mine]
    key, name = (
        "exp_avg" if setting == "AdamW" else "momentum_buffer",
        "second" if names else f"parameter {2 - groups} of",
    )
    with pytest.raises(ValueError, match=rf"expected {key} of {name} .*\({2 * VECTOR},\), got \({numel},\)"):
        ours.step()
    assert torch.equal(joined(mine), before)
    assert [dict(ours.state[param]).get("step") for param in mine] == steps
    ours.state.clear()
    ours.step()
    assert not any(torch.equal(param, old) for param, old in zip(mine, before.split(list(map(len, mine))), strict=True))


def test_steps_of_one_element_count_for_all_of_a_run():
    mine = side_by_side([VECTOR] * 3)
    theirs = alone(mine)
    ours, others = make("AdamW", mine), make("AdamW", theirs, torch.optim)
    for step in range(3):
        give_grads(step, mine, theirs)
        for optimizer in (ours, others):
            for state in optimizer.state.values():
                state["step"] = state["step"].reshape(1)
            optimizer.step()
        assert_equal(mine, ours, theirs, others)


def test_a_parameter_twice_in_a_group_keeps_what_torch_does_wrong_away():
    for group in ("of bf16", "another"):
        param = nn.Parameter(torch.ones(VECTOR))
        halves = [nn.Parameter(torch.ones(4 * VECTOR, dtype=torch.bfloat16)) for _ in range(2)]
        groups = [[*halves, halves[0]]] if group == "of bf16" else [[param, param], halves]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, for the duplicate
            ours = optim.SGD([{"params": params} for params in groups], lr=0.25, fused=True)
        for one in (param, *halves):
            one.grad = torch.ones_like(one)
        ours.step()
        assert all(float(one.detach().max()) < 1.0 for one in halves)
    mine = side_by_side([VECTOR] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = make("AdamW", [*mine, mine[0]])
    give_grads(0, mine)
    ours.step()
    ours.state[mine[1]]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="expected exp_avg of parameter 1 of"):
        ours.step()


@every_setting
def test_a_parameter_twice_in_a_group_steps_as_with_torch(setting):
    mine = side_by_side([VECTOR] * 6)
    theirs = alone(mine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, for the duplicate
        ours, others = (
            make(setting, [*params, params[2]], package) for params, package in ((mine, optim), (theirs, torch.optim))
        )
    for step in range(3):
        give_grads(step, mine, theirs)
        ours.step()
        others.step()
        assert_equal(mine, ours, theirs, others)


def transposed(tensor):
    """The same values, column by column in memory."""
    return tensor.t().contiguous().t()


def transpose_grad(params, optimizer):
    params[1].grad = transposed(params[1].grad)


def transpose_first_grad(params, optimizer):
    params[0].grad = transposed(params[0].grad)


def expand_grad(params, optimizer):
    params[0].grad = params[0].grad[:1].expand(4, VECTOR)


def gap_in_param(params, optimizer):
    params[2].data = params[2].data.repeat(1, 2)[:, :VECTOR]
    params[2].grad = params[2].grad.repeat(1, 2)[:, :VECTOR]


def transpose_param(params, optimizer):
    for param in params[:2]:
        param.data = transposed(param.data)


def transpose_param_and_grad(params, optimizer):
    transpose_param(params, optimizer)
    transpose_grad(params, optimizer)


ODD = [transpose_grad, transpose_first_grad, expand_grad, gap_in_param, transpose_param, transpose_param_and_grad]


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("change", ODD)
@every_setting
def test_other_strides_step_as_by_default(setting, change, once):
    name, settings = SETTINGS[setting]
    mine = side_by_side([4 * VECTOR] * 4)
    for param in mine:
        param.data = param.data.view(4, VECTOR)
    theirs = alone(mine)
    ours, others = getattr(optim, name)(mine, **settings), getattr(torch.optim, name)(theirs, **settings)
    for step in range(5):
        give_grads(step, mine, theirs)
        if step == 2 or (step != 1 and not once):
            for params, optimizer in ((mine, ours), (theirs, others)):
                change(params, optimizer)
        ours.step()
        others.step()
        torch.testing.assert_close(joined(mine), joined(theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_parameters_in_a_tuple_step(name):
    mine = side_by_side([VECTOR] * 3)
    theirs = alone(mine)
    ours, others = (getattr(kind, name)(each, fused=True) for kind, each in ((optim, mine), (torch.optim, theirs)))
    ours.param_groups[0]["params"] = tuple(mine)
    give_grads(0, mine, theirs)
    ours.step()
    others.step()
    assert_equal(mine, ours, theirs, others)


def test_keys_of_others_stay_where_momentum_begins():
    mine = side_by_side([VECTOR] * 2)
    ours = optim.SGD(mine, momentum=0.5)
    give_grads(0, mine)
    mine[1].grad = None
    ours.step()
    ours.state[mine[1]]["mine"] = 5
    give_grads(1, mine)
    ours.step()
    assert ours.state[mine[1]]["mine"] == 5
    assert torch.equal(ours.state[mine[1]]["momentum_buffer"], mine[1].grad)


def test_joining_keeps_dicts_and_frees_states():
    mine = side_by_side([VECTOR] * 4)
    ours, others = optim.AdamW(mine), torch.optim.AdamW(alone(mine))
    give_grads(0, mine, others.param_groups[0]["params"])
    others.step()
    ours.load_state_dict(copy.deepcopy(others.state_dict()))
    held = [ours.state[param] for param in mine]
    old = {key: [weakref.ref(state[key]) for state in held] for key in held[0]}
    alive = []

    class Watching(dict):
        def __getitem__(self, param):
            alive.append({key: sum(each() is not None for each in refs) for key, refs in old.items()})
            return super().__getitem__(param)

    optim._pack(Watching(ours.state), mine, ("step", "exp_avg", "exp_avg_sq"))
    assert [ours.state[param] for param in mine] == held
    assert all(ours.state[param] is state for param, state in zip(mine, held, strict=True))
    assert alive[-1]["step"] == alive[-1]["exp_avg"] == 0
    assert all(each() is None for refs in old.values() for each in refs)
    assert len({state["exp_avg"].untyped_storage().data_ptr() for state in held}) == 1


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_compiled_step_is_torchs(name):
    mine = side_by_side([VECTOR] * 3)
    theirs = alone(mine)
    more = {"momentum": 0.9} if name == "SGD" else {}
    ours, others = getattr(optim, name)(mine, **more), getattr(torch.optim, name)(theirs, fused=True, **more)
    compiled = torch.compile(ours.step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step, take in itertools.product(range(2), (ours.step, compiled)):
            give_grads(step, mine, theirs)
            take()
            others.step()
            assert_equal(mine, ours, theirs, others)


def test_steps_whose_storage_was_made_shorter_end_runs():
    mine = side_by_side([4, 4, 4])
    ours = optim.AdamW(mine, lr=0.01)
    for step in range(2):
        give_grads(step, mine)
        ours.step()
    keys = ("step", "exp_avg", "exp_avg_sq")
    assert len(_C.runs(mine, ours.state, keys, True, True, False)[0]) == 1
    ours.state[mine[0]]["step"].untyped_storage().resize_(4)
    assert len(_C.runs(mine, ours.state, keys, True, True, False)[0]) > 1


def test_allocation_failures_raise():
    """Each allocation of the interpreter's that a search for runs makes fails once."""
    testcapi = pytest.importorskip("_testcapi")  # some distributions leave it out
    mine = side_by_side([4, 4])
    give_grads(0, mine)
    kept = [(None,) * 4 for _ in range(5_000)]  # no tuple of the result's size is left to be used again
    failures = 0
    for k in range(1, 50):
        testcapi.set_nomemory(k, k + 1)
        try:
            _C.runs(mine, {}, (), False, True, False)
            break
        except (MemoryError, torch.OutOfMemoryError, RuntimeError):
            failures += 1
        finally:
            testcapi.remove_mem_hooks()
    assert failures > 0
    assert len(kept) == 5_000


def test_arguments_of_another_kind_are_refused():
    for given in (((), {}, ()), ([], [], ()), ([], {}, []), ([3], {}, ())):
        with pytest.raises(TypeError, match="expected a"):
            _C.runs(*given, False, True, True)
    with pytest.raises(ValueError, match="at most 4 keys"):
        _C.runs([], {}, tuple("abcde"), False, True, True)
    mine = side_by_side([4, 4])
    give_grads(0, mine)
    assert _C.runs(mine, {}, ("step",), True, True, True) is False
    assert _C.runs(mine, {param: {"step": 3} for param in mine}, ("step",), True, True, True) is None
    assert _C.runs(mine, {param: [3] for param in mine}, ("step",), True, True, True) is None
    assert _C.runs(mine, {}, (), False, True, True)[-2:] == ([2], [])
    assert _C.runs(mine, {}, ("momentum_buffer",), False, True, True) == ([], [], [], [], mine)
