"""CPU offloading on a CPU trains as the same model without offloading, and looks as with torch's handle.

With torch's own handle only the first step of an offloaded model on a CPU is right, so the oracle of the others is
torch's handle without offloading: the same numbers, since nothing moves. The first step is compared in everything.
A plan is a word: s is a pass, n a pass in no_sync(), z zero_grad(), u an update, c clipping, d a state dict saved
and loaded, e an evaluation, f a summon that edits, a all gradients set to a number, o one of them, h all halved.
"""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from dropin_behaviours import Setting, attempt, batch, one_pass, run_all
from dropin_models import Frozen, FrozenBlocks, Mlp, Tied
from dropin_optim_states import repaired
from dropin_state_dicts import changed, flags, full_values, input_of
from gloo import run_both
from recording import Recorder, describe, first_difference
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

pytestmark = pytest.mark.multiprocess

PLANS = ("zsuzsuzsu", "zssuzsu", "znsuznnsu", "zscuzncscu", "zsduzsdsu", "ezsufezsu", "snsuzsusnsu")
SET = ("zasuzasuzasu", "zshsuzshsu", "zosuzosuzsu")  # with gradients that the user sets
SETTINGS = [(strategy, orig) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD") for orig in (True, False)]


def offloaded_or_not(kind, plan, strategy, orig):
    """Train a plan, with our handle offloaded and with torch's not; return the values that a user sees."""
    number, recorder = (*PLANS, *SET).index(plan), Recorder()
    model = (Mlp, Tied, Frozen if orig else FrozenBlocks)[number % 3]
    follow(recorder, Setting(kind, strategy, orig), model, plan, adam=number % 2 == 0, to_none=number % 4 < 2)
    return recorder.events


def follow(recorder, setting, kind, plan, adam, to_none):
    torch.manual_seed(1)
    model = setting.wrap(kind(), cpu_offload=CPUOffload(offload_params=setting.kind == "flatparam"))
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters) if adam else torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    for number, move in enumerate(plan):
        label = f"{number} {move}"
        if move in "sn":
            with model.no_sync() if move == "n" else contextlib.nullcontext():
                output = model(input_of(model, number), number)
                recorder.tensor(f"{label} output", output)
                output.square().mean().backward()
        elif move == "z":
            optimizer.zero_grad(set_to_none=to_none)
        elif move in "aoh":
            for param in parameters[:1] if move == "o" else parameters:
                if param.requires_grad and (move != "h" or param.grad is not None):
                    param.grad = param.grad * 0.5 if move == "h" else torch.full_like(param, 0.25)
        elif move == "u":
            optimizer.step()
        elif move == "c":
            recorder.tensor(f"{label} norm", model.clip_grad_norm_(0.05))
        elif move == "d":
            saved = {name: value.clone() for name, value in model.state_dict().items()}
            recorder.value(label, saved)
            model.load_state_dict({name: changed(value) for name, value in saved.items()})
        elif move == "e":
            with torch.no_grad():
                recorder.tensor(label, model(input_of(model, number), number))
        else:
            with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.5)
        for name, parameter in model.named_parameters():
            recorder.add(f"{label} {name}", *describe(parameter))
            recorder.add(f"{label} {name}.grad", *describe(parameter.grad))
    for name, value in full_values(model).items():
        recorder.tensor(f"at the end {name}", value)


def the_first_step(recorder, setting):
    """States before and after the first step of an offloaded model, and summoned parameters."""
    with what_torch_lacks() if setting.kind == "torch" else contextlib.nullcontext(), repaired(setting.kind):
        look_at_the_first_step(recorder, setting)


@contextlib.contextmanager
def what_torch_lacks():
    """Its handle pins memory without a device, and its runtime waits for a stream of the CPU, which cannot be."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", torch.Tensor.clone))
        if not hasattr(torch.cpu.Stream, "synchronize"):
            stack.enter_context(mock.patch.object(torch.cpu.Stream, "synchronize", mock.Mock(), create=True))
        yield


def look_at_the_first_step(recorder, setting):
    for kind in (Mlp,) if setting.orig else (Mlp, FrozenBlocks):  # torch shows gradients of what has none: not Frozen
        torch.manual_seed(1)
        model = setting.wrap(kind(), cpu_offload=CPUOffload(offload_params=True))
        optimizer = torch.optim.Adam(model.parameters())
        recorder.parameters("wrapped", model)
        recorder.watch(model)
        save(recorder, "before the first step", model, optimizer)
        with torch.no_grad():
            recorder.tensor("evaluation", model(batch(1), 1))
        one_pass(recorder, model, 0)
        optimizer.step()
        recorder.parameters("after the first step", model)
        save(recorder, "after the first step", model, optimizer)
        for keywords in flags("recurse", "writeback", "with_grads"):

            def summon(model=model, keywords=keywords):
                with FullyShardedDataParallel.summon_full_params(model, **keywords):
                    recorder.parameters(f"{keywords} summoned", model)
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.mul_(2)

            attempt(recorder, str(keywords), summon)
            recorder.parameters(f"{keywords} left", model)


def save(recorder, label, model, optimizer):
    for kind in StateDictType:
        with FullyShardedDataParallel.state_dict_type(model, kind):
            attempt(recorder, f"{label} {kind}", functools.partial(save_and_load, recorder, label, model))
    configs = FullStateDictConfig(), FullOptimStateDictConfig()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        recorder.value(f"{label} optimizer", FullyShardedDataParallel.optim_state_dict(model, optimizer))


def save_and_load(recorder, label, model):
    state = model.state_dict()
    recorder.value(label, state)
    recorder.add(label, str(model.load_state_dict({name: value.clone() for name, value in state.items()})))


def first_step(kind, strategy, orig):
    [events] = run_all(kind, [the_first_step], [(strategy, orig)]).values()
    return events


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("strategy", "orig"), SETTINGS, ids=lambda value: str(value).lower())
@pytest.mark.parametrize("plan", [*PLANS, *SET, "the_first_step"])
def test_offloads(plan, strategy, orig):
    call = (first_step,) if plan == "the_first_step" else (offloaded_or_not, plan)
    for rank, (expected, got) in enumerate(run_both(call[0], 2, *call[1:], strategy, orig)):
        for whose, events in (("torch", expected), ("ours", got)):
            raised = [values[0] for label, values in events if label == "raised"]
            assert not raised, f"rank {rank}, {whose}: {raised[0]}"
        difference = first_difference(expected, got)
        assert difference is None, f"rank {rank}: {difference}"
        assert len(expected) > 50


def beside_a_device(kind, orig):
    """The device is the host under a name that copies to it take for another: is each flat parameter where it was?"""
    with what_torch_lacks():
        torch.manual_seed(1)
        model = Setting(kind, "NO_SHARD", orig).wrap(Mlp(), cpu_offload=CPUOffload(offload_params=True))
        handles = [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._handle]
        with torch.no_grad():
            model(input_of(model, 0), 0)  # pins the shards
        was_at = [handle.flat_param.data_ptr() for handle in handles]
        for handle in handles:
            handle.device = torch.device("cpu", 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        seen = []
        with mock.patch.object(type(handles[0]), "_check_on_compute_device"):
            for number in range(3):
                loss = model(input_of(model, number), number).square().mean()
                seen.append([handle.flat_param.data_ptr() for handle in handles] == was_at)
                loss.backward()
                seen.append([handle.flat_param.data_ptr() for handle in handles] == was_at)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
        return seen


@pytest.mark.parametrize("orig", [False, True])
def test_shards_stay_on_the_host(orig):
    for expected, got in run_both(beside_a_device, 2, orig):
        assert expected[:2] == [True, True]
        assert got == expected
