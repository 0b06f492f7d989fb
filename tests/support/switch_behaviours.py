"""What users do under FSDP's environment switches: functions of a Recorder and a Setting (dropin_behaviours)."""

import contextlib
import copy
import logging
from unittest import mock

import torch
import torch.distributed as dist
from dropin_behaviours import BF16, Setting, batch, one_pass, run_all, train
from dropin_models import Mlp
from recording import units
from torch import nn
from torch.distributed.fsdp import MixedPrecision

LOW = MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16)
LOW_REDUCE = MixedPrecision(reduce_dtype=BF16)


class Watched(nn.Linear):
    """Counts who sets and deletes its attributes, as modules of parametrizing libraries do."""

    def __init__(self, *sizes):
        self.__dict__["seen"] = []
        super().__init__(*sizes)

    def __setattr__(self, name, value):
        if isinstance(value, torch.Tensor):
            self.seen.append(("set", name, type(value).__name__))
        super().__setattr__(name, value)

    def __delattr__(self, name):
        self.seen.append(("delete", name))
        super().__delattr__(name)


def attributes_are_set(recorder, setting):
    """FSDP_USE_UNSAFE_SETATTR: past nn.Module, its overrides and its registration hooks."""
    inner = Mlp()
    inner.first = Watched(5, 7)
    registered = []
    hook = nn.modules.module.register_module_parameter_registration_hook(
        lambda module, name, parameter: registered.append((type(module).__name__, name))
    )
    try:
        model = setting.wrap(inner)
        recorder.watch(model)
        train(recorder, model)
        with torch.no_grad():
            recorder.tensor("evaluation", model(batch(5), 0))
    finally:
        hook.remove()
    recorder.add("attributes set", sorted(set(inner.first.seen)), bool(inner.first.seen[6:]))
    recorder.add("parameters registered", sorted(set(registered)), len(registered) > 40)
    recorder.attributes("at rest", inner.first)


def parameters_are_written(recorder, setting):
    """FSDP_SKIP_WRITEBACK_CHECK: what was put in the place of parameters and gradients."""
    model = setting.wrap(Mlp())
    optimizer = train(recorder, model)
    inner = model.module

    def assign_data():
        inner.first.weight.data = inner.first.weight.data.clone() * 2

    def assign_parameter():
        inner.first.bias = nn.Parameter(inner.first.bias.detach().clone() * 3)

    def assign_gradient():
        inner.blocks[0].module.up.weight.grad = torch.ones_like(inner.blocks[0].module.up.weight)

    def drop_one_gradient():
        inner.blocks[1].module.up.bias.grad = None

    for change in (assign_data, assign_parameter, assign_gradient, drop_one_gradient):
        one_pass(recorder, model, 3, change.__name__)
        if setting.orig:
            change()
            recorder.parameters(f"{change.__name__} done", model)
        one_pass(recorder, model, 4, change.__name__)
        optimizer.step()
        optimizer.zero_grad()
        recorder.parameters(f"{change.__name__} stepped", model)


def evaluation_is_precise(recorder, setting):
    """FSDP_USE_FULL_PREC_IN_EVAL: eval mode, between steps in low precision, with and without gradients."""
    for precision in (LOW, LOW_REDUCE):
        inner = Mlp()
        inner.register_buffer("offset", torch.full((1, 5), 1 / 3))
        inner.register_forward_pre_hook(lambda module, args: (args[0] + module.offset, args[1]))
        plain = copy.deepcopy(inner).eval()
        model = setting.wrap(inner, mixed_precision=precision)
        label = str(precision.param_dtype)
        for step in range(2):
            model.eval()
            with torch.no_grad():
                output = model(batch(7), 0)
            recorder.tensor(f"{label} {step} evaluation", output)
            recorder.add(f"{label} {step} is exact", torch.equal(output, plain(batch(7), 0)))
            recorder.parameters(f"{label} {step} after evaluation", model)
            # Its backward frees the root's weights, which torch would take for those of the next evaluation
            one_pass(recorder, model, 8, f"{label} {step} gradients in eval")
            model.train()
            optimizer = train(recorder, model, label=f"{label} {step}")
            optimizer.zero_grad()
        for name, value in model.state_dict().items():
            recorder.tensor(f"{label} saved {name}", value)


@contextlib.contextmanager
def complete_fake_group():
    """Give torch's FakeProcessGroup what ``dist.reduce_scatter_single`` calls: it lacks it in torch 2.13."""
    kind = dist.fsdp._flat_param.FakeProcessGroup
    with contextlib.ExitStack() as stack:
        if not hasattr(kind, "reduce_scatter_single"):
            method = kind._reduce_scatter_base
            stack.enter_context(mock.patch.object(kind, "reduce_scatter_single", method, create=True))
        yield


def nothing_is_communicated(recorder, setting):
    """FSDP_USE_FAKE_ALL_GATHER and FSDP_USE_FAKE_REDUCE. Memory that a fake collective leaves as it was is zeros."""
    with mock.patch.object(torch, "empty_like", torch.zeros_like), complete_fake_group():
        model = setting.wrap(Mlp())
        optimizer = train(recorder, model)
        with model.no_sync():
            one_pass(recorder, model, 3, "no_sync")
        one_pass(recorder, model, 4, "accumulated")
        optimizer.step()
    recorder.parameters("at the end", model)
    for name, value in model.state_dict().items():
        recorder.tensor(f"saved {name}", value)


SWITCHES = {
    "FSDP_USE_UNSAFE_SETATTR": attributes_are_set,
    "FSDP_SKIP_WRITEBACK_CHECK": parameters_are_written,
    "FSDP_USE_FULL_PREC_IN_EVAL": evaluation_is_precise,
    "FSDP_USE_FAKE_ALL_GATHER": nothing_is_communicated,
    "FSDP_USE_FAKE_REDUCE": nothing_is_communicated,
}
SETTINGS = (
    ("FULL_SHARD", True),
    ("FULL_SHARD", False),
    ("SHARD_GRAD_OP", True),
    ("SHARD_GRAD_OP", False),
    ("NO_SHARD", True),
    ("NO_SHARD", False),
)


class Warned(logging.Handler):
    """Keeps what the handle logs."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


def observe(kind, switch, setting):
    """Return the events of the switch's behaviour in a setting, and level and message of what the handle logged."""
    logged = Warned()
    logger = logging.getLogger("torch.distributed.fsdp._flat_param")
    logger.addHandler(logged)
    try:
        events = run_all(kind, [SWITCHES[switch]], [setting])
    finally:
        logger.removeHandler(logged)
    return events, [(record.levelname, record.getMessage()) for record in logged.records]


def train_on_rank_0(kind, strategy, orig):
    """Return, on rank 0, the gradients of a step that the other ranks take no part in."""
    if dist.get_rank() > 0:
        return None
    model = Setting(kind, strategy, orig).wrap(Mlp())
    with complete_fake_group() if kind == "torch" else contextlib.nullcontext():
        for step in range(2):
            model(batch(step), step).sum().backward()
    return [unit._handle.flat_param.grad.tolist() for unit in units(model)]


def evaluations(kind, strategy, orig):
    """Return whether full weights, and evaluations in no_grad, between training steps are of the last step.

    The oracle is the unsharded module, with the weights of a new model that got the shards.
    """
    setting = Setting(kind, strategy, orig)
    plain = Mlp().eval()
    model = setting.wrap(Mlp(), mixed_precision=LOW)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    right = []
    for step in range(3):
        model.train()
        model(batch(step), step).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = model.state_dict()
        model.eval()
        with torch.no_grad():
            output = model(batch(7), 0)
            new = setting.wrap(Mlp(), mixed_precision=LOW)
            for theirs, unit in zip(units(new), units(model), strict=True):
                theirs._handle.flat_param.copy_(unit._handle.flat_param)
            weights = new.state_dict()
            plain.load_state_dict(weights)
            expected = plain(batch(7), 0)
        right.append((all(torch.equal(saved[name], weights[name]) for name in weights), torch.equal(output, expected)))
    return right
