"""What FSDP says under TORCH_DISTRIBUTED_DEBUG; each is a function of a Recorder and a Setting (dropin_behaviours)."""

import contextlib
import logging
import warnings

import torch
import torch.distributed as dist
from dropin_behaviours import batch, one_pass, run_all, train
from dropin_models import Block, Mlp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

# Where our messages have other words than torch's: what the two have in common
IN_COMMON = ("Parameter needs writeback in", "Gradient needs writeback in", "Only some but not all ranks have a `None`")


class _Log(logging.Handler):
    def __init__(self, recorder, label):
        super().__init__()
        self.recorder, self.label = recorder, label

    def emit(self, record):
        message = record.getMessage()
        if "profiling info" not in message:  # which has durations
            self.recorder.add(f"{self.label} logged", record.levelname, message)


@contextlib.contextmanager
def heard(recorder, label):
    """Record what FSDP logs and warns of in the context."""
    handler = _Log(recorder, label)
    logger = logging.getLogger("torch.distributed.fsdp")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logger.removeHandler(handler)
    for warning in caught:
        text = str(warning.message)
        common = [part for part in IN_COMMON if part.lower() in text.lower()]
        recorder.add(f"{label} warned", warning.category.__name__, *(common or [text]))


def training_is_traced(recorder, setting):
    with heard(recorder, "training"):
        model = setting.wrap(Mlp())
        train(recorder, model)
    with heard(recorder, "state dict"):
        saved = model.state_dict()
        recorder.add("state dict", *saved)
        model.load_state_dict(saved)
    recorder.parameters("loaded", model)


def writeback_is_told(recorder, setting):
    model = setting.wrap(Mlp())
    if not setting.orig:
        recorder.add("the modules have no parameters of their own")
        return
    inner = model.module
    train(recorder, model)

    def assign_data():
        inner.first.weight.data = inner.first.weight.data.clone() * 2

    def assign_parameter():
        inner.first.bias = nn.Parameter(inner.first.bias.detach().clone() * 3)

    def assign_gradient():
        inner.first.weight.grad = torch.ones_like(inner.first.weight)

    def drop_one_gradient():
        inner.first.bias.grad = None

    changes = [assign_data, assign_gradient, drop_one_gradient]
    if dist.get_debug_level() != dist.DebugLevel.INFO:
        changes.append(assign_parameter)  # with INFO torch's runtime raises KeyError, on the ranks that have a piece
    for change in changes:
        change()
        with heard(recorder, change.__name__):
            one_pass(recorder, model, 3, change.__name__)
        recorder.parameters(f"{change.__name__} done", model)


def some_ranks_have_no_gradients(recorder, setting):
    model = setting.wrap(Mlp())
    if not setting.orig:
        recorder.add("with_grads needs original parameters")
        return
    one_pass(recorder, model, 0)
    if dist.get_rank() == 1:
        model.zero_grad()
    with heard(recorder, "summon"), FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        recorder.parameters("summoned", model)
    recorder.parameters("after it", model)


class Orders(nn.Module):
    """Runs its blocks in the order that it is given."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))

    def forward(self, x, order):
        x = self.first(x)
        for number in order:
            x = self.blocks[number](x)
        return x


def the_order_changes(recorder, setting):
    """Between iterations: each of the later orders, after one that sets what is expected."""
    for later in ((1, 0, 2), (0, 1, 2, 0)):
        model = setting.wrap(Orders())
        for step, order in enumerate(((0, 1, 2), later, (2, 1, 0), later)):
            with heard(recorder, f"{later} step {step}"):
                one_pass_in_order(recorder, model, step, order)


def one_pass_in_order(recorder, model, step, order):
    output = model(batch(step), order)
    recorder.tensor(f"step {step} {order} output", output)
    output.square().sum().backward()
    recorder.parameters(f"step {step} {order}", model)
    model.zero_grad()


def the_ranks_disagree(recorder, setting):
    """About the order of the first iteration. With original parameters torch fails as it looks for their names."""
    model = setting.wrap(Orders())
    order = (0, 1, 2) if dist.get_rank() == 0 else (1, 0, 2)
    try:
        model(batch(), order)
    except RuntimeError as error:
        recorder.add("refused", str(error))
    except KeyError:
        recorder.add("refused", "KeyError")
    else:
        recorder.add("not refused")


SETTINGS = (("FULL_SHARD", True), ("FULL_SHARD", False), ("NO_SHARD", True))
LEVELS = {
    "INFO": (training_is_traced, writeback_is_told, some_ranks_have_no_gradients),
    "DETAIL": (training_is_traced, writeback_is_told, the_order_changes, the_ranks_disagree),
}


def observe(kind, level, behaviour, setting):
    """Return the events of one of the level's behaviours in one setting."""
    assert dist.get_debug_level().name == level
    [events] = run_all(kind, (behaviour,), (setting,)).values()
    return events
