"""Saving and loading of optimizers' states in every form, as behaviours for ``dropin_behaviours.run_all``."""

import contextlib
import copy
import dataclasses
import functools

import torch
import torch.distributed as dist
from dropin_behaviours import attempt
from dropin_models import Frozen, FrozenBlocks, Mlp, Tied
from dropin_state_dicts import everywhere, flags, full_values, input_of, step
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    _optim_utils,
)

FSDP = FullyShardedDataParallel


@dataclasses.dataclass(frozen=True)
class Case:
    """What is optimized, and how far it is trained before its state is saved."""

    model: type
    adam: bool
    groups: int = 1
    steps: int = 2

    def make(self, setting, seed=1):
        torch.manual_seed(seed)
        model = setting.wrap(self.model())
        return model, self.optimizer(model.parameters())

    def optimizer(self, parameters):
        parameters = list(parameters)
        groups = [{"params": parameters[n :: self.groups], "lr": 0.02 * (n + 1)} for n in range(self.groups)]
        return torch.optim.Adam(groups) if self.adam else torch.optim.SGD(groups, momentum=0.9)

    def __str__(self):
        return f"{self.model.__name__} {'adam' if self.adam else 'sgd'} {self.groups} groups {self.steps} steps"


def cases(setting):
    frozen = Frozen if setting.orig else FrozenBlocks
    return (Case(Mlp, True, groups=2), Case(Tied, False), Case(frozen, True, groups=2), Case(Mlp, True, steps=0))


@contextlib.contextmanager
def repaired(kind):
    """Mend, for torch's handle, what flatparam mends: on a CPU all states of a unit are views of one buffer."""
    original = _optim_utils._unflatten_orig_param_states

    def with_memory_of_its_own(info, states, name, *rest):
        for state in states.values():
            state[name] = state[name].clone()
        return original(info, states, name, *rest)

    if kind == "torch":
        _optim_utils._unflatten_orig_param_states = with_memory_of_its_own
    try:
        yield
    finally:
        if kind == "torch":
            _optim_utils._unflatten_orig_param_states = original


def save_and_load(recorder, setting, save, load, chosen=slice(None)):
    """Save each case's state, load it beside a copy of the model, and let both train on: they stay equal."""
    with repaired(setting.kind):
        for case in cases(setting)[chosen]:
            save_and_load_one(recorder, setting, case, save, load)


def save_and_load_one(recorder, setting, case, save, load):
    model, optimizer = case.make(setting)
    for number in range(case.steps):
        step(model, optimizer, number)
    saved = {}
    saving = functools.partial(_update, saved, save, model, optimizer)
    if not all(everywhere(attempt(recorder, f"{case} save", saving))):
        return
    recorder.value(f"{case} saved", saved)
    other, other_optimizer = case.make(setting, seed=2)
    copy_values(model, other)

    def into_the_other(saved=saved, case=case, other=other, other_optimizer=other_optimizer):
        shard = load(saved, other, other_optimizer)
        recorder.value(f"{case} to load", shard)
        other_optimizer.load_state_dict(copy.deepcopy(shard))  # what is saved may be the optimizer's own tensors

    if all(everywhere(attempt(recorder, f"{case} load", into_the_other))):
        recorder.value(f"{case} loaded", other_optimizer.state_dict())
        for each in ((model, optimizer), (other, other_optimizer)):
            step(*each, case.steps)
        check_equal(full_values(model), full_values(other), case)
    recorder.parameters(f"{case} trained on", other)


def _update(saved, save, *args):
    saved.update(save(*args))


def copy_values(model, other):
    """Give ``other`` the values of ``model``, whether it is wrapped or not."""
    values = full_values(model)
    with FSDP.summon_full_params(other), torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(values[name])


def check_equal(expected, found, case=None):
    assert expected.keys() == found.keys()
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different, f"{case}: {different} differ"


def full_optimizer_states(recorder, setting):
    save_and_load(
        recorder,
        setting,
        lambda model, optimizer: FSDP.full_optim_state_dict(model, optimizer, rank0_only=False),
        lambda state, model, optimizer: FSDP.shard_full_optim_state_dict(state, model, optim=optimizer),
        slice(0, None, 2),
    )


def optimizer_states_of_optim_input(recorder, setting):
    """With the deprecated argument, which torch still takes."""

    def groups_of(model, optimizer):
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        return groups if len(groups) > 1 else list(model.parameters())

    save_and_load(
        recorder,
        setting,
        lambda model, optimizer: FSDP.full_optim_state_dict(model, optimizer, groups_of(model, optimizer), False),
        lambda state, model, optimizer: FSDP.shard_full_optim_state_dict(state, model, groups_of(model, optimizer)),
        slice(1, None, 2),
    )


def scattered_optimizer_states(recorder, setting):
    save_and_load(
        recorder,
        setting,
        FSDP.full_optim_state_dict,  # on rank 0 only
        lambda state, model, optimizer: FSDP.scatter_full_optim_state_dict(state, model, optim=optimizer),
        slice(0, 2),
    )


def sharded_optimizer_states(recorder, setting):
    save_and_load(
        recorder, setting, FSDP.sharded_optim_state_dict, FSDP.flatten_sharded_optim_state_dict, slice(2, None)
    )


def optimizer_states_by_type(recorder, setting):
    """``optim_state_dict`` and ``optim_state_dict_to_load`` under each type of state dict and each of its settings."""
    full = [
        (StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(**keywords))
        for keywords in flags("offload_to_cpu", "rank0_only")
    ]
    sharded = [
        (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig(**keywords))
        for keywords in flags("offload_to_cpu")
    ]
    local = (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(), LocalOptimStateDictConfig())
    for number, settings in enumerate((*full, *sharded, local)):

        def save(model, optimizer, settings=settings):
            with FSDP.state_dict_type(model, *settings):
                return FSDP.optim_state_dict(model, optimizer)

        def load(state, model, optimizer, settings=settings, directly=bool(number % 2)):
            with FSDP.state_dict_type(model, *settings):
                return FSDP.optim_state_dict_to_load(model, optimizer, state, load_directly=directly)

        recorder.add(str(settings))
        save_and_load(recorder, setting, save, load, slice(number % 4, number % 4 + 1))


def optimizer_states_of_unsharded_models(recorder, setting):
    """By name and by number: from a wrapped model to an unsharded one, and back. All of them train alike."""
    with repaired(setting.kind):
        for case in cases(setting)[:2]:
            by_number_and_by_name(recorder, setting, case)


def by_number_and_by_name(recorder, setting, case):
    model, optimizer = case.make(setting)
    for number in range(case.steps):
        step(model, optimizer, number)
    plain = case.model()
    copy_values(model, plain)
    plain_optimizer = case.optimizer(plain.parameters())
    named = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    numbered = FSDP.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, plain, optim=plain_optimizer)
    recorder.value(f"{case} by number", numbered)
    attempt(
        recorder,
        "the same again",
        functools.partial(FSDP.rekey_optim_state_dict, numbered, OptimStateKeyType.PARAM_ID, plain),
    )
    if setting.orig:  # else the wrapped model's groups are of whole units
        restore(plain_optimizer, numbered)
        step(model, optimizer, case.steps)
        plain_step(plain, plain_optimizer, case.steps)
        check_equal(full_values(model), full_values(plain))
    else:
        plain_step(plain, plain_optimizer, case.steps)
    renamed = FSDP.rekey_optim_state_dict(
        copy.deepcopy(plain_optimizer.state_dict()), OptimStateKeyType.PARAM_NAME, plain, optim=plain_optimizer
    )
    recorder.value(f"{case} by name", renamed)
    other, other_optimizer = case.make(setting, seed=2)
    copy_values(plain, other)
    if setting.orig or case.groups == 1:
        other_optimizer.load_state_dict(FSDP.shard_full_optim_state_dict(renamed, other, optim=other_optimizer))
        step(other, other_optimizer, case.steps + 1)
        plain_step(plain, plain_optimizer, case.steps + 1)
        check_equal(full_values(plain), full_values(other))
        recorder.parameters(f"{case} trained on", other)


def restore(optimizer, state):
    optimizer.load_state_dict(copy.deepcopy(state))


def plain_step(plain, optimizer, number):
    """What ``step`` does on all ranks, with the unsharded module: the ranks' gradients are averaged."""
    own = dist.get_rank()
    optimizer.zero_grad()
    output = plain(input_of(plain, number), number)
    output.float().square().mean().backward()
    for parameter in plain.parameters():
        if parameter.grad is not None:
            gradients = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(gradients, parameter.grad)
            assert torch.equal(gradients[own], parameter.grad)
            parameter.grad = sum(gradient / len(gradients) for gradient in gradients)
    optimizer.step()
    optimizer.zero_grad()


BEHAVIOURS = [
    full_optimizer_states,
    optimizer_states_of_optim_input,
    scattered_optimizer_states,
    sharded_optimizer_states,
    optimizer_states_by_type,
    optimizer_states_of_unsharded_models,
]
