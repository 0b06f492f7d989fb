"""Replace members of the handle's class the way users do, train with torch's FullyShardedDataParallel, write it down.

Everything runs in one process, as one rank of a fake world of two: its all-gather copies this rank's shard, its
reduce-scatter takes this rank's part. The numbers mean nothing, but torch's handle and ours must make the same ones.
"""

import contextlib
import functools
import inspect
import types

import torch
from gloo import fake_world, handle_of
from recording import Recorder, reshard
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    _flat_param,
    _init_utils,
)

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# (strategy, use_orig_params, mixed precision)
MODES = [
    ("FULL_SHARD", True, "fp32"),
    ("FULL_SHARD", False, "bf16"),
    ("SHARD_GRAD_OP", True, "bf16"),
    ("NO_SHARD", True, "fp32"),
    ("NO_SHARD", False, "fp32"),
]
MODE_IDS = [f"{strategy.lower()}-{'orig' if orig else 'flat'}-{precision}" for strategy, orig, precision in MODES]


def layers():
    """Return a model of two units' worth of layers, of odd sizes."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5, bias=False), nn.Linear(5, 3))


def wrapped(model, mode):
    """Wrap the third layer and the rest as two units."""
    strategy, orig, precision = mode
    settings = {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": orig,
        "mixed_precision": BF16 if precision == "bf16" else None,
        "device_id": torch.device("cpu"),
    }
    model[2] = FullyShardedDataParallel(model[2], **settings)
    return FullyShardedDataParallel(model, **settings)


def handles(model):
    return [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(model)]


def replacement(member, change):
    """Return what is put in the place of ``member``: calls ``change(original, *the call's arguments)``."""
    if isinstance(member, property):
        return property(functools.partial(change, member.fget), member.fset)
    if isinstance(member, staticmethod):
        return staticmethod(functools.partial(change, member.__func__))

    @functools.wraps(member)
    def call(*args, **kwargs):
        return change(member, *args, **kwargs)

    return call


@contextlib.contextmanager
def changed_class(changes, where):
    """Replace members of the handle's class (``where`` "class") or make torch build a subclass that overrides them."""
    cls = _flat_param.FlatParamHandle
    new = {name: replacement(inspect.getattr_static(cls, name), change) for name, change in changes.items()}
    if where == "subclass":
        subclass = type("UsersHandle", (cls,), new)
        _init_utils.FlatParamHandle = subclass
        try:
            yield subclass
        finally:
            _init_utils.FlatParamHandle = cls
        return
    before = {name: vars(cls).get(name) for name in changes}
    for name, value in new.items():
        setattr(cls, name, value)
    try:
        yield cls
    finally:
        for name, value in before.items():
            if value is None:
                delattr(cls, name)  # it was inherited
            else:
                setattr(cls, name, value)


def change_instances(model, changes):
    """Replace methods on each of the model's handles."""
    for handle in handles(model):
        for name, change in changes.items():
            original = getattr(type(handle), name, None) or getattr(handle, name).__func__
            if isinstance(inspect.getattr_static(type(handle), name, "fp32"), staticmethod):
                setattr(handle, name, functools.partial(change, original))
            else:
                setattr(handle, name, types.MethodType(functools.partial(change, original), handle))


def train(kind, mode, changes, where):
    """Train under the handle of ``kind`` with ``changes`` made; return the events.

    Args: ``changes``: for each member's name a function of the original and the call's arguments; ``where``: "class",
        "subclass" or "instance".
    """
    recorder = Recorder()
    on_class = changes if where != "instance" else {}
    with fake_world(2, 1), handle_of(kind), changed_class(on_class, where), recorder.collectives():
        model = wrapped(layers(), mode)
        for handle in handles(model):
            ours = type(handle).__module__.startswith("flatparam") or "flatparam" in repr(type(handle).__mro__)
            assert ours == (kind == "flatparam")
        if where == "instance":
            change_instances(model, changes)
        recorder.watch(model)
        use(model, mode, recorder)
    return recorder.events


def use(model, mode, recorder):
    """Train, accumulate, change a parameter from outside, evaluate, summon, clip, save: record what can be seen."""
    orig = mode[1]
    recorder.parameters("wrapped", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    for step in range(3):
        for silent in (False,) if step == 0 else (True, False):
            x = torch.randn(2, 3, generator=generator, requires_grad=True)
            with model.no_sync() if silent else contextlib.nullcontext():
                output = model(x)
                recorder.tensor(f"step {step} output", output)
                recorder.parameters(f"step {step} after forward", model)
                output.float().square().sum().backward()
            recorder.tensor(f"step {step} gradient of the input", x.grad)
            recorder.parameters(f"step {step} after backward", model)
        if step == 1:
            recorder.tensor("norm", model.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and orig:
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5  # to be written back
    with torch.no_grad():
        recorder.tensor("evaluation", model(x))
    reshard(model)
    with FullyShardedDataParallel.summon_full_params(model):
        recorder.parameters("summoned", model)
    for number in range(2):
        model(x).float().sum().backward()
        recorder.parameters(f"accumulated {number}", model)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=orig):
        recorder.parameters("summoned with gradients", model)
    for name, value in model.state_dict().items():
        recorder.tensor(f"saved {name}", value)
    recorder.parameters("at the end", model)
