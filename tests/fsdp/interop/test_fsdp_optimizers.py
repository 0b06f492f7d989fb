"""torch's optimizers over shards, beside the unsharded module and torch's class: each way in which they are written.

Promises:
- an optimizer that was made before wrapping trains the model, or its first step raises an error with a parameter's name
  and the remedy; later steps look at no parameter: (`before_wrapping`), `test_dropin_faults_of_torch.py`
  (`before_wrapping`)
- a state that was loaded without ``optim_state_dict_to_load``, and does not fit this rank's pieces, is refused with the
  name at the first step after the load, also where Python reuses the address of states that were checked; a converted
  state, and other classes of optimizers, are not:
  `test_a_state_that_was_not_converted_is_refused`
- an optimizer that loops over a thousand parameters on the host, and has a fused step, is told of ``fused=True``, but
  not SGD of bf16 and fp16, which torch's fused step does not change: `test_a_slow_loop_is_told_of_the_fused_step`,
  `test_sgd_of_half_precision_is_not_told_of_the_fused_step`
- an optimizer whose step depends on all of a parameter is told once that it steps pieces, unless they are whole:
  `test_adafactor_is_told_of_pieces`
"""

import gc
import itertools
import re
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from fsdp_models import STRATEGIES, Averaged, assert_same, data, every_setting, full_params, loss_of, make, wrap_blocks
from gloo import fake_world, note
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.common import optimizers as counted
from flatparam.fsdp.errors import StateError

BY_ELEMENT = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
WAYS = [(name, way) for way in ("foreach", "forloop", "fused") for name in (FUSED if way == "fused" else BY_ELEMENT)]
WHOLE = ("Adafactor", "Muon")  # of whole matrices: Muon takes no others


def built(name, way, params):
    settings = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)(params, lr=0.01, **settings, **({} if way is None else way))


def optimizers(name, way, model):
    matrices = [param for param in model.parameters() if param.ndim == 2]
    if name not in WHOLE:
        return [built(name, way, model.parameters())]
    others = [param for param in model.parameters() if param.ndim != 2]
    return [built(name, way, matrices), torch.optim.SGD(others, lr=0.01)]


def check(name, way, uo):
    note(f"{name} {way} uo={uo}")
    whole = {"atomic": torch.Tensor.numel} if name in WHOLE else {}
    module, models = make(), [wrap_blocks(make(), use_orig_params=uo, **whole)]
    if name not in WHOLE:  # torch's class has no pieces of two dimensions
        models.append(wrap_blocks(make(), TorchsFSDP, use_orig_params=uo, device_id=torch.device("cpu")))
    model = models[0]
    steppers = [optimizers(name, way, m) for m in (module, *models)]
    for i in range(4):
        Averaged(module, 2).backward(lambda rank, i=i: [data(i, rank)])
        losses = [loss_of(m, data(i)) for m in models]
        assert torch.equal(losses[0], losses[-1]), (name, way, uo)
        for loss in losses:
            loss.backward()
        for optimizer in itertools.chain(*steppers):
            optimizer.step()
            optimizer.zero_grad()
    if way == {"fused": True}:  # whose rounding depends on where in a vector of the processor an element lies
        for key, value in full_params(model).items():
            torch.testing.assert_close(value, dict(module.named_parameters())[key], rtol=1e-5, atol=1e-6)
    else:
        assert_same(model, module, f"{name} {way} uo={uo}")
    for m in models:
        assert all(torch.equal(a, b) for a, b in zip(m.parameters(), model.parameters(), strict=True)), (name, way, uo)
    assert any(not torch.equal(a, b) for a, b in zip(module.parameters(), make().parameters(), strict=True))


def by_element():
    for (name, way), uo in itertools.product(WAYS, (False, True)):
        check(name, {"foreach": way == "foreach"} if way != "fused" else {"fused": True}, uo)
    for name in WHOLE:
        check(name, None, True)


@pytest.mark.multiprocess
def test_optimizers_step_shards_as_they_step_the_whole():
    simulate_ranks(by_element, 2)


@pytest.mark.parametrize(
    ("uo", "atomic", "name"), [(False, None, "_flat_param"), (True, None, r"[\w.]+"), (True, torch.Tensor.numel, None)]
)
def test_adafactor_is_told_of_pieces(uo, atomic, name):
    with fake_world(2), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = wrap_blocks(make(), use_orig_params=uo, atomic=atomic)
        optimizer = torch.optim.Adafactor(model.parameters())
        for _ in range(2):
            loss_of(model, data(0)).backward()
            optimizer.step()
    told = [str(each.message) for each in told if "Adafactor" in str(each.message)]
    assert len(told) == (name is not None), told
    assert all(re.search(rf"step\(\): .*, and `{name}` of .* has shape \(\d+,\) on this rank", text) for text in told)


REFUSED = r"SGD.step\(\): the optimizer holds `{}` from before the unit of {} was wrapped.*Wrap the model first"


def sgd(model, **arguments):
    return torch.optim.SGD(model.parameters(), 0.1, **arguments)


def filled(module):
    for name, param in module._parameters.items():
        if param is not None and param.is_meta:
            module._parameters[name] = nn.Parameter(torch.full(param.shape, 0.1, device="cpu"))


@every_setting
@pytest.mark.parametrize("how", ["plain", "on meta", "stepped before"])
def test_an_optimizer_from_before_wrapping_trains_or_is_refused(strategy, uo, how):
    with fake_world(1):
        with torch.device("meta" if how == "on meta" else "cpu"):
            module = make()
        optimizer, settings = sgd(module), {"use_orig_params": uo, "sharding_strategy": ShardingStrategy[strategy]}
        if how == "stepped before":
            loss_of(module, data(0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model = wrap_blocks(module, param_init_fn=filled, **settings)
        before = full_params(model)
        if uo and how != "on meta":
            loss_of(model, data(0)).backward()
            optimizer.step()
            assert all(not torch.equal(value, before[name]) for name, value in full_params(model).items())
            return
        for _ in range(2):
            with pytest.raises(StateError, match=REFUSED.format("first.weight", "Model")):
                optimizer.step()
        sgd(model).step()
        optimizer.param_groups[0]["params"] = list(model.parameters())
        loss_of(model, torch.ones(2, 3)).backward()
        optimizer.step()
        assert all(not torch.equal(value, before[name]) for name, value in full_params(model).items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_from_before_wrapping_may_hold_what_is_not_trained_by_units(strategy):
    settings = {"sharding_strategy": ShardingStrategy[strategy]}
    with fake_world(1):
        ignored = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        optimizer, before = sgd(ignored), ignored[1].weight.detach().clone()
        ignored[0].requires_grad_(False)
        model = FSDP(ignored, ignored_states=[ignored[1]], **settings)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert not torch.equal(ignored[1].weight, before)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(counted, "_taken_out", None)
            optimizer.step()  # looks at no parameter again
        late = nn.Linear(3, 2)
        optimizer.add_param_group({"params": list(late.parameters())})
        optimizer.step()
        wrapped = FSDP(late, **settings)
        with pytest.raises(RuntimeError, match=REFUSED.format("weight", "Linear")):
            optimizer.step()
        alive = weakref.ref(wrapped._unit)
        del wrapped
        gc.collect()
        assert alive() is None
        optimizer.step()  # nobody is there to train


@pytest.mark.parametrize(("settings", "told"), [({}, True), ({"foreach": True}, True), ({"fused": True}, False)])
@pytest.mark.parametrize("count", [999, 1000])
def test_a_slow_loop_is_told_of_the_fused_step(settings, told, count):
    with fake_world(1), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = FSDP(nn.ParameterList(torch.ones(3) for _ in range(count)), use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        for _ in range(2):
            optimizer.step()
    texts = [str(each.message) for each in found if "fused=True" in str(each.message)]
    assert len(texts) == (told and count == 1000)
    assert all("AdamW steps 1,000 parameters on the host" in text for text in texts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_sgd_of_half_precision_is_not_told_of_the_fused_step(name, dtype):
    with fake_world(1), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = FSDP(nn.ParameterList(torch.ones(3, dtype=dtype) for _ in range(1000)), use_orig_params=True)
        getattr(torch.optim, name)(model.parameters()).step()
    told = any("fused=True" in str(each.message) for each in found)
    assert told == (name == "AdamW" or dtype == torch.float32)


class OfTheWhole(torch.optim.SGD):
    """Not torch's own class: it has states of the whole parameters."""

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("whole", torch.zeros(100))


def refused_at_a_reused_address(optimizer, state):
    """What the next step says of ``state``, loaded again until its address is that of the states of the last step."""
    of_last_step, others = id(optimizer.state), []
    for _ in range(1000):
        optimizer.load_state_dict(state)
        if id(optimizer.state) == of_last_step:
            break
        others.append(optimizer.state)
    with pytest.raises(StateError) as refused:
        optimizer.step()
    return str(refused.value)


def loads_states(strategy, uo):
    """What each kind of load leads to at the next step, by the optimizer's class."""
    module = make()
    whole = {name: torch.optim.AdamW(module.parameters()) for name in ("AdamW",)} | {"SGD": sgd(module, momentum=0.9)}
    for optimizer in whole.values():
        loss_of(module, data(0)).backward()
        optimizer.step()
    model, told = wrap_blocks(make(), use_orig_params=uo, sharding_strategy=ShardingStrategy[strategy]), {}
    for name, plain in whole.items():
        make_optimizer = {
            "AdamW": lambda: torch.optim.AdamW(model.parameters()),
            "SGD": lambda: sgd(model, momentum=0.9),
        }
        optimizer = make_optimizer[name]()
        for _ in range(2):
            loss_of(model, data(0)).backward()
            optimizer.step()
        own, full = optimizer.state_dict(), FSDP.optim_state_dict(model, optimizer)
        converted = FSDP.optim_state_dict_to_load(model, optimizer, full)
        for state in (own, converted):
            optimizer.load_state_dict(state)
            loss_of(model, data(0)).backward()
            optimizer.step()
        for kind, state in (("full", full), ("plain", plain.state_dict())):
            later = make_optimizer[name]()
            try:
                later.load_state_dict(state)
            except ValueError:  # torch compares the groups
                continue
            loss_of(model, data(0)).backward()
            for _ in range(2):
                with pytest.raises(StateError) as refused:
                    later.step()
            told[name, kind] = str(refused.value)
            later.load_state_dict(converted)
            later.step()
            assert refused_at_a_reused_address(later, state) == told[name, kind]
        dist.barrier()
    optimizer = OfTheWhole(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return told


@pytest.mark.multiprocess
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "ZERO_1"])
def test_a_state_that_was_not_converted_is_refused(strategy):
    for told in simulate_ranks(loads_states, 2, strategy, True):
        assert set(told) == {(name, kind) for name in ("AdamW", "SGD") for kind in ("full", "plain")}
        for (name, _), text in told.items():
            key = "exp_avg" if name == "AdamW" else "momentum_buffer"
            assert re.match(rf"{name}\.step\(\): the state `{key}` of `[a-z0-9.]+` of the unit of ", text), text
            assert "has shape (" in text, text
            assert "FSDP.optim_state_dict_to_load(model, optimizer, state)" in text, text
    assert simulate_ranks(loads_states, 2, strategy, False) == [{}, {}]
