"""Saving and loading of full, local and sharded state dicts, as behaviours for ``dropin_behaviours.run_all``."""

import contextlib
import itertools

import torch
import torch.distributed as dist
from dropin_behaviours import attempt, batch
from dropin_models import Frozen, FrozenBlocks, Images, Mlp, Tied
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

BATCHES = {Tied: lambda: torch.arange(12).view(3, 4) % 11, Images: lambda: torch.linspace(-1, 1, 150).view(2, 3, 5, 5)}


def flags(*names):
    """Return each combination of the flags as keywords."""
    return [dict(zip(names, values, strict=True)) for values in itertools.product((False, True), repeat=len(names))]


def offloaded(setting, keywords):
    """Keywords that torch's handle can take: it frees what it offloads of a CPU model (pytorch#188989).

    The values are those without offloading, so the oracle for ours with it is torch's without.
    """
    if setting.kind == "torch" and setting.strategy != "NO_SHARD" and keywords.get("offload_to_cpu"):
        return keywords | {"offload_to_cpu": False}
    return keywords


def input_of(model, number):
    """Return this rank's input of step ``number``."""
    return BATCHES.get(type(getattr(model, "module", model)), lambda: batch(number))()


def step(model, optimizer, number):
    """Train one step, unrecorded."""
    model(input_of(model, number), number).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def make(setting, kind, seed=1, **settings):
    torch.manual_seed(seed)
    model = setting.wrap(kind(), **settings)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def models(setting):
    return (Mlp, Tied, Images, Frozen if setting.orig else FrozenBlocks)


def changed(value):
    """Return the value of a state dict with other numbers in it."""
    if isinstance(value, torch.Tensor) and hasattr(value, "local_shards"):
        for piece in value.local_shards():
            piece.tensor.mul_(2).add_(1)
        return value
    return value * 2 + 1 if value.is_floating_point() else value


def copy_of(state):
    """A state dict that shares nothing with the model: torch's sharded pieces are views of it."""
    return {name: value.clone() for name, value in state.items()}


def save_and_load(recorder, label, setting, kind, context):
    """Save, train on, load what was saved into the model and into another one, changed too, and train on.

    ``context(model)`` sets the type of the state dict.
    """
    model, optimizer = make(setting, kind)
    step(model, optimizer, 0)
    state = {}

    def save():
        with context(model):
            state.update(model.state_dict())

    if not all(everywhere(attempt(recorder, f"{label} save", save))):
        attempt(recorder, f"{label} train after a refusal", lambda: step(model, optimizer, 1))
        recorder.parameters(f"{label} after a refusal", model)
        return
    recorder.value(f"{label} saved", state)
    recorder.parameters(f"{label} after saving", model)
    step(model, optimizer, 1)
    recorder.value(f"{label} what was saved, after another step", state)
    with context(model):
        state = copy_of(model.state_dict())
    if not all(everywhere(bool(state))):  # with rank0_only, the others get it from rank 0
        state = broadcast(state)

    other, other_optimizer = make(setting, kind, seed=2)
    if not all(everywhere(load(recorder, f"{label} into another model", other, context, state))):
        one_more(recorder, f"{label} the other model, after a refusal", other, other_optimizer)
        return
    expected, found = (full_values(m) for m in (model, other))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    one_more(recorder, f"{label} the other model", other, other_optimizer)

    load(recorder, f"{label} changed", model, context, {name: changed(value) for name, value in state.items()})
    one_more(recorder, f"{label} changed", model, optimizer)
    missing = dict(list(state.items())[1:])
    with context(model):
        attempt(recorder, f"{label} one is missing", lambda: model.load_state_dict(missing))
    with context(model):
        attempt(recorder, f"{label} one is missing, not strict", lambda: model.load_state_dict(missing, strict=False))
    with context(model):
        attempt(recorder, f"{label} one too many", lambda: model.load_state_dict(state | {"no.such": torch.ones(1)}))
    one_more(recorder, f"{label} at the end", model, optimizer)


def load(recorder, label, model, context, state):
    def call():
        with context(model):
            recorder.add(f"{label} result", str(model.load_state_dict(state)))

    taken = attempt(recorder, f"{label} load", call)
    recorder.parameters(f"{label} loaded", model)
    return taken


def one_more(recorder, label, model, optimizer):
    step(model, optimizer, 3)
    recorder.parameters(f"{label} trained on", model)


def full_values(model):
    """Return each parameter's and buffer's full value, not by way of a state dict."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {
            name: value.detach().clone()
            for name, value in itertools.chain(model.named_parameters(), model.named_buffers())
        }


def everywhere(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast(state):
    everything = [state]
    dist.broadcast_object_list(everything, src=0)
    return everything[0]


def settings_of(kind, config):
    return lambda model: FullyShardedDataParallel.state_dict_type(model, kind, config)


def state_dicts_without_a_setting(recorder, setting):
    for kind in models(setting)[1:3]:
        save_and_load(recorder, kind.__name__, setting, kind, lambda model: contextlib.nullcontext())


def full_state_dicts(recorder, setting):
    for keywords, kind in zip(flags("offload_to_cpu", "rank0_only"), models(setting), strict=True):
        config = FullStateDictConfig(**offloaded(setting, keywords))
        context = settings_of(StateDictType.FULL_STATE_DICT, config)
        save_and_load(recorder, f"{keywords} {kind.__name__}", setting, kind, context)


def sharded_state_dicts(recorder, setting):
    for keywords, kind in zip(flags("offload_to_cpu"), models(setting)[::3], strict=True):
        context = settings_of(StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(**keywords))
        save_and_load(recorder, f"{keywords} {kind.__name__}", setting, kind, context)


def local_state_dicts(recorder, setting):
    for keywords, kind in zip(flags("offload_to_cpu"), models(setting)[:2], strict=True):
        context = settings_of(StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(**keywords))
        save_and_load(recorder, f"{keywords} {kind.__name__}", setting, kind, context)


def state_dicts_of_inner_units(recorder, setting):
    """Of a unit inside the model, of an unwrapped module that holds it, and of one with other settings inside."""
    model, optimizer = make(setting, Mlp)
    step(model, optimizer, 0)
    for kind in StateDictType:
        with FullyShardedDataParallel.state_dict_type(model, kind):
            for name, module in (
                ("unit", model.module.blocks[1]),
                ("list", model.module.blocks),
                ("first", model.first),
            ):
                attempt(
                    recorder,
                    f"{kind} {name}",
                    lambda module=module, name=name: recorder.value(name, module.state_dict(prefix="p.")),
                )
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        attempt(
            recorder,
            "inner load",
            lambda: model.blocks[0].load_state_dict(
                {name: changed(v) for name, v in copy_of(model.blocks[0].state_dict()).items()}
            ),
        )
    one_more(recorder, "inner loaded", model, optimizer)


BEHAVIOURS = [
    state_dicts_without_a_setting,
    full_state_dicts,
    sharded_state_dicts,
    local_state_dicts,
    state_dicts_of_inner_units,
]
