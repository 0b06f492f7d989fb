"""A scenario is one way to train with torch's FullyShardedDataParallel; running it gives the list of its events."""

import contextlib
import dataclasses

import torch
import torch.distributed as dist
from dropin_models import MODELS, Block, Checkpointed
from gloo import check_handles
from recording import Recorder, describe
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional

BF16 = torch.bfloat16
PRECISIONS = {
    "fp32": None,
    "fp64": None,
    "bf16_model": None,
    "bf16": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16),
    "bf16_params": MixedPrecision(param_dtype=BF16),
    "fp32_reduce": MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32, buffer_dtype=torch.float32),
    "bf16_reduce": MixedPrecision(reduce_dtype=BF16),
    "fp16": MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16),
    "kept_low": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, keep_low_precision_grads=True),
    "buffers": MixedPrecision(buffer_dtype=BF16),
}
MODEL_DTYPES = {"fp64": torch.float64, "bf16_model": BF16}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What to train and how. Every field is plain, so that a scenario travels to the ranks."""

    model: str = "mlp"
    strategy: str = "FULL_SHARD"
    orig: bool = True
    world: int = 2
    precision: str = "fp32"
    optimizer: str = "sgd"
    wrap: str = "each"  # "each" block is a unit | only the "root" is | "nested": each block and each layer in it
    accumulate: str = (
        "none"  # "no_sync": two backward passes a step, the first unsynchronised | "sync": both synchronised
    )
    checkpointing: str = "none"  # "reentrant" or "other"; "_outside": around the unit, else in it
    evaluate: bool = False  # a forward in eval mode and no_grad before each step, one in between
    set_to_none: bool = True
    state_dicts: bool = False  # save, change, load and compare full state dicts
    prefetch: str = "pre"  # backward_prefetch: "pre", "post" or "none"; "forward" adds forward_prefetch
    clip: bool = False
    abandon: bool = False  # before each step a forward with gradients, of which the output is dropped
    steps: int = 3

    @property
    def torch_is_wrong(self):
        """Two faults of torch's handle, in which it cannot be the oracle; the unsharded module is.

        It shows the gradient of a strided parameter with its elements in another order, and steps on it; and after an
        abandoned forward under parameter mixed precision it does not reduce a unit's gradient.
        """
        misplaced = self.model in ("conv", "strided") and self.strategy == "NO_SHARD" and self.orig
        precision = PRECISIONS[self.precision]
        lost = self.abandon and precision is not None and precision.param_dtype is not None
        return misplaced or lost

    def __str__(self):
        """The fields that are not the default ones, as an id for pytest."""
        parts = [f"{self.world}ranks", self.strategy.lower(), "orig" if self.orig else "flat"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("world", "strategy", "orig") and value != field.default:
                parts.append(field.name if value is True else f"{field.name}_{value}")
        return "-".join(parts)


def build(scenario):
    """Return the scenario's model, the same on all ranks, before it is wrapped."""
    torch.manual_seed(7)
    model = MODELS[scenario.model]()
    if scenario.precision in MODEL_DTYPES:
        model.to(MODEL_DTYPES[scenario.precision])
    return model


def wrap(model, scenario):
    """Wrap the model as the scenario says."""
    settings = {
        "sharding_strategy": ShardingStrategy[scenario.strategy],
        "mixed_precision": PRECISIONS[scenario.precision],
        "use_orig_params": scenario.orig,
        "device_id": torch.device("cpu"),
        "process_group": groups(scenario),
        "forward_prefetch": scenario.prefetch == "forward",
        "backward_prefetch": {
            "pre": BackwardPrefetch.BACKWARD_PRE,
            "forward": BackwardPrefetch.BACKWARD_PRE,
            "post": BackwardPrefetch.BACKWARD_POST,
            "none": None,
        }[scenario.prefetch],
    }
    reentrant = scenario.checkpointing.startswith("reentrant")
    if scenario.checkpointing.endswith("_outside"):
        model.blocks = torch.nn.ModuleList(
            Checkpointed(FullyShardedDataParallel(block, **settings), reentrant) for block in model.blocks
        )
        return FullyShardedDataParallel(model, **settings)
    if scenario.checkpointing != "none":
        model.blocks = torch.nn.ModuleList(Checkpointed(block, reentrant) for block in model.blocks)
    unit = Block if scenario.checkpointing == "none" else Checkpointed
    classes = {
        "each": {unit},
        "root": set(),
        "nested": {unit, torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Conv2d},
    }[scenario.wrap]
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy(classes) if classes else None, **settings)


def groups(scenario):
    """Return the process group, or for a hybrid strategy the groups to shard over and to replicate over."""
    if "HYBRID" not in scenario.strategy:
        return None
    world, rank = dist.get_world_size(), dist.get_rank()
    size = 2 if world == 4 else world  # 4 ranks: shards over pairs, two replicas; else one replica
    shard = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    replicate = [dist.new_group(list(range(first, world, size))) for first in range(size)]
    return shard[rank // size], replicate[rank % size]


def batches(model, scenario, rank):
    """Yield the inputs and the generator's targets of one rank for ever."""
    generator = torch.Generator().manual_seed(100 + rank)
    while True:
        x = model.batch(generator)
        if x.is_floating_point() and scenario.precision in MODEL_DTYPES:
            x = x.to(MODEL_DTYPES[scenario.precision])
        if x.is_floating_point():
            x.requires_grad_()  # reentrant checkpointing and the pre-backward hooks of a frozen model need it
        yield x


def loss_of(output):
    """Return a loss whose gradient differs for every element of the output."""
    output = output.double()
    target = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return functional.mse_loss(output, target)


def make_optimizer(scenario, parameters):
    if scenario.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train(kind, scenario):
    """Train the scenario on this rank with the handle of ``kind``; return the events."""
    recorder = Recorder()
    plain = build(scenario)
    data = batches(plain, scenario, dist.get_rank())
    with recorder.collectives():
        model = wrap(plain, scenario)
        check_handles(model, kind)
        recorder.add("repr", repr(model))
        recorder.parameters("wrapped", model)
        recorder.watch(model)
        optimizer = make_optimizer(scenario, model.parameters())
        for step in range(scenario.steps):
            if scenario.evaluate:
                evaluate(model, next(data), step, recorder)
            if scenario.abandon:
                recorder.tensor(f"step {step} abandoned", model(next(data), step))
                recorder.parameters(f"step {step} after an abandoned forward", model)
            optimizer.zero_grad(set_to_none=scenario.set_to_none)
            passes = 1 if scenario.accumulate == "none" else 2
            for number in range(passes):
                silent = scenario.accumulate == "no_sync" and number == 0
                with model.no_sync() if silent else contextlib.nullcontext():
                    one_pass(model, next(data), step, recorder, f"step {step} pass {number}")
                if scenario.evaluate and number + 1 < passes:  # torch keeps what it gathers here past the step
                    evaluate(model, next(data), step, recorder)
            if scenario.clip:
                recorder.tensor(f"step {step} norm", model.clip_grad_norm_(0.05))
            optimizer.step()
            recorder.parameters(f"step {step} after the step", model)
            if scenario.state_dicts:
                state_dicts(model, recorder, f"step {step}")
    for number, state in enumerate(optimizer.state_dict()["state"].values()):
        for name, value in state.items():
            recorder.add(f"optimizer {number} {name}", *describe(value))
    return recorder.events


def one_pass(model, x, step, recorder, label):
    recorder.add(f"{label} forward")
    output = model(x, step)
    recorder.tensor(f"{label} output", output)
    recorder.parameters(f"{label} after forward", model)
    loss = loss_of(output)
    recorder.tensor(f"{label} loss", loss)
    loss.backward()
    recorder.tensor(f"{label} gradient of the input", x.grad)
    recorder.parameters(f"{label} after backward", model)


def evaluate(model, x, step, recorder):
    model.eval()
    with torch.no_grad():
        recorder.tensor(f"step {step} evaluation", model(x, step))
    model.train()
    recorder.parameters(f"step {step} after evaluation", model)


def state_dicts(model, recorder, label):
    """Save a full state dict, load a changed one, save again, and load the first."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        for name, value in saved.items():
            recorder.tensor(f"{label} saved {name}", value)
        changed = {name: value * 2 + 1 if value.is_floating_point() else value for name, value in saved.items()}
        recorder.add(f"{label} load", str(model.load_state_dict(changed)))
        recorder.parameters(f"{label} after load", model)
        for name, value in model.state_dict().items():
            rounded = name.endswith(("running_mean", "running_var"))  # by a lower precision of buffers
            assert rounded or torch.equal(value, changed[name]), f"{name}: the state dict is not what was loaded"
            recorder.tensor(f"{label} saved again {name}", value)
        model.load_state_dict(saved)
