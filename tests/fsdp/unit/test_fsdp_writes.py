"""Users' writes to weights are kept and trained on as in the unsharded module, or an error names the weight.

In forwards, between forward and backward, between steps, in summoned parameters, by assignment and in place. The
oracle is the unsharded module that the same is done to.

Promises:
- data that a forward assigns to a weight are trained on and kept; an error names data that do not fit, and other
  Parameters: `test_data_that_a_forward_gives_to_a_weight`
- an optimizer's step, a load or a write between forward and backward is an error that names unit and parameter, where
  a graph has saved the weights: `test_weights_written_between_forward_and_backward`
- in a low precision only the written elements change: `test_data_given_in_forward_round_nothing_else`
- in-place changes in evaluation are kept, those while gradients are recorded are an error of one step:
  `test_weights_changed_in_place_in_evaluation`
- values that are assigned between steps, and in summon, are trained on and are in state dicts, copies and pickles; an
  error names values that cannot be kept: `test_what_is_assigned_is_kept`
- between forward and backward: autograd's error, `zero_grad()`, `.data` in place, replaced data:
  `test_weights_written_between_forward_and_backward`
- data and Parameters that a program keeps while others are in their place can be put back:
  `test_what_is_kept_can_be_put_back`
- a Parameter with a gradient in the place of a sharded one is refused by all:
  `test_a_replacement_with_a_gradient_is_refused_on_all_ranks`
- `functional_call` and `vmap` over it are refused with nothing changed: `test_functional_call_is_refused`
- in a forward it works on an inner module, compiled too:
  `test_functional_call_of_an_inner_module_in_a_forward_is_as_unsharded`,
  `test_compile.py::test_functional_call_is_compiled_as_before_and_in_a_unit_as_unsharded`
- averages copied through `.data` are used after `refresh()`, and after `eval()` and `train()`:
  `test_averages_that_are_copied_into_weights`, `test_layer_zero.py::test_a_write_is_gathered_once`
"""

import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    SETTINGS,
    STRATEGIES,
    Averaged,
    Block,
    assert_same,
    assert_same_grads,
    counts_of,
    data,
    every_setting,
    full_params,
    loss_of,
    make,
    wrap_blocks,
)
from gloo import fake_world, note
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffload
from torch.func import functional_call
from torch.nn.utils import stateless, vector_to_parameters

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardingStrategy

pytestmark = pytest.mark.multiprocess


def wrap(module, strategy, uo, **arguments):
    return wrap_blocks(module, sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo, **arguments)


def step_both(model, module, step):
    """A training step of both, by SGD."""
    loss_of(model, data(step)).backward()
    Averaged(module, dist.get_world_size()).backward(lambda rank: [data(step, rank)])
    assert_same_grads(model, module, step)
    for m in (model, module):
        torch.optim.SGD(m.parameters(), lr=0.1).step()
        m.zero_grad()
    assert_same(model, module, step)


def constrain(module):
    """Before the forward of a linear: its weight within bounds, as a module of its own would do it."""

    for inner in module.modules():
        if isinstance(inner, nn.Linear):
            inner.register_forward_pre_hook(lambda linear, args: give(linear, linear.weight.data.clamp(-0.3, 0.3)))
    return module


def given_data_in_forward():
    for strategy, uo in SETTINGS:
        note(f"{strategy} uo={uo}")
        module, model = constrain(make()), wrap(constrain(make()), strategy, uo)
        for step in range(3):
            step_both(model, module, step)
        with torch.no_grad():
            model(data(9))
            module(data(9))
        assert_same(model, module)
        step_both(model, module, 3)

        # turned around: the same memory in another order
        torch.manual_seed(1)
        square = nn.Linear(4, 4, bias=False)
        wanted, x = copy.deepcopy(square), torch.randn(2, 4)
        model = FSDP(nn.Sequential(square), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        for linear in (square, wanted):
            linear.register_forward_pre_hook(lambda linear, args: give(linear, linear.weight.data.t()))
        for _ in range(3):
            torch.testing.assert_close(model(x), wanted(x))
        assert torch.equal(model.state_dict()["0.weight"], wanted.weight)

        # what cannot be is said, and the weight is as before
        model = wrap(make(), strategy, uo)
        handle = model.blocks[1].inner.register_forward_hook(
            lambda linear, args, output: give(linear, linear.weight.data.double())
        )
        with pytest.raises(ValueError, match=r"`weight` of a Linear have another shape, dtype or device"):
            model(data(0))
        handle.remove()
        assert_same(model, make())
        handle = model.blocks[1].module.register_forward_hook(
            lambda block, args, output: setattr(block, "scale", nn.Parameter(torch.ones(5)))
        )
        with pytest.raises(RuntimeError, match=r"`scale` of a Block was replaced by another object in its forward"):
            model(data(0))
        handle.remove()
        step_both(model, make(), 4)


def give(linear, value):
    linear.weight.data = value


def in_another_precision():
    """What was not written keeps the precision that the shard has; a higher one than that is rounded to it."""
    for dtype, (strategy, uo) in itertools.product((torch.bfloat16, torch.float64), SETTINGS):
        note(f"{strategy} uo={uo} {dtype}")
        model = wrap(make(), strategy, uo, mixed_precision=MixedPrecision(param_dtype=dtype))
        wanted = full_params(model)

        model.blocks[1].inner.register_forward_pre_hook(
            lambda linear, args: give(linear, linear.weight.data.clamp(-0.3, 0.3))
        )
        with torch.no_grad():
            model(data(0))
        changed = wanted["blocks.1.inner.weight"]
        bound = torch.tensor(0.3, dtype=dtype)
        beyond = changed.to(dtype).abs() > bound
        assert beyond.any()
        changed[beyond] = changed[beyond].sign() * bound.float()
        found = full_params(model)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_data_that_a_forward_gives_to_a_weight():
    simulate_ranks(given_data_in_forward, 2)


def test_data_given_in_forward_round_nothing_else():
    simulate_ranks(in_another_precision, 2)


def in_place_in_evaluation():
    for strategy, uo in SETTINGS:
        note(f"{strategy} uo={uo}")
        module, model = make(), wrap(make(), strategy, uo)
        step_both(model, module, 0)
        handles = [
            m.blocks[1].inner.register_forward_pre_hook(lambda linear, args: void(linear.weight.clamp_(-0.3, 0.3)))
            for m in (model, module)
        ]
        with torch.no_grad():
            assert torch.equal(model(data(1)), module(data(1)))
        for handle in handles:
            handle.remove()
        assert_same(model, module)
        step_both(model, module, 2)

        # where gradients are recorded autograd refuses it, and the next step is right
        handle = model.blocks[1].inner.register_forward_pre_hook(halve)
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"the unit of Block at `blocks\.1`: .* changed in place in the middle"
            ):
                model(data(3))
        handle.remove()
        if strategy == "NO_SHARD":  # its weights are the memory that was written to
            with torch.no_grad():
                module.blocks[1].inner.weight.mul_(0.25)
        step_both(model, module, 4)


def void(ignored):
    pass


@torch.no_grad()
def halve(linear, args):
    linear.weight.mul_(0.5)


def test_weights_changed_in_place_in_evaluation():
    simulate_ranks(in_place_in_evaluation, 2)


def functional():
    """functional_call and what is built on it is refused before anything is changed."""
    x = data(0)
    for strategy, uo in SETTINGS:
        module, model = make(), wrap(make(), strategy, uo)
        registered = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
        inner = {"_fsdp_wrapped_module.blocks.2._fsdp_wrapped_module.inner.weight": torch.zeros(11, 5)}
        for kind, given in (("registered", registered), ("inner", inner)):
            note(f"{strategy} uo={uo} {kind}")
            for values in (given, {name: nn.Parameter(value) for name, value in given.items()}):
                before = {name: (value, value.clone()) for name, value in values.items()}
                with pytest.raises(RuntimeError, match="functional_call"):
                    functional_call(model, values, (x,))
                assert all(torch.equal(value, was) for value, was in before.values())
            stacked = {name: torch.stack([value, value]) for name, value in given.items()}
            with pytest.raises(RuntimeError, match="functional_call"):
                torch.vmap(lambda values, model=model: functional_call(model, values, (x,)))(stacked)
            with pytest.raises(RuntimeError, match="functional_call"):  # among fake tensors
                torch.export.export(model, (x,), strict=False)
        step_both(model, module, 0)


class Calling(nn.Module):
    """Calls its linear by functional_call with what it makes of the parameters, in another such call, and as it is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        given = {"weight": self.inner.weight.tanh(), "bias": 2.0 * self.inner.bias}
        x = functional_call(self.inner, given, (x,))
        with stateless._reparametrize_module(self.inner, given):
            x = functional_call(self.inner, {"weight": given["weight"].t()}, (x,))
            x = x + self.inner(x)
        with pytest.raises(TypeError):
            functional_call(self.inner, given, (None,))
        return self.inner(x)


def functional_inside():
    for strategy, uo in SETTINGS:
        note(f"{strategy} uo={uo}")
        module, model = nn.Sequential(Calling(), Calling()), nn.Sequential(Calling(), Calling())
        for i in range(2):
            model[i] = FSDP(model[i], sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        model = FSDP(model, sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, model)]
        for step in range(2):
            x = torch.linspace(-1.0, 1.0, 6).reshape(2, 3) + step
            results = [m(x) for m in (module, model)]
            torch.testing.assert_close(results[1], results[0])
            for result, optimizer in zip(results, optimizers, strict=True):
                result.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_same(model, module, step)


def test_functional_call_is_refused():
    simulate_ranks(functional, 2)


def test_functional_call_of_an_inner_module_in_a_forward_is_as_unsharded():
    simulate_ranks(functional_inside, 2)


class Pair(nn.Module):
    """Two linears of one shape, the first of them under two names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.a.weight

    def forward(self, x):
        return self.tied(torch.tanh(self.b(self.a(x))))


def pair(strategy, uo):
    return FSDP(Pair(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)


def values_of(model, how):
    """The values of every parameter, as ``how`` reads them, by name."""
    if how == "summon":
        return full_params(model)
    if how == "deepcopy":
        return full_params(copy.deepcopy(model))
    if how == "pickle":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return full_params(torch.load(file, weights_only=False))
    if how == "load":
        model.load_state_dict({"b.bias": torch.full((4,), 7.0)}, strict=False)
        return full_params(model)
    return model.state_dict()


def assigned():
    for strategy, how in itertools.product(STRATEGIES, ("state_dict", "summon", "deepcopy", "pickle", "load")):
        note(f"{strategy} {how}")
        model, wanted = pair(strategy, True), {name: param * 2.0 for name, param in Pair().named_parameters()}
        model(torch.ones(1, 4))  # the run is there
        model = pair(strategy, True)
        vector_to_parameters(2.0 * torch.cat([p.detach().reshape(-1) for p in model.parameters()]), model.parameters())
        if how == "load":
            wanted["b.bias"] = torch.full((4,), 7.0)
        found = values_of(model, how)
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), (strategy, how)

    for strategy, uo in SETTINGS:
        note(f"{strategy} uo={uo}")
        module, model = Pair(), pair(strategy, uo)
        x = torch.ones(1, 4)
        model(x)

        # another Parameter is the model's from then on
        for m in (module, model):
            m.b.weight = nn.Parameter(torch.arange(16.0).view(4, 4) / 16)
            m.a.weight = m.tied.weight = nn.Parameter(torch.arange(16.0).view(4, 4).t() / 16)
        mine = [id(model.a.weight), id(model.b.weight)]
        torch.testing.assert_close(model(x), module(x))
        assert_same(model, module)
        for m in (module, model):
            m.a.weight = m.tied.weight = nn.Parameter(torch.arange(16.0).view(4, 4) / 32)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, model)]
        for step in range(2):
            for m, optimizer in zip((module, model), optimizers, strict=True):
                m(x + step).square().sum().backward()
                nn.utils.clip_grad_norm_(m.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            assert_same(model, module, step)
        assert not uo or mine[1] == id(model.b.weight)

        # in summoned parameters: exchanged, turned, and zeros of another sign
        def exchange(m):
            m.a.weight.data, m.b.weight.data = m.b.weight.data, m.a.weight.data.t()
            m.b.bias.data = -torch.zeros(4)

        def replace(m):
            m.b.weight = nn.Parameter(m.b.weight.detach() * 2.0)

        with torch.no_grad(), FSDP.summon_full_params(model):
            model.b.bias.zero_()
        for change in (exchange, exchange, replace):
            with FSDP.summon_full_params(model):
                change(model)
            change(module)
            assert_same(model, module)
        assert torch.signbit(full_params(model)["b.bias"]).all()
        torch.testing.assert_close(model(x), module(x))
        with (
            pytest.raises(ValueError, match=r"`b\.weight` to have its shape \(4, 4\), got \(2,\)"),
            FSDP.summon_full_params(model),
        ):
            model.b.weight.data = torch.ones(2)
        assert_same(model, module)
        settings = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": uo}
        units = FSDP(nn.Sequential(*(FSDP(nn.Linear(4, 4), **settings) for _ in range(2))), **settings)
        before = full_params(units)
        for wrong in range(2 if strategy != "NO_SHARD" else 0):  # there writes in place are in the parameters
            layers = [one.module for one in units.module]
            with (
                pytest.raises(ValueError, match=r"`weight` to have its shape \(4, 4\), got \(2,\)"),
                FSDP.summon_full_params(units),
            ):
                write_and_misfit(layers, wrong)
            assert all(torch.equal(value, before[name]) for name, value in full_params(units).items())

        # what does not fit is said, and nothing is changed
        if strategy == "NO_SHARD" and uo:
            for m in (module, model):
                exchange(m)
            assert_same(model, module)
        wrong = {
            "shared by": lambda m: setattr(m.a, "weight", nn.Parameter(torch.ones(4, 4))),
            "is no nn.Parameter": lambda m: delattr(m.b, "bias"),
        }
        if uo:
            wrong["tie parameters before"] = lambda m: setattr(m.b, "bias", m.a.bias)
        for message, change in wrong.items():
            model, module = pair(strategy, uo), Pair()
            change(model)
            with pytest.raises(ValueError, match=message):
                model(x)
        model = pair(strategy, uo)
        if uo:
            nn.utils.parametrize.register_parametrization(model.b, "bias", nn.Tanh())
            with pytest.raises(ValueError, match=r"`b\.bias` was deleted, or replaced"):
                model(x)
        model = pair(strategy, uo)
        if uo:
            model.b.weight.data = model.b.weight.data.double() + 1e-12
            with pytest.raises(ValueError, match=r"`b\.weight` are of torch.float64, which torch.float32 would round"):
                model(x)
            model.b.weight.data = model.b.weight.data.double()  # it is as before; this loses nothing
        else:
            model.b.weight.data = torch.ones(4, 4)
            module.b.weight.data = torch.ones(4, 4)
        assert torch.equal(model(x), module(x))
        assert_same(model, module)


def test_what_is_assigned_is_kept():
    simulate_ranks(assigned, 2)


@torch.no_grad()
def write_and_misfit(layers, wrong):
    for layer in layers:
        layer.bias.fill_(3.0)
    layers[wrong].weight.data = torch.ones(2)


def ones_as_gradients(model):
    for param in model.parameters():
        param.grad = torch.ones_like(param)


def between_forward_and_backward(strategy, uo):
    module, model = make(), wrap(make(), strategy, uo)
    step_both(model, module, 0)
    told = (
        r"the unit of .*: parameter `\w+` of a \w+ and those .* were modified by an inplace operation, .* between forw"
    )
    for write in ("step", "load", "in place"):
        note(f"{strategy} uo={uo} {write}")
        loss = loss_of(model, data(1))
        if write == "step":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ones_as_gradients(model)
            optimizer.step()
        elif write == "load":
            model.load_state_dict(make(seed=7).state_dict())
        else:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
        with pytest.raises(RuntimeError, match=told):
            loss.backward()
        model.zero_grad()
        model.load_state_dict(module.state_dict())
        step_both(model, module, 2)

    note(f"{strategy} uo={uo} what no graph has saved")
    torch.manual_seed(8)
    linear = nn.Linear(3, 5)
    alone = FSDP(copy.deepcopy(linear), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
    for m in (alone, alone, linear, linear):
        m(data(0, 0)).sum().backward()
        torch.optim.SGD(m.parameters(), lr=0.1).step()
        m.zero_grad()
    loss, expected = (m(data(1, 0)).sum() for m in (alone, linear))  # its backward needs the input alone
    with torch.no_grad():
        for param in alone.parameters():
            param.mul_(0.5)
    loss.backward()
    expected.backward()
    with FSDP.summon_full_params(alone, with_grads=True):
        for param, wanted in zip(alone.parameters(), linear.parameters(), strict=True):
            assert torch.equal(param.grad, wanted.grad)
            assert torch.equal(param, wanted * 0.5)

    # gradients of before are cleared, and data that are written are kept
    note(f"{strategy} uo={uo} clearing")
    loss_of(model, data(3)).backward()
    loss = loss_of(model, data(4))
    model.zero_grad()
    loss.backward()
    Averaged(module, 2).backward(lambda rank: [data(4, rank)])
    assert_same_grads(model, module)
    for m in (model, module):
        m.zero_grad()
    loss = loss_of(model, data(5))
    for param in (*model.parameters(), *module.parameters()):
        param.data.mul_(0.5)
    loss.backward()
    model.zero_grad()
    assert_same(model, module)
    step_both(model, module, 6)

    # other data, and other objects
    note(f"{strategy} uo={uo} replacing")
    loss = loss_of(model, data(7))
    model.blocks[0].scale.data = torch.full((5,), 0.25)
    with pytest.raises(RuntimeError, match=r"`scale` of a Block was replaced, or given other data, between") as raised:
        loss.backward()
    assert isinstance(raised.value, AssertionError)  # torch's class raises one
    assert "FSDP does not support changing the parameters between forward and backward" in str(raised.value)
    model.zero_grad()
    model.load_state_dict(module.state_dict())
    step_both(model, module, 8)


@pytest.mark.sweep(3)
@every_setting
def test_weights_written_between_forward_and_backward(strategy, uo):
    simulate_ranks(between_forward_and_backward, 2, strategy, uo)


def averages(strategy, uo):
    """Weights that are exchanged through .data, which torch does not count."""
    for told in (False, True):
        note(f"{strategy} uo={uo} told={told}")
        module, model = make(), wrap(make(), strategy, uo)
        step_both(model, module, 0)
        with torch.no_grad():
            model(data(1))
        raw = [param.detach().clone() for param in model.parameters()]
        for exchanged in ([param * 0.5 for param in raw], raw):
            for param, value in zip(model.parameters(), exchanged, strict=True):
                param.data.copy_(value)
            if told:
                model.refresh()
            else:
                model.train(exchanged is raw)
            factor = 1.0 if exchanged is raw else 0.5
            wanted = make()
            wanted.load_state_dict({name: value * factor for name, value in module.state_dict().items()})
            with torch.no_grad():
                assert torch.equal(model(data(2)), wanted(data(2)))
        refreshes = counts_of(model).refreshes
        model.eval()
        with torch.no_grad():
            model(data(2))
        assert counts_of(model).refreshes == refreshes  # nothing was exchanged
        model.train()
        step_both(model, module, 3)
        with model.no_sync():  # between micro-batches, where what stays full is not gathered again
            model(data(2)).sum().backward()
            for param in model.parameters():
                param.data.mul_(0.5)
            model.refresh()
            wanted.load_state_dict({name: value * 0.5 for name, value in module.state_dict().items()})
            assert torch.equal(model(data(2)), wanted(data(2)))
        with pytest.raises(RuntimeError, match="refresh"):
            model.blocks[0].refresh()


@pytest.mark.sweep(3)
@every_setting
def test_averages_that_are_copied_into_weights(strategy, uo):
    simulate_ranks(averages, 2, strategy, uo)


def kept(strategy, uo):
    """Weights that are exchanged for an average, and put back: as data, which the program keeps, and as Parameters."""
    module, model = make(), wrap(make(), strategy, uo)
    step_both(model, module, 0)
    for step, names in ((1, ["scale"]), (2, ["scale", "weight", "bias"])):
        outputs = []
        for m in (module, model):
            changed = [param for name, param in m.named_parameters() if not uo or name.rpartition(".")[2] in names]
            backup = [param.data for param in changed]
            for param in changed:
                param.data = param.data * 0.5
            with torch.no_grad():
                outputs.append(m(data(1)))
            for param, value in zip(changed, backup, strict=True):
                param.data = value
        assert torch.equal(*outputs)
        step_both(model, module, step)
    if uo:
        for m in (module, model):
            blocks = [block for block in m.modules() if isinstance(block, Block)]
            backup = [block.scale for block in blocks]
            for block in blocks:
                block.scale = nn.Parameter(block.scale.detach() * 0.5)
            with torch.no_grad():
                m(data(1))
            for block, param in zip(blocks, backup, strict=True):
                block.scale = param
        step_both(model, module, 3)
    shards = [unit._unit.flat_params[0].flat for unit in FSDP.fsdp_modules(model)] if uo else []
    places = [shard.data_ptr() for shard in shards]
    for param in model.parameters():
        param.data = param.data * 0.5
    with torch.no_grad():
        model(data(1))
    assert [shard.data_ptr() for shard in shards] == places  # nothing was kept, so no shard was copied


@pytest.mark.sweep(3)
@every_setting
def test_what_is_kept_can_be_put_back(strategy, uo):
    simulate_ranks(kept, 2, strategy, uo)


def test_what_torchs_tools_read_of_an_exchanged_parameter():
    with fake_world(2):
        model = FSDP(nn.Linear(3, 3), use_orig_params=True)
        with FSDP.summon_full_params(model):
            model.module.weight = nn.Parameter(torch.ones(3, 3))
        model.cpu()
        assert [id(param) for param in model._flat_param._params] == [id(param) for param in model.parameters()]


@every_setting
@pytest.mark.parametrize("offload", [False, True])
def test_edits_of_full_parameters_without_writeback(strategy, uo, offload):
    """They stay only where full parameters are the model's own: as docs/weights.md says."""
    stays = strategy == "NO_SHARD" and not offload
    with fake_world(2):
        settings = {"sharding_strategy": ShardingStrategy[strategy], "cpu_offload": CPUOffload(offload_params=offload)}
        model = FSDP(nn.Linear(3, 3), use_orig_params=uo, check_values=False, **settings)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with FSDP.summon_full_params(model, writeback=False, with_grads=True), torch.no_grad():
            model.module.weight.fill_(7.0)
            model.module.weight.grad.fill_(5.0)
        [flat_param] = model._unit.flat_params
        for here in flat_param.shard_slices():
            if here.original.fqn == "weight" and here.numel > 0:
                assert (here.of(flat_param.flat) == 7.0).all() == stays
                grad = here.original.param.grad if uo else here.of(flat_param.flat.grad)
                assert (grad == 5.0).all() == stays


def test_data_in_another_dtype_are_taken_in_the_parameters_own():
    with fake_world(1):
        model = FSDP(nn.Linear(3, 3), use_orig_params=True)
        rounded = torch.full((3, 3), 0.1).bfloat16()
        model.module.weight.data = rounded
        model(torch.ones(1, 3))
        weight = model.module.weight
        assert weight.dtype == torch.float32
        assert torch.equal(weight.detach(), rounded.float())
        low = FSDP(nn.Linear(3, 3).bfloat16(), use_orig_params=True)
        before = full_params(low)["weight"]
        low.module.weight.data = torch.full((3, 3), 0.1)
        with pytest.raises(ValueError, match=r"`weight` are of torch.float32, which torch.bfloat16 would round"):
            low(torch.ones(1, 3, dtype=torch.bfloat16))
        assert torch.equal(full_params(low)["weight"], before)


def replaced_with_a_gradient(strategy, uo):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = FSDP(copy.deepcopy(module), sharding_strategy=ShardingStrategy[strategy], use_orig_params=uo)
    x, new = torch.ones(2, 4), nn.Parameter(torch.full((4, 4), 0.5))
    new.grad = torch.ones(4, 4)
    for one in (model.module, module):
        one[0].weight = nn.Parameter(new.detach().clone())
        one[0].weight.grad = new.grad.clone()
    if strategy == "NO_SHARD" and uo:
        model(x).sum().backward()
        module(x).sum().backward()
        assert torch.equal(model.module[0].weight.grad, module[0].weight.grad)
        return
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter `0.weight` was replaced by a Parameter that has a gradient"):
            model(x)
    model.module[0].weight.grad = module[0].weight.grad = None
    for one in (model, module):
        one(x).sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        assert torch.equal(model.module[0].weight, module[0].weight)
        assert torch.equal(model.module[0].weight.grad, module[0].weight.grad)


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_replacement_with_a_gradient_is_refused_on_all_ranks(strategy, uo):
    simulate_ranks(replaced_with_a_gradient, 2, strategy, uo)
