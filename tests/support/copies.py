"""Ways to copy a model, and training runs that are copied on the way; what the tests of copying share."""

import contextlib
import copy
import dataclasses
import io
import pickle

import torch
import torch.distributed as dist
from dropin_models import MODELS, Block
from dropin_scenarios import PRECISIONS, groups, loss_of
from gloo import check_handles, handle_of, note
from recording import describe, digest
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam.dropin import copying


def by_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


def by_torch_save(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def by_pickle_optimizer_first(pair):
    model, optimizer = pair
    optimizer, model = by_pickle((optimizer, model))
    return model, optimizer


WAYS = {"deepcopy": copy.deepcopy, "pickle": by_pickle, "torch_save": by_torch_save}
OPTIMIZER_FIRST = "pickle of the optimizer first"
KEPT = {  # what a copy of a handle has of its original
    *(
        "_aligned_numel",
        "_aligns_addresses",
        "_debug_level",
        "_device_handle",
        "_fsdp_extension",
        "_fully_sharded_module",
    ),
    *("_fwd_bwd_param_dtype", "_keep_low_precision_grads", "_low_prec_param_dtype_specified"),
    *("_replicas", "_replicas_serial"),
    *("_low_prec_reduce_dtype_specified", "_offload_params", "_orig_param_dtype", "_reduce_dtype", "_setattr_param"),
    *("_setattr_tensor", "_sharding_strategy", "_skip_writeback_check", "_use_fake_all_gather", "_use_fake_reduce"),
    *(
        "_padded_to",
        "_use_full_prec_in_eval",
        "_use_orig_params",
        "device",
        "flat_param",
        "process_group",
        "rank",
        "world_size",
    ),
}
RESET = {  # what it has as it is before the first forward
    *("_handle_index", "_needs_pre_backward_unshard", "_needs_pre_forward_unshard", "_post_forward_index"),
    *("_pre_forward_order_index", "_prefetched", "_unit", "_unsharded_flat_param_for_skipped_views"),
}
MOMENTS = (
    "before the first forward",
    "after backward",
    "with gradients of zeros",
    "after the step",
    "after evaluation",
    "between forward and backward",
    "inside no_sync",
)
STEPS = 4
COPIED_IN = 2  # the step in which the copy is taken


@dataclasses.dataclass(frozen=True)
class Run:
    """What to train and how it is wrapped; plain values, so that it travels to the ranks."""

    model: str = "mlp"
    strategy: str = "FULL_SHARD"
    orig: bool = True
    precision: str = "fp32"
    each: bool = True  # each block is a unit of its own, and the root has the rest
    offload: bool = False

    def __str__(self):
        parts = [self.model, self.strategy.lower(), "orig" if self.orig else "flat", self.precision]
        return "-".join(parts + ["root"] * (not self.each) + ["offload"] * self.offload)

    def settings(self):
        return {
            "sharding_strategy": ShardingStrategy[self.strategy],
            "mixed_precision": PRECISIONS[self.precision],
            "use_orig_params": self.orig,
            "device_id": torch.device("cpu"),
            "process_group": groups(self),
            "cpu_offload": CPUOffload(self.offload),
        }

    def wrapped(self):
        torch.manual_seed(7)
        model = MODELS[self.model]()
        policy = ModuleWrapPolicy({Block, nn.Sequential}) if self.each else None
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, **self.settings())


def inputs(run):
    """Return this rank's batch of each step."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    model = MODELS[run.model]()
    return [model.batch(generator) for _ in range(STEPS)]


def optimizer_of(model, run):
    if run.precision == "kept_low":  # AdamW takes no gradients of another dtype than the parameter's
        return torch.optim.SGD(model.parameters(), lr=0.05)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train(model, optimizer, batches, steps, events, at=lambda moment: None):
    """Train the given steps; write losses down, and call ``at`` at each moment of the step ``COPIED_IN``."""
    for step in steps:
        called = at if step == COPIED_IN else lambda moment: None
        optimizer.zero_grad(set_to_none=False)
        called("with gradients of zeros")
        optimizer.zero_grad()
        loss = loss_of(model(batches[step], step))
        called("between forward and backward")
        loss.backward()
        called("after backward")
        events.append((f"loss of step {step}", digest(loss)))
        optimizer.step()
        called("after the step")
    return events


def final_state(model, optimizer):
    """Return everything that training changes, described."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        events = [(name, digest(value)) for name, value in model.state_dict().items()]
    for number, state in enumerate(optimizer.state_dict()["state"].values()):
        events += [(f"optimizer {number} {name}", describe(value)) for name, value in state.items()]
    return events


def check_listed(model):
    """Every attribute of a handle is listed: kept, reset or left to the copy's own steps."""
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        if unit._handle is not None:
            unknown = vars(unit._handle).keys() - KEPT - RESET - set(copying._STEP_OF_HANDLE)
            assert not unknown, f"list in flatparam/dropin/copying.py or here: {unknown}"


def never_copied(run):
    """Train with torch's handle from start to end; return the events."""
    run = dataclasses.replace(run, offload=False)  # the same numbers; torch needs a GPU to offload
    with handle_of("torch"):
        model = run.wrapped()
        check_handles(model, "torch")
        optimizer = optimizer_of(model, run)
        events = train(model, optimizer, inputs(run), range(STEPS), [])
        return events + final_state(model, optimizer)


def copied(run, moment, way):
    """Train, copy at the moment, train the original to its end, and then the copy; return the events of both."""
    by = by_pickle_optimizer_first if way == OPTIMIZER_FIRST else WAYS[way]
    with handle_of("flatparam"):
        model = run.wrapped()
        optimizer = optimizer_of(model, run)
        batches = inputs(run)
        events = []
        copies = []

        def copy_at(here):
            if here == moment:
                copies.extend(by((model, optimizer)))

        copy_at("before the first forward")
        first = range(COPIED_IN) if moment != "before the first forward" else range(0)
        train(model, optimizer, batches, first, events)
        before = list(events)
        if moment == "after evaluation":
            with torch.no_grad():
                model(batches[0], 0)
            model.eval()
            model(batches[1], 0)  # with gradients and no backward
            model.train()
            copy_at(moment)
        if moment == "inside no_sync":
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model(batches[0], 0)).backward()
                copy_at(moment)
        train(model, optimizer, batches, range(len(first), STEPS), events, copy_at)
        events += final_state(model, optimizer)
        check_listed(model)

        copied_model, copied_optimizer = copies
        check_handles(copied_model, "flatparam")
        rest = range(len(first), STEPS)
        if moment == "after the step":
            rest = range(COPIED_IN + 1, STEPS)
            before = events[: COPIED_IN + 1]
        if moment == "after backward":  # gradients are not copied, as an unsharded module's are not
            assert all(parameter.grad is None for parameter in copied_model.parameters())
        train(copied_model, copied_optimizer, batches, rest, before)
        before += final_state(copied_model, copied_optimizer)
        return events, before


def differences(run, cases):
    """Return what differs from the run that nobody copied, for each (moment, way); and how many values there were."""
    expected = never_copied(run)
    found = []
    for moment, way in cases:
        note(f"{run}: {way} {moment}")
        for who, events in zip(("original", "copy"), copied(run, moment, way), strict=True):
            assert [name for name, _ in events] == [name for name, _ in expected], (moment, way, who)
            found += [
                f"{way} {moment}, {who}: {name}\n  expected {a}\n  came     {b}"
                for (name, a), (_, b) in zip(expected, events, strict=True)
                if a != b
            ]
    return found, len(expected)


def pickled_after_two_steps(run):
    """Train two steps with our handle; return the pickled model and optimizer, and what an uncopied run gives."""
    expected = never_copied(run)
    with handle_of("flatparam"):
        model = run.wrapped()
        optimizer = optimizer_of(model, run)
        losses = train(model, optimizer, inputs(run), range(2), [])
        return pickle.dumps((model, optimizer)), losses, expected


def pickled_parameters(run, kind, way):
    """Train a step; return what is seen of the model's parameters, between steps and summoned, and of their copies."""

    def seen(params):
        return [(type(param), describe(param), getattr(param, "_fqns", None)) for param in params]

    found = []
    with handle_of(kind):
        model = run.wrapped()
        train(model, optimizer_of(model, run), inputs(run), range(1), [])
        for where in (contextlib.nullcontext(), FullyShardedDataParallel.summon_full_params(model)):
            with where:
                params = list(model.parameters())
                found += [seen(params), seen(WAYS[way](params))]
    return found


def trained_on(run, results):
    """In other processes, and without install(): load and train on; return the differences, and how many values."""
    pickled, events, expected = results[dist.get_rank()]
    groups(run)
    model, optimizer = pickle.loads(pickled)
    check_handles(model, "flatparam")
    train(model, optimizer, inputs(run), range(2, STEPS), events)
    events += final_state(model, optimizer)
    return [(a, b) for a, b in zip(expected, events, strict=True) if a != b], len(expected)
