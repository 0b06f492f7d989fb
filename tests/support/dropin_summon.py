"""What users do inside ``summon_full_params``, as behaviours for ``dropin_behaviours.run_all``."""

import contextlib
import functools

import torch
from dropin_behaviours import Deep, attempt, batch
from dropin_models import Frozen, FrozenBlocks, Mlp, Tied
from dropin_state_dicts import everywhere, flags, input_of, make, offloaded, step
from recording import reshard
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

FSDP = FullyShardedDataParallel


class Stop(Exception):
    """What the user's code raises."""


def with_gradients(setting, kind):
    """Return a model after a backward, and its optimizer."""
    model, optimizer = make(setting, kind)
    model(input_of(model, 0), 1).float().square().mean().backward()
    return model, optimizer


def edit(model):
    """Change all values and gradients in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(1)
            if parameter.grad is not None:
                parameter.grad.mul_(3).sub_(1)


def train_on(recorder, label, model, optimizer):
    """Step on the gradients as they are, and once more unless they do not fit."""
    if not all(everywhere(attempt(recorder, f"{label}, a step", optimizer.step))):
        return
    optimizer.zero_grad()
    step(model, optimizer, 2)
    recorder.parameters(f"{label}, two steps later", model)


def parameters_are_summoned_with_each_flag(recorder, setting):
    kinds = (Mlp, Tied, Frozen if setting.orig else FrozenBlocks)
    for number, asked in enumerate(flags("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")):
        refused = asked["with_grads"] or (asked["writeback"] and asked["rank0_only"])
        keywords = asked if refused else offloaded(setting, asked)
        model, optimizer = with_gradients(setting, kinds[number % 3])

        def summon(model=model, keywords=keywords, asked=asked):
            with FSDP.summon_full_params(model, **keywords):
                if asked["offload_to_cpu"]:  # torch's handle does not, and has its memory elsewhere
                    for name, parameter in model.named_parameters():
                        recorder.tensor(f"{asked} {name}", parameter)
                else:
                    recorder.parameters(f"{asked} summoned", model)
                edit(model)

        taken = attempt(recorder, str(asked), summon)
        recorder.parameters(f"{asked} left", model)
        if taken:
            train_on(recorder, str(asked), model, optimizer)


def parameters_are_replaced_inside(recorder, setting):
    def assign_parameter(inner):
        inner.first.weight = nn.Parameter(inner.first.weight.detach() * 3)

    def assign_data(inner):
        inner.first.weight.data = inner.first.weight.data * 3

    def assign_gradient(inner):
        for layer in (inner.first, inner.last):
            layer.weight.grad = torch.full_like(layer.weight, 0.5)

    def drop_gradients(inner):
        inner.first.weight.grad = None
        inner.blocks[0].up.bias.grad = None

    def drop_all_gradients(inner):
        inner.zero_grad()

    for change in (assign_parameter, assign_data, assign_gradient, drop_gradients, drop_all_gradients):
        for with_grads in (False, True) if setting.orig else (False,):
            label = f"{change.__name__} with_grads={with_grads}"
            model, optimizer = with_gradients(setting, Mlp)

            def summon(model=model, change=change, with_grads=with_grads, label=label):
                with FSDP.summon_full_params(model, with_grads=with_grads):
                    change(model.module)
                    recorder.parameters(f"{label} inside", model)

            if all(everywhere(attempt(recorder, label, summon))):
                recorder.parameters(f"{label} left", model)
                train_on(recorder, label, model, optimizer)


def gradients_of_some_ranks_are_summoned(recorder, setting):
    """None on one rank, on all, or of one layer; and those that ``no_sync`` leaves unsharded."""
    if not setting.orig:
        recorder.add("torch refuses with_grads")
        return
    for label in ("none yet", "none on rank 0", "none on any", "none of one layer", "of no_sync"):
        model, optimizer = make(setting, Mlp)
        if label == "of no_sync":
            with model.no_sync():
                model(batch(), 0).square().mean().backward()
            reshard(model)
        elif label != "none yet":
            model(batch(), 0).square().mean().backward()
            if label == "none of one layer":
                model.first.zero_grad()
            elif label == "none on any" or (label == "none on rank 0" and torch.distributed.get_rank() == 0):
                model.zero_grad()

        def summon(model=model, label=label):
            with FSDP.summon_full_params(model, with_grads=True):
                recorder.parameters(f"{label} summoned", model)
                edit(model)

        if all(everywhere(attempt(recorder, label, summon))):
            recorder.parameters(f"{label} left", model)
            train_on(recorder, label, model, optimizer)


def nested_units_are_summoned(recorder, setting):
    """The whole, a unit alone, a module that is no unit; before the first forward and after it."""
    for trained in (False, True):
        for recurse in (False, True):
            for part in ("whole", "outer", "plain", "unit", "one after another"):
                label = f"trained={trained} recurse={recurse} {part}"
                torch.manual_seed(1)
                model = setting.wrap(Deep(setting), blocks=None)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
                if trained:
                    step(model, optimizer, 0)
                outer = model.outer
                parts = {"whole": [model], "outer": [outer], "plain": [outer.module], "unit": [outer.module[0]]}
                modules = parts.get(part, [outer.module[0], model, outer])
                # torch refuses to summon, and to train, a model of which a part was summoned first
                attempt(recorder, label, functools.partial(summon_each, recorder, label, model, modules, recurse))
                recorder.parameters(f"{label} left", model)
                attempt(recorder, f"{label} train", functools.partial(train_on, recorder, label, model, optimizer))


def summon_each(recorder, label, model, modules, recurse):
    for module in modules:
        with FSDP.summon_full_params(module, recurse=recurse):
            recorder.parameters(f"{label} summoned", model)
            edit(module)


def exceptions_leave_summon(recorder, setting):
    for keywords in flags("writeback", "with_grads"):
        if keywords["with_grads"] and not setting.orig:
            continue
        model, optimizer = with_gradients(setting, Mlp)
        with contextlib.suppress(Stop), FSDP.summon_full_params(model, **keywords):
            edit(model)
            recorder.parameters(f"{keywords} before it", model)
            raise Stop
        recorder.parameters(f"{keywords} after it", model)
        train_on(recorder, f"{keywords}", model, optimizer)
        with FSDP.summon_full_params(model):
            recorder.parameters(f"{keywords} summoned again", model)


def what_summon_forbids(recorder, setting):
    """Inside it: another one, a forward, a state dict, the optimizer; and it inside of a forward and a backward."""

    def again(model, optimizer):
        with FSDP.summon_full_params(model):
            pass

    def a_unit(model, optimizer):
        with FSDP.summon_full_params(model.module.blocks[0]):
            pass

    def forward(model, optimizer):
        recorder.tensor("output", model(batch(3), 0))

    def inner_forward(model, optimizer):
        recorder.tensor("inner output", model.module.first(batch(3)))

    def state_dict(model, optimizer):
        recorder.value("state", model.state_dict())

    def load_state_dict(model, optimizer):
        recorder.add("loaded", str(model.load_state_dict({n: p.clone() for n, p in model.state_dict().items()})))

    def optimizer_step(model, optimizer):
        optimizer.step()

    def clip(model, optimizer):
        recorder.tensor("norm", model.clip_grad_norm_(1.0))

    def no_sync(model, optimizer):
        with model.no_sync():
            pass

    actions = (again, a_unit, forward, inner_forward, state_dict, load_state_dict, optimizer_step, clip, no_sync)
    for action in actions:
        if action is forward and setting.strategy != "NO_SHARD":
            continue  # torch's writes a piece of the shard into the shard then; ours raises: test_reset_state.py
        model, optimizer = with_gradients(setting, Mlp)
        inside = functools.partial(act_inside, recorder, action, model, optimizer)
        left = attempt(recorder, f"{action.__name__} around", inside)
        if all(everywhere(left)):
            recorder.parameters(f"{action.__name__} left", model)
            train_on(recorder, action.__name__, model, optimizer)
    for place in ("forward", "backward"):
        model, optimizer = make(setting, Mlp)

        def hook(*_, model=model, place=place):
            attempt(recorder, f"summoned in {place}", lambda: again(model, None))

        if place == "forward":
            model.module.gain.register_forward_pre_hook(hook)
        else:
            model.module.gain.register_full_backward_hook(hook)
        attempt(recorder, f"a step with it in {place}", lambda: step(model, optimizer, 0))  # noqa: B023
        recorder.parameters(f"after it in {place}", model)


def act_inside(recorder, action, model, optimizer):
    with FSDP.summon_full_params(model):
        attempt(recorder, action.__name__, lambda: action(model, optimizer))
        recorder.parameters(f"{action.__name__} inside", model)


def summoned_between_forward_and_backward(recorder, setting):
    for writeback in (False, True):
        model, optimizer = make(setting, Mlp)
        step(model, optimizer, 0)
        loss = model(batch(1), 1).square().mean()
        with FSDP.summon_full_params(model, writeback=writeback):
            recorder.parameters(f"writeback={writeback} summoned", model)
        recorder.parameters(f"writeback={writeback} left", model)
        if all(everywhere(attempt(recorder, f"writeback={writeback} backward", loss.backward))):
            train_on(recorder, f"writeback={writeback}", model, optimizer)


BEHAVIOURS = [
    parameters_are_summoned_with_each_flag,
    parameters_are_replaced_inside,
    gradients_of_some_ranks_are_summoned,
    nested_units_are_summoned,
    exceptions_leave_summon,
    what_summon_forbids,
    summoned_between_forward_and_backward,
]
