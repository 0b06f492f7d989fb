"""Masters in fp32 of a model in 16 bits, as accelerate makes them. The oracle is torch's class, upcast alike.

Promises:
- a model in 16 bits whose shards are put in fp32, as accelerate does, trains as on torch's class, bit for bit, in all
  precisions
"""

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from fsdp_models import make
from gloo import note, run_ranks
from pairs import pairwise
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from trainers import under

import flatparam

LOW = (torch.bfloat16, torch.float16)
WEIGHTS = (*LOW, torch.float32)
PRECISIONS = (None, *LOW)


def wrap(weights, mixed, uo, **settings):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    module = make().to(weights)
    precision = MixedPrecision(param_dtype=mixed, **settings) if mixed or settings else None
    policy = ModuleWrapPolicy({type(module.blocks[0])})
    return FSDP(module, auto_wrap_policy=policy, mixed_precision=precision, use_orig_params=uo)


def upcast(model):
    """As in accelerate 1.15, Accelerator.prepare_model."""
    for module in type(model).fsdp_modules(model):
        if not module._has_params:
            continue
        param = module._flat_param
        if param.dtype != torch.float32 and param.device != torch.device("meta") and param.requires_grad:
            param.data = param.data.to(torch.float32)
            module._handle._orig_param_dtype = torch.float32


def inputs(step, dtype):
    torch.manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 3).to(dtype)


def full_state(model):
    cls = type(model)
    with cls.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=False)):
        return model.state_dict()


def trained(model, dtype, steps=2):
    """All that is seen of some steps: losses, and the parameters and their gradients, with their dtypes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(steps):
        out = model(inputs(step, dtype))
        loss = out.float().square().mean()
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        seen += [out.detach(), loss.detach(), norm.detach()]
        seen += [param.grad for param in model.parameters() if param.grad is not None and param.numel()]
        optimizer.step()
        optimizer.zero_grad()
    seen += [param.detach() for param in model.parameters() if param.numel()]
    seen += [state["exp_avg"] for param, state in optimizer.state.items() if param.numel()]
    return seen


def same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)


FACTORS = {"weights": WEIGHTS, "mixed": PRECISIONS, "uo": (False, True)}
EVERY = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]


def as_torchs(cases):
    for case in cases:
        note(case)
        weights, mixed, uo = case.values()
        seen, states = {}, {}
        for kind in ("torch", "dropin", "runtime"):
            with under(kind):
                model = wrap(weights, mixed, uo)
                upcast(model)
                seen[kind] = trained(model, mixed or weights)
                assert all(param.dtype == torch.float32 for param in model.parameters())
                if kind != "torch":  # whose own handle ends the process on a CPU
                    states[kind] = full_state(model)
                    states[kind] |= get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        same(seen["runtime"], seen["torch"])
        same(seen["dropin"], seen["torch"])
        assert list(states["runtime"]) == list(states["dropin"])
        same(states["runtime"].values(), states["dropin"].values())
        assert all(value.dtype == torch.float32 for value in states["runtime"].values())


def more_ways(uo):
    """Reduced in other dtypes, sharded otherwise, upcast late, and by the parameters themselves."""
    for mixed, reduced, late in itertools.product((None, torch.bfloat16), (None, torch.float32), (False, True)):
        note(f"{mixed} {reduced} {late}")
        if late and mixed is None:
            continue  # torch's class goes on in fp32 where it reduces, and fails
        seen = []
        for kind in ("torch", "runtime"):
            with under(kind):
                model = wrap(torch.bfloat16, mixed, uo, reduce_dtype=reduced)
                if late and kind == "runtime":  # after a forward: torch's class does it before that alone
                    with torch.no_grad():
                        model(inputs(0, torch.bfloat16))
                upcast(model)
                seen.append(trained(model, torch.bfloat16))
        same(*seen)
    note("of each parameter")
    seen = []
    for by_flat in (True, False):
        with under("runtime"):
            model = wrap(torch.bfloat16, torch.bfloat16, uo)
            for param in model.parameters() if not by_flat else ():
                param.data = param.data.float()
            for unit in type(model).fsdp_modules(model):
                unit._handle._orig_param_dtype = torch.float32  # it does not need the data to be so
            seen.append(trained(model, torch.bfloat16))
    same(*seen)


def gradients_too(uo):
    """What was reduced before the upcast is in the new dtype, and added to."""
    with under("runtime"):
        model = wrap(torch.bfloat16, torch.bfloat16, uo)
        model(inputs(0, torch.bfloat16)).square().sum().backward()
        before = [param.grad.float() for param in model.parameters() if param.grad is not None]
        upcast(model)
        same([param.grad for param in model.parameters() if param.grad is not None], before)
        model(inputs(1, torch.bfloat16)).square().sum().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert all(grad.dtype == torch.float32 for grad in grads)
        assert not all(map(torch.equal, grads, before))


def by_inputs(uo):
    """Without mixed precision inputs in fp32 have all computed in fp32, where torch's class refuses them."""
    with under("torch"):
        expected = trained(wrap(torch.bfloat16, None, uo).float(), torch.float32)
        model = wrap(torch.bfloat16, None, uo)
        upcast(model)
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            model(inputs(0, torch.float32))
    with under("runtime"):
        model = wrap(torch.bfloat16, None, uo)
        upcast(model)
        same(trained(model, torch.float32), expected)
        model = wrap(torch.bfloat16, None, uo)
        upcast(model)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(inputs(0, torch.float32)).dtype == torch.bfloat16
        assert model._handle._fwd_bwd_param_dtype == torch.bfloat16
        if dist.get_world_size() > 1:
            model = wrap(torch.bfloat16, None, uo)
            upcast(model)
            with pytest.raises(ValueError, match=r"the dtype of floating inputs"):
                model(inputs(0, torch.float32 if dist.get_rank() else torch.bfloat16))
            model(inputs(0, torch.bfloat16)).sum().backward()


@pytest.mark.multiprocess
@pytest.mark.parametrize(("uo", "ranks"), [(False, 1), (False, 2), (True, 2)])
def test_inputs_decide_without_mixed_precision(uo, ranks):
    run_ranks(by_inputs, ranks, uo)


def kept(uo, folder):
    """A copy, a pickle and a checkpoint of an upcast model go on as it does."""
    with under("runtime"):
        for mixed in (None, torch.bfloat16):
            model = wrap(torch.bfloat16, mixed, uo)
            upcast(model)
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
            flatparam.checkpoint.save(f"{folder}/{mixed}", model)
            copies.append(wrap(torch.bfloat16, mixed, uo))
            upcast(copies[-1])
            with torch.no_grad():
                for param in copies[-1].parameters():
                    param.zero_()
            flatparam.checkpoint.load(f"{folder}/{mixed}", copies[-1])
            expected = trained(model, torch.bfloat16)
            for each in copies:
                same(trained(each, torch.bfloat16), expected)


@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
def test_upcast_models_are_copied_and_saved(uo, tmp_path):
    run_ranks(kept, 2, uo, str(tmp_path))


def refused(uo):
    with under("runtime"):
        model = wrap(torch.bfloat16, None, uo)
        before = [param.detach().clone() for param in model.parameters()]
        handle = model._handle
        with pytest.raises(TypeError, match=r"its shard with `first.weight`: expected a floating torch.dtype"):
            handle._orig_param_dtype = torch.int64
        for dtype in (torch.float16, torch.float8_e5m2):
            with pytest.raises(ValueError, match=rf"is in torch.bfloat16, which {dtype} would round: convert"):
                handle._orig_param_dtype = dtype
        handle._orig_param_dtype = torch.bfloat16  # as it is
        model(inputs(0, torch.bfloat16)).sum().backward()
        with pytest.raises(RuntimeError, match=r"before the first forward only, .* MixedPrecision\(param_dtype="):
            handle._orig_param_dtype = torch.float32
        same([param.detach() for param in model.parameters()], before)
        model(inputs(0, torch.bfloat16)).sum().backward()


@pytest.mark.multiprocess
@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("body", [more_ways, gradients_too, refused])
def test_other_upcasts(body, uo):
    run_ranks(body, 2, uo)


@pytest.mark.multiprocess
@pytest.mark.parametrize("cases", [pairwise(FACTORS), pytest.param(EVERY, marks=pytest.mark.thorough)], ids=len)
def test_upcast_models_train_as_torchs(cases):
    run_ranks(as_torchs, 2, cases)
