"""Tensor parallelism inside of units, on a mesh of 2 by 2 ranks: as with torch's class bit for bit, and as without.

Promises:
- tensor parallelism inside of units: training, states, clipping, copies and refusals are torch's bit for bit, or the
  unparallelised module's: `test_fsdp_tensor_parallel_more.py`
"""

import copy
import functools
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from gloo import ends_of_ranks, note, run_ranks
from parallel_models import Cut, Layer, Mean, batch, clean, net, new_mesh, passed, said, same, shown, wrap
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.tensor import DTensor, Replicate

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint, load_safetensors

pytestmark = pytest.mark.multiprocess

LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS = (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT)
ADAM = functools.partial(torch.optim.Adam, lr=0.05)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)  # of two states torch's class gives one for both


def trained(cls, orig, strategy="FULL_SHARD", precision=None, accumulates=False, checkpointed=False, optim=ADAM):
    """What users see of two steps."""
    mesh = new_mesh()
    model = wrap(cls, net(mesh), mesh, use_orig_params=orig, strategy=strategy, mixed_precision=precision)
    if checkpointed:
        apply_activation_checkpointing(model, check_fn=lambda inner: isinstance(inner, nn.Linear | Layer))
    optimizer = optim(model.parameters())
    record = {"wrapped": shown(model)}
    for step in range(2):
        if accumulates:
            with model.no_sync():
                model(batch(10 + step, mesh["data"].get_local_rank())).square().sum().backward()
        loss = model(batch(step, mesh["data"].get_local_rank())).float().square().sum()
        loss.backward()
        record[f"loss {step}"] = said(loss)
        record[f"step {step}"] = {clean(name): value for name, value in shown(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        record["evaluated"] = said(model.eval()(batch(9, 0)))
    return model.train(), optimizer, record


SETTINGS = [
    {"orig": True},
    {"orig": False},
    {"orig": True, "strategy": "SHARD_GRAD_OP"},
    {"orig": False, "strategy": "SHARD_GRAD_OP", "precision": LOW},
    {"orig": True, "precision": LOW, "checkpointed": True},
    {"orig": False, "accumulates": True, "checkpointed": True},
    {"orig": False, "strategy": "NO_SHARD"},
]


def train_on_both():
    for setting in SETTINGS:
        note(setting)
        ours, theirs = trained(FSDP, **setting)[2], trained(TorchFSDP, **setting)[2]
        same({name: ours[name] for name in theirs}, theirs, str(setting))


def test_training_equals_torchs_class():
    simulate_ranks(train_on_both, 4)


def states(cls, orig):
    """State dicts in each form, loaded changed, and loaded back; the optimizer's too."""
    model, optimizer, record = trained(cls, orig, optim=MOMENTUM if orig else ADAM)
    for kind in KINDS:
        with cls.state_dict_type(model, kind):
            saved = model.state_dict()
            record[kind.name] = {name: said(value) for name, value in saved.items()}
            model.load_state_dict({name: value.detach() * 2 + 1 for name, value in saved.items()})
            record[f"{kind.name} changed"] = shown(model)
            model.load_state_dict(saved)
            record[f"{kind.name} loaded"] = shown(model)
            of_optimizer = cls.optim_state_dict(model, optimizer)
            record[f"{kind.name} optimizer"] = {
                name: {key: said(value) for key, value in sorted(values.items())}
                for name, values in of_optimizer["state"].items()
            }
            if cls is FSDP:  # torch's class loads other elements of original parameters, and none of a flat one
                before = copy.deepcopy(optimizer.state_dict())
                for values in optimizer.state.values():
                    for value in values.values():
                        value.zero_()
                optimizer.load_state_dict(cls.optim_state_dict_to_load(model, optimizer, of_optimizer))
                same(optimizer.state_dict(), before, f"{kind.name} of the optimizer")
    with cls.summon_full_params(model):
        record["summoned"] = shown(model)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
    record["doubled"] = shown(model)
    return record


def save_on_both():
    for orig in (True, False):
        note(f"use_orig_params={orig}")
        ours, theirs = states(FSDP, orig), states(TorchFSDP, orig)
        same(ours, theirs, f"use_orig_params={orig}")


def test_states_equal_those_of_torchs_class():
    run_ranks(save_on_both, 4)  # torch names what it profiles for all threads of a process


def train_beside_the_module(names, frozen, dims, shape, orig, strategy, norm_type):
    what = f"{strategy} use_orig_params={orig} {shape} frozen {frozen}"
    note(what)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    oracle, module = Mean(2, frozen), net({"tensor": mesh["tensor"]}, torch.float64)
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    model = wrap(FSDP, module, {"data": mesh[dims]}, use_orig_params=orig, strategy=strategy)
    optimizers = [
        torch.optim.SGD([param for param in one.parameters() if param.requires_grad], lr=0.05, momentum=0.9)
        for one in (model, oracle.module)
    ]
    oracle.check(model, what)
    row = dist.get_rank() // 2
    for step in range(2):
        with model.no_sync():
            model(batch(10 + step, row, torch.float64)).square().sum().backward()
        loss = model(batch(step, row, torch.float64)).square().sum()
        loss.backward()
        oracle.backward(10 + step)
        torch.testing.assert_close(loss, oracle.backward(step)[row], rtol=1e-10, atol=0)
        oracle.check(model, what, gradients=True)
        norm = model.clip_grad_norm_(0.5, norm_type)
        expected = nn.utils.clip_grad_norm_(oracle.module.parameters(), 0.5, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        oracle.check(model, f"{what} step {step}")


TWO, THREE = ("data", "tensor"), ("replicate", "shard", "tensor")
FROZEN = ("layers.0.up.weight", "layers.1.down.bias", "layers.1.norm.weight")
LAYER = tuple(
    f"layers.1.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias", "norm.weight", "norm.bias")
)
BESIDE = [
    (TWO, (), "data", (2, 2), True, "FULL_SHARD", 2.0),
    (TWO, FROZEN, "data", (2, 2), True, "FULL_SHARD", torch.inf),
    (TWO, LAYER, "data", (2, 2), False, "FULL_SHARD", 2.0),
    (TWO, FROZEN, "data", (2, 2), True, "SHARD_GRAD_OP", 2.0),
    (TWO, FROZEN, "data", (2, 2), True, "NO_SHARD", 1.0),
    (TWO, LAYER, "data", (2, 2), False, "NO_SHARD", 2.0),
    (THREE, (), THREE[:2], (2, 1, 2), True, "HYBRID_SHARD", 2.0),
    (THREE, FROZEN, THREE[:2], (1, 2, 2), True, "_HYBRID_SHARD_ZERO2", torch.inf),
    (THREE, LAYER, THREE[:2], (1, 2, 2), False, "HYBRID_SHARD", 2.0),
]


def train_each_beside_the_module():
    for setting in BESIDE:
        train_beside_the_module(*setting)


def test_training_and_clipping_equal_the_unparallelised_module():
    simulate_ranks(train_each_beside_the_module, 4)


def copies():
    for orig in (True, False):
        note(f"use_orig_params={orig}")
        mesh = new_mesh()
        model = FSDP(Cut(mesh["tensor"]), device_mesh=mesh["data"], use_orig_params=orig)
        passed(model)
        model.zero_grad()
        copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        states = [{name: said(value) for name, value in one.state_dict().items()} for one in (model, copied, loaded)]
        expected = passed(model)
        for one, state in zip((copied, loaded), states[1:], strict=True):
            same(state, states[0])
            same(passed(one), expected)
            with torch.no_grad():
                for param in one.parameters():
                    param.add_(1)
        model.zero_grad()
        same(passed(model), expected)


def test_copies_and_pickles_train_as_the_model():
    simulate_ranks(copies, 4)


def raises(kind, pattern, function, *args, **kwargs):
    with pytest.raises(kind, match=pattern):
        function(*args, **kwargs)


def refusals():
    mesh = new_mesh()
    cut, rows = Cut(mesh["tensor"]), Cut(mesh["data"])
    over = "`weight` is a DTensor .*over ranks .*tensor parallelism must be over other ranks"
    raises(ValueError, over, FSDP, cut, device_mesh=mesh["tensor"])
    raises(ValueError, "`weight`.*a DTensor, a subclass", FSDP, cut, device_mesh=init_device_mesh("cpu", (4,)))
    raises(ValueError, "`weight`.*another dimension of its mesh as device_mesh=", FSDP, cut)
    last = "`weight` is a DTensor .*expected one dimension, the last of the mesh"
    raises(ValueError, last, FSDP, rows, device_mesh=mesh["tensor"])
    note("an ignored one")
    model = FSDP(cut, device_mesh=mesh["data"], ignored_states=[cut.weight])
    passed(model)
    assert isinstance(cut.weight.grad, DTensor)
    norm = torch.stack(
        [
            cut.weight.grad.full_tensor().norm(),
            *everyones(next(param for param in model.parameters() if param is not cut.weight)),
        ]
    ).norm()
    torch.testing.assert_close(model.clip_grad_norm_(1e9), norm)
    for orig in (True, False):
        refuse_states(mesh, orig)


def refuse_states(mesh, orig):
    note(f"states, use_orig_params={orig}")
    model = FSDP(Cut(mesh["tensor"]), device_mesh=mesh["data"], use_orig_params=orig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    passed(model)
    optimizer.step()
    before = shown(model)
    saved = model.state_dict()
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in saved.items()}
    raises(RuntimeError, "weight", model.load_state_dict, whole)
    raises(RuntimeError, "`weight` is stored as", load_safetensors, model, "/nowhere")
    raises(RuntimeError, "`weight` is stored as", checkpoint.save, "/nowhere", model)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        rows = model.state_dict()
        rows["weight"] = rows["weight"].redistribute(placements=[Replicate(), Replicate()])
        raises(RuntimeError, "`weight` is a DTensor with placements", model.load_state_dict, rows)
    of_optimizer = FSDP.optim_state_dict(model, optimizer)
    scatter = FSDP.scatter_full_optim_state_dict
    raises(ValueError, "optimizer state of `weight`", scatter, of_optimizer, model, optim=optimizer)
    same(shown(model), before)
    note(f"weights, use_orig_params={orig}")
    output = model(batch(1, 0))
    optimizer.step()
    raises(RuntimeError, "modified by an inplace operation", output.sum().backward)
    model.zero_grad()
    outputs = [passed(model), passed(FSDP(loaded_with(model, mesh), device_mesh=mesh["data"], use_orig_params=orig))]
    same(*outputs)


def loaded_with(model, mesh):
    """A module with the values of ``model``."""
    module = Cut(mesh["tensor"])
    module.load_state_dict(model.state_dict())
    return module


def everyones(param):
    """Norms of the gradients' pieces that the ranks of a column of the mesh have."""
    norms = [torch.zeros(()) for _ in range(4)]
    dist.all_gather(norms, torch.zeros(()) if param.grad is None else param.grad.norm())
    return [norms[i] for i in range(4) if i % 2 == dist.get_rank() % 2]


def test_what_cannot_be_is_refused_by_name_and_changes_nothing():
    simulate_ranks(refusals, 4)


def fail_on_one():
    mesh = new_mesh()
    model = FSDP(Cut(mesh["tensor"]), device_mesh=mesh["data"])
    passed(model)
    if dist.get_rank() == 3:
        raise ValueError("out of data")
    try:
        passed(model)
    except Exception as error:
        note(error)
        os._exit(0)


def test_a_rank_that_fails_ends_the_others():
    ends = ends_of_ranks(fail_on_one, 4, timeout=60.0)
    assert [code for code, _, _ in ends[:3]] == [0] * 3, ends  # none waits for ever
    assert "rank 3" in ends[1][2], ends  # of its column of the mesh
    assert "out of data" in ends[1][2], ends
