"""Things that users do with torch's FullyShardedDataParallel beyond a training loop; each is a function that records.

``run_all`` runs many in one launch: a behaviour is a function of a Recorder and a Setting. The events must be the same
under both handles.
"""

import contextlib
import dataclasses
import functools
import traceback
from unittest import mock

import torch
import torch.distributed as dist
from dropin_models import Block, Images, Mlp
from gloo import check_handles, note
from recording import Recorder
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, _init_utils
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import _apply_optimizer_in_backward

BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a behaviour's model is wrapped."""

    kind: str  # whose handle
    strategy: str
    orig: bool

    def wrap(self, model, blocks=Block, **settings):
        """Wrap the model and its blocks, if ``blocks`` is not None."""
        settings = {
            "sharding_strategy": ShardingStrategy[self.strategy],
            "use_orig_params": self.orig,
            "device_id": torch.device("cpu"),
            "process_group": self.groups(),
            "auto_wrap_policy": None if blocks is None else ModuleWrapPolicy({blocks}),
        } | settings
        model = FullyShardedDataParallel(model, **settings)
        check_handles(model, self.kind)
        return model

    def groups(self):
        return hybrid_groups() if "HYBRID" in self.strategy else None


@functools.cache
def hybrid_groups():
    """Return this rank's groups of half the ranks to shard over, and of two to replicate over; made once a process."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    shard = [dist.new_group(range(first, first + half)) for first in (0, half)]
    replicate = [dist.new_group([first, first + half]) for first in range(half)]
    return shard[rank // half], replicate[rank % half]


SETTINGS = (
    ("FULL_SHARD", True),
    ("FULL_SHARD", False),
    ("SHARD_GRAD_OP", True),
    ("NO_SHARD", True),
    ("NO_SHARD", False),
)


def run_all(kind, behaviours, settings=SETTINGS):
    """Return for each behaviour's and setting's name its events; an error is an event of its own."""
    results = {}
    for behaviour in behaviours:
        for strategy, orig in settings:
            name = f"{behaviour.__name__}-{strategy.lower()}-{'orig' if orig else 'flat'}"
            note(f"{name} with the handle of {kind}")
            recorder = Recorder()
            torch.manual_seed(17)
            try:
                with recorder.collectives():
                    behaviour(recorder, Setting(kind, strategy, orig))
            except Exception:
                recorder.add("raised", traceback.format_exc())
            results[name] = recorder.events
            dist.barrier()
    return results


def attempt(recorder, label, call):
    """Record the type of the error that ``call`` gives, or that it gives none; return whether it gave none."""
    try:
        call()
    except Exception as error:
        recorder.add(label, type(error).__name__)
        return False
    recorder.add(label, "no error")
    return True


def batch(step=0):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 5, generator=generator, requires_grad=True)


def one_pass(recorder, model, step, label=""):
    x = batch(step)
    output = model(x, step)
    recorder.tensor(f"{label} step {step} output", output)
    output.float().square().sum().backward()
    recorder.tensor(f"{label} step {step} gradient of the input", x.grad)
    recorder.parameters(f"{label} step {step} after backward", model)


def train(recorder, model, steps=2, label="", optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        one_pass(recorder, model, step, label)
        optimizer.step()
        recorder.parameters(f"{label} step {step} after the step", model)
    return optimizer


# Precision


def low_precision_gradients_are_kept(recorder, setting):
    for reduce_dtype in (None, torch.float32, BF16):
        precision = MixedPrecision(param_dtype=BF16, reduce_dtype=reduce_dtype, keep_low_precision_grads=True)
        model = setting.wrap(Mlp(), mixed_precision=precision)
        label = str(reduce_dtype)
        train(recorder, model, label=label)
        one_pass(recorder, model, 5, label)
        for number in range(2):
            with model.no_sync():
                one_pass(recorder, model, 6 + number, label)
        one_pass(recorder, model, 9, label)
        recorder.parameters(f"{label} accumulated", model)


def buffers_have_their_own_precision(recorder, setting):
    for buffer_dtype in (BF16, torch.float64, None):
        inner = Images()
        inner.norm = nn.GroupNorm(1, 5)
        inner.register_buffer("scale", torch.linspace(0, 1, 5).view(1, 5, 1, 1))
        inner.register_buffer("count", torch.tensor(3))
        precision = MixedPrecision(param_dtype=BF16, buffer_dtype=buffer_dtype)
        model = setting.wrap(inner, mixed_precision=precision)
        x = torch.randn(2, 3, 5, 5)
        for step in range(2):
            model(x, step).float().sum().backward()
            recorder.parameters(f"{buffer_dtype} step {step}", model)
        model.eval()
        with torch.no_grad():
            recorder.tensor(f"{buffer_dtype} evaluation", model(x, 0))
        with FullyShardedDataParallel.summon_full_params(model):
            recorder.parameters(f"{buffer_dtype} summoned", model)
        for name, value in model.state_dict().items():
            recorder.tensor(f"{buffer_dtype} saved {name}", value)


# Gradients


def gradients_are_clipped(recorder, setting):
    for norm_type in (1.0, 2.0, float("inf"), 3):
        for bound in (0.01, 1e6):
            model = setting.wrap(Mlp())
            one_pass(recorder, model, 0)
            recorder.tensor(f"norm {norm_type}", model.clip_grad_norm_(bound, norm_type))
            recorder.parameters(f"clipped to {bound} by {norm_type}", model)
    model = setting.wrap(Mlp())
    recorder.tensor("without gradients", model.clip_grad_norm_(1.0))


def two_forwards_after_a_graph_that_is_kept(recorder, setting):
    model = setting.wrap(Mlp())
    loss = model(batch(), 0).square().sum()
    loss.backward(retain_graph=True)
    recorder.parameters("after the first backward", model)
    model.zero_grad()  # not a second one, which torch does not reduce: tests/dropin/test_later_backwards.py
    outputs = [model(batch(step), step) for step in range(2)]
    recorder.parameters("after two forwards", model)
    if setting.strategy != "FULL_SHARD":
        sum(output.square().sum() for output in outputs).backward()
        recorder.parameters("after a backward of both", model)


def the_optimizer_steps_in_backward(recorder, setting):
    model = setting.wrap(Mlp())
    if not setting.orig:  # torch refuses, after some of the units in no certain order
        recorder.add("only with original parameters")
        return
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}, register_hook=False)
    for step in range(3):
        attempt(recorder, f"step {step}", lambda step=step: one_pass(recorder, model, step))
        recorder.parameters(f"step {step} after it", model)


def hooks_are_called(recorder, setting):
    """On the parameters before and after wrapping, on forward's views, on the flat parameter's gradient.

    Hooks on the views of one unit are called when all of its gradients are there, not one by one: their order among
    each other and the layers' hooks is not compared.
    """
    inner = Mlp()
    called = Recorder()

    def noted(label):
        return lambda tensor: called.tensor(label, tensor)

    for name, parameter in inner.named_parameters():
        parameter.register_hook(noted(f"hook set before wrapping on {name}"))
    for name, layer in inner.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(
                lambda layer, _, name=name: (
                    layer.weight.requires_grad and layer.weight.register_hook(noted(f"view {name}")) and None
                )
            )
            layer.register_full_backward_hook(lambda layer, *grads, name=name: called.add(f"backward of {name}"))
    model = setting.wrap(inner)
    for number, unit in enumerate(FullyShardedDataParallel.fsdp_modules(model)):
        unit._handle.flat_param.register_hook(noted(f"flat parameter {number}"))
    for name, parameter in model.named_parameters():
        parameter.register_hook(noted(f"hook set after wrapping on {name}"))
    train(recorder, model)
    recorder.events += sorted(called.events)


def hooks_change_gradients(recorder, setting):
    inner = Mlp()
    inner.first.register_forward_pre_hook(
        lambda layer, _: layer.weight.register_hook(lambda gradient: gradient * 3) and None
    )
    model = setting.wrap(inner)
    model._handle.flat_param.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    train(recorder, model)


# Wrapping


class Deep(nn.Module):
    """Units in units, one without parameters of its own."""

    def __init__(self, setting):
        super().__init__()
        inner = setting.wrap(Block(5), blocks=nn.Linear)
        self.outer = setting.wrap(nn.Sequential(inner), blocks=None)
        self.last = nn.Linear(5, 2)

    def forward(self, x, step):
        return self.last(self.outer(x))


def units_are_nested(recorder, setting):
    model = setting.wrap(Deep(setting), blocks=None)
    recorder.add("names", *[name for name, _ in model.named_parameters()])
    train(recorder, model)


def modules_are_ignored(recorder, setting):
    for number in range(3):
        inner = Mlp()
        ignored = (
            {"ignored_modules": [inner.blocks[0], inner.last]},
            {"ignored_states": [inner.first.weight, inner.blocks[1].norm.bias]},
            {"ignored_states": [inner.gain]},
        )[number]
        model = setting.wrap(inner, **ignored)
        train(recorder, model, label=f"ignored {number}")
        for name, value in model.state_dict().items():
            recorder.tensor(f"ignored {number} saved {name}", value)


def meta_modules_are_initialized(recorder, setting):
    def init(module):
        module.to_empty(device="cpu", recurse=False)
        for number, parameter in enumerate(module.parameters(recurse=False)):
            with torch.no_grad():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + number)

    with torch.device("meta"):
        inner = Mlp()
    train(recorder, setting.wrap(inner, param_init_fn=init))


def states_are_synchronized(recorder, setting):
    """torch refuses it on a CPU; past that check all ranks get what rank 0 has, also where they have meta modules."""

    def build():
        inner = Mlp()
        inner.register_buffer("offset", torch.randn(3))
        return inner

    torch.manual_seed(dist.get_rank())
    assert not attempt(recorder, "refused", lambda: setting.wrap(build(), sync_module_states=True))
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        partly_meta = build()
    with mock.patch.object(_init_utils, "_check_module_states_for_sync_module_states"):
        for inner in (build(), partly_meta):
            model = setting.wrap(
                inner,
                sync_module_states=True,
                param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
            )
            with FullyShardedDataParallel.summon_full_params(model):
                recorder.parameters("summoned", model)
                for tensor in (*model.parameters(), *model.buffers()):
                    expected = tensor.detach().clone()
                    dist.broadcast(expected, 0)
                    assert torch.equal(tensor, expected)
            train(recorder, model)


# Writeback


def parameters_are_replaced(recorder, setting):
    """Not by ``model.to()``, after which torch's handle loses a step: test_dropin_moved.py has the unsharded oracle."""
    model = setting.wrap(Mlp())
    if not setting.orig:
        recorder.add("the modules have no parameters of their own")
        return
    optimizer = train(recorder, model)
    inner = model.module
    owners = {"weight": inner.first, "gain": inner.gain}

    def assign_data():
        inner.first.weight.data = inner.first.weight.data.clone() * 2

    def assign_parameter():
        for name, owner in owners.items():
            setattr(owner, name, nn.Parameter(getattr(owner, name).detach().clone() * 3))

    def assign_gradient():
        inner.first.weight.grad = torch.ones_like(inner.first.weight)

    def drop_one_gradient():
        inner.first.bias.grad = None

    def in_place():
        with torch.no_grad():
            inner.first.weight.add_(1)

    for change in (assign_data, assign_parameter, assign_gradient, drop_one_gradient, in_place):
        one_pass(recorder, model, 3, change.__name__)
        change()
        recorder.parameters(f"{change.__name__} done", model)
        optimizer.step()
        one_pass(recorder, model, 4, change.__name__)
        optimizer.zero_grad()


def views_are_changed_between_passes(recorder, setting):
    """Between forward and backward: what SHARD_GRAD_OP leaves in the modules then."""
    model = setting.wrap(Mlp())
    loss = model(batch(), 0).sum()
    if setting.orig:
        recorder.attributes("between", model.module.first)
    loss.backward()
    with torch.no_grad(), contextlib.suppress(AttributeError):
        recorder.tensor("a second forward", model(batch(), 0))
    recorder.parameters("after it", model)


BEHAVIOURS = [
    low_precision_gradients_are_kept,
    buffers_have_their_own_precision,
    gradients_are_clipped,
    two_forwards_after_a_graph_that_is_kept,
    the_optimizer_steps_in_backward,
    hooks_are_called,
    hooks_change_gradients,
    units_are_nested,
    modules_are_ignored,
    meta_modules_are_initialized,
    states_are_synchronized,
    parameters_are_replaced,
    views_are_changed_between_passes,
]
