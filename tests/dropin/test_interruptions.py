"""After an exception at any point of a step the next step is right, bit for bit.

The oracle is torch's own handle in a run that nothing interrupted. Exceptions come from every part: the model's
forward, its hooks, collectives, the handle, torch's runtime; Ctrl-C from anywhere.
"""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gloo import handle_of, run_ranks
from interrupting import (
    Bomb,
    Interrupted,
    Setting,
    batch,
    build,
    equal,
    go_on,
    interrupted_step,
    loss,
    outcomes,
    start,
    weights,
)
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

pytestmark = pytest.mark.multiprocess

BASIC = [
    Setting(strategy, orig, bf16)
    for strategy, orig, bf16 in itertools.product(
        ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), (True, False), (False, True)
    )
]
# Before torch 2.13 the functions have other names
GATHER_SINGLE = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SINGLE = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
SHARDED = [setting for setting in BASIC if setting.strategy != "NO_SHARD"]
OTHERS = [
    Setting("FULL_SHARD", True, True, accumulated="no_sync"),
    Setting("SHARD_GRAD_OP", False, True, accumulated="no_sync"),
    Setting("SHARD_GRAD_OP", True, False, accumulated="sync"),
    Setting("FULL_SHARD", False, True, accumulated="sync"),
    Setting("FULL_SHARD", True, False, accumulated="sync", steps_on=True),
    Setting("SHARD_GRAD_OP", True, True, accumulated="sync", steps_on=True, root=False),
    Setting("SHARD_GRAD_OP", True, True, root=False),
    Setting("FULL_SHARD", False, False, root=False),
    Setting("FULL_SHARD", True, True, forward_prefetch=True),
]


def assert_all_right(setting, where, first, stride, at_least):
    for found in run_ranks(outcomes, 2, setting, where, first, stride):
        assert len(found) >= at_least
        assert {phase for _, _, phase, _ in found} >= {"forward", "backward"}
        wrong = [outcome for outcome in found if outcome[3] != "right"]
        assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("setting", BASIC + OTHERS, ids=str)
def test_an_exception_anywhere_in_the_handle(setting):
    assert_all_right(setting, "handle", (BASIC + OTHERS).index(setting), 127, at_least=4)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("setting", BASIC[::3] + OTHERS[::2], ids=str)
def test_an_exception_anywhere_in_torchs_runtime(setting):
    assert_all_right(setting, "runtime", (BASIC + OTHERS).index(setting), 113, at_least=5)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("setting", BASIC[::3] + OTHERS[5:7], ids=str)
def test_an_exception_anywhere_in_the_model_and_its_hooks(setting):
    assert_all_right(setting, "user", 0, 3, at_least=5)


# What is left where nothing raised in the handle or the runtime


def _step_after_a_forward_that_has_no_backward(setting, evaluates):
    """Accumulate, run a forward that no backward follows, step, and go on; the oracle leaves that forward out."""
    results = []
    for kind, interrupted in (("torch", False), ("flatparam", True)):
        with handle_of(kind):
            model, optimizer = start(setting)
            if interrupted:
                with torch.no_grad() if evaluates else contextlib.nullcontext():
                    loss(model, 2)
            optimizer.step()
            results.append(go_on(model, optimizer))
    return equal(*results)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("evaluates", [True, False], ids=["no_grad", "grad"])
@pytest.mark.parametrize("setting", SHARDED, ids=str)
def test_weights_are_gathered_anew_after_a_step(setting, evaluates):
    """torch computes with the weights of before the step."""
    setting = Setting(setting.strategy, setting.orig, setting.bf16, accumulated="sync")
    assert run_ranks(_step_after_a_forward_that_has_no_backward, 2, setting, evaluates) == [True, True]


def _replaced_data_and_nothing_freed(settings):
    """Optimizer steps and new ``.data`` between passes, on handles that never free; the oracle is without both."""
    right = []
    for setting in settings:
        results = []
        for kind in ("torch", "flatparam"):
            with handle_of(kind):
                model, optimizer = start(setting)
                if kind == "flatparam":
                    for unit in FullyShardedDataParallel.fsdp_modules(model):
                        reshard = unit._handle.reshard
                        unit._handle.reshard = lambda free_unsharded_flat_param, reshard=reshard: reshard(False)
                for i in (5, 6):
                    loss(model, i).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if kind == "flatparam":
                        for parameter in model.parameters():
                            parameter.data = parameter.data.clone()
                results.append(go_on(model, optimizer))
        right.append(equal(*results))
    return right


def test_steps_count_where_data_was_replaced_and_nothing_is_freed():
    """What is gathered is let go of under autograd then, as the next forward begins."""
    settings = [setting for setting in SHARDED if setting.orig]
    assert run_ranks(_replaced_data_and_nothing_freed, 2, settings) == [[True] * len(settings)] * 2


def _full_weights_after_a_step(setting, evaluates):
    """Step after a forward that no backward follows: what summon_full_params and state_dict show then."""
    results = []
    for kind, interrupted in (("torch", False), ("flatparam", True)):
        with handle_of(kind):
            model, optimizer = start(setting)
            if interrupted:
                with torch.no_grad() if evaluates else contextlib.nullcontext():
                    loss(model, 2)
            optimizer.step()
            shown = weights(model)
            saved = [value.clone() for value in model.state_dict().values()]
            results.append(shown + saved + go_on(model, optimizer))
    return equal(*results)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("evaluates", [True, False], ids=["no_grad", "grad"])
@pytest.mark.parametrize("setting", SHARDED, ids=str)
def test_full_weights_are_gathered_anew_after_a_step(setting, evaluates):
    """torch shows and saves those of before the step: of the root, and with SHARD_GRAD_OP of all units."""
    setting = Setting(setting.strategy, setting.orig, setting.bf16, accumulated="sync")
    assert run_ranks(_full_weights_after_a_step, 2, setting, evaluates) == [True, True]


def _backward_after_a_step_and_a_summon(setting):
    """Step and summon between a forward and its backward: torch's gradients where it gathers again for backward."""
    results = []
    for kind in ("torch", "flatparam"):
        with handle_of(kind):
            model, optimizer = start(setting)
            value = loss(model, 2)
            optimizer.step()
            weights(model)
            value.backward()
            gradient = model.one._handle.flat_param.grad.clone()
            results.append([gradient, *go_on(model, optimizer)])
    return equal(*results)


@pytest.mark.parametrize("setting", [BASIC[0], BASIC[1]], ids=str)
def test_a_backward_after_a_step_and_a_summon(setting):
    setting = Setting(setting.strategy, setting.orig, setting.bf16, accumulated="sync", root=False)
    assert run_ranks(_backward_after_a_step_and_a_summon, 2, setting) == [True, True]


def _collectives_of_passes(kind, setting):
    """Count the all-gathers of each of several forwards."""
    with handle_of(kind):
        model, optimizer = start(setting)
        with contextlib.ExitStack() as stack:
            spies = [
                stack.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
                for name in ("all_gather", GATHER_SINGLE)
            ]
            counts = []
            for grad in (False, False, True, True):
                with torch.set_grad_enabled(grad):
                    value = loss(model, 2)
                counts.append(sum(spy.call_count for spy in spies))
            value.backward()
            optimizer.step()
            loss(model, 2).backward()
            counts.append(sum(spy.call_count for spy in spies))
    return counts


def _collectives_of_both(setting):
    return [_collectives_of_passes(kind, setting) for kind in ("torch", "flatparam")]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("setting", SHARDED[::2], ids=str)
def test_no_more_is_gathered_where_nothing_has_changed(setting):
    for torchs, ours in run_ranks(_collectives_of_both, 2, setting):
        assert ours == torchs
        assert len(set(ours)) > 1


def _stepping_optimizers_of_other_parameters(setting):
    """Whether rank 0 alone may train something else between two forwards: it must not gather alone."""
    with handle_of("flatparam"):
        model, optimizer = start(setting)
        with torch.no_grad():
            loss(model, 2)
        if dist.get_rank() == 0:
            other = nn.Linear(2, 2)
            other(torch.ones(2)).sum().backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()
        return [x.tolist() for x in go_on(model, optimizer)]


def test_steps_of_other_optimizers_do_not_count():
    first, second = run_ranks(_stepping_optimizers_of_other_parameters, 2, Setting("SHARD_GRAD_OP"), timeout=60)
    assert first == second


def _stepping_optimizers_of_other_models(setting):
    """The same where rank 0 trains a wrapped model over a group of its own, between micro-batches too."""
    results = []
    for kind in ("torch", "flatparam"):
        with handle_of(kind):
            model, optimizer = start(setting)
            alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
            other = FullyShardedDataParallel(
                nn.Linear(2, 2), process_group=alone, use_orig_params=setting.orig, device_id=torch.device("cpu")
            )
            its_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            for i in range(2):
                with model.no_sync():
                    loss(model, i).backward()
                if dist.get_rank() == 0:
                    other(torch.ones(2)).sum().backward()
                    its_optimizer.step()
            loss(model, 3).backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append([x.tolist() for x in go_on(model, optimizer)])
    return results


@pytest.mark.parametrize("orig", [True, False])
def test_steps_of_optimizers_of_other_models_do_not_count(orig):
    for torchs, ours in run_ranks(_stepping_optimizers_of_other_models, 2, Setting("SHARD_GRAD_OP", orig), timeout=60):
        assert torchs == ours


def _abandoned_forwards(setting, how_many):
    """Train on after forwards that no backward follows; the same without them is the oracle."""
    results = []
    for kind, count in (("torch", 0), ("flatparam", how_many)):
        with handle_of(kind):
            model, optimizer = start(setting)
            for i in range(count):
                loss(model, 5 + i)
            results.append(go_on(model, optimizer))
    return equal(*results)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("setting", "how_many"), [(setting, 1) for setting in BASIC if setting.bf16] + [(BASIC[1], 100)], ids=str
)
def test_gradients_are_reduced_after_a_forward_without_backward(setting, how_many):
    """In mixed precision torch reduces no gradient any more."""
    assert run_ranks(_abandoned_forwards, 2, setting, how_many) == [True, True]


def _two_forwards_in_one_backward(setting):
    results = []
    for kind in ("torch", "flatparam"):
        with handle_of(kind):
            model, optimizer = start(setting)
            if kind == "flatparam":
                loss(model, 7)  # no backward follows
            (loss(model, 5) + 2 * loss(model, 6)).backward()
            optimizer.step()
            results.append(go_on(model, optimizer))
    return equal(*results)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("setting", [setting for setting in BASIC if setting.bf16], ids=str)
def test_two_forwards_in_one_backward_after_one_without(setting):
    assert run_ranks(_two_forwards_in_one_backward, 2, setting) == [True, True]


def _cleared_after_no_sync(setting):
    """Gradients of a synchronised and an unsynchronised backward, cleared: nothing of them may come back."""
    results = []
    for kind, extra in (("torch", False), ("flatparam", True)):
        with handle_of(kind):
            model, optimizer = start(setting)
            if extra:
                loss(model, 5).backward()
                with model.no_sync():
                    loss(model, 6).backward()
            results.append(go_on(model, optimizer))
    return equal(*results)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("setting", [setting for setting in SHARDED if setting.orig], ids=str)
def test_cleared_gradients_do_not_come_back(setting):
    """With torch those of the synchronised backward do."""
    assert run_ranks(_cleared_after_no_sync, 2, setting) == [True, True]


# Interrupted outside of a step


@contextlib.contextmanager
def _failing_collective(name, at_call=1):
    """Have ``dist.name`` raise when it is called for the ``at_call``-th time; on all ranks alike."""
    calls = itertools.count(1)
    real = getattr(dist, name)

    def maybe_fail(*args, **kwargs):
        if next(calls) == at_call:
            raise Interrupted(name)
        return real(*args, **kwargs)

    with mock.patch.object(dist, name, maybe_fail):
        yield


def _failing_summon(setting, name, at_call, grads):
    """Fail in a collective of summon_full_params; what it shows later, and the gradients, are as if it had not been."""
    results = []
    for kind in ("torch", "flatparam"):
        with handle_of(kind):
            model, optimizer = start(setting)
            loss(model, 5).backward()
            if kind == "flatparam":
                with (
                    pytest.raises(Interrupted),
                    _failing_collective(name, at_call),
                    FullyShardedDataParallel.summon_full_params(model, with_grads=grads),
                ):
                    raise AssertionError("expected the collective to fail")
            with FullyShardedDataParallel.summon_full_params(model, with_grads=grads):
                seen = [parameter.detach().clone() for parameter in model.parameters()]
                if grads:
                    seen += [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            results.append(seen + go_on(model, optimizer))
    return equal(*results)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("setting", "name", "at_call"),
    [(setting, "all_gather", 1 + 2 * (i % 2)) for i, setting in enumerate(SHARDED)]
    + [(setting, name, 2) for setting in SHARDED if setting.orig for name in (GATHER_SINGLE, "all_reduce")],
    ids=str,
)
def test_summon_full_params_works_after_one_that_failed(setting, name, at_call):
    """torch then takes the sharded parameters for full ones."""
    grads = name != "all_gather"
    assert run_ranks(_failing_summon, 2, setting, name, at_call, grads) == [True, True]


def _failing_collective_in_a_step(setting, name, at_call):
    results = []
    for kind in ("torch", "flatparam"):
        with handle_of(kind):
            model, optimizer = start(setting)
            if kind == "flatparam":
                with pytest.raises(Interrupted), _failing_collective(name, at_call):
                    loss(model, 2).backward()
            results.append(go_on(model, optimizer))
    return equal(*results)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("setting", "name", "at_call"),
    [(setting, *call) for setting in SHARDED for call in (("all_gather", 2), (REDUCE_SINGLE, 2))]
    + [(setting, "all_reduce", 2) for setting in BASIC if setting.strategy == "NO_SHARD"],
    ids=str,
)
def test_a_collective_that_fails(setting, name, at_call):
    assert run_ranks(_failing_collective_in_a_step, 2, setting, name, at_call) == [True, True]


def _replaced_parameter(setting):
    """A parameter that was replaced just before the step that is interrupted in its writeback has its new value."""
    with handle_of("flatparam"):
        model, _ = start(setting)
        parameters = dict(model.named_parameters())
        new = {name: torch.full_like(parameter, 0.5) for name, parameter in parameters.items()}
        for name, value in new.items():
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, nn.Parameter(value))
        handle = type(model._handle)
        with pytest.raises(Interrupted), mock.patch.object(handle, "_writeback_tensor", side_effect=Interrupted):
            loss(model, 2)
        with torch.no_grad():
            loss(model, 2)
        return all(bool((weight == 0.5).all()) for weight in weights(model))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("setting", [setting for setting in SHARDED if setting.orig], ids=str)
def test_a_replaced_parameter_keeps_its_value(setting):
    assert run_ranks(_replaced_parameter, 2, setting) == [True, True]


def _data_after_a_forward_that_raises(setting):
    """Set on the parameters, as a program does that goes back to weights it has kept; the next forward has them."""
    with handle_of("flatparam"):
        model, _ = start(setting)
        parameters = list(model.parameters())
        hook = model.module.one.module.a.register_forward_hook(mock.Mock(side_effect=Interrupted))
        with pytest.raises(Interrupted):
            loss(model, 2)
        hook.remove()
        for parameter in parameters:
            parameter.data = torch.full_like(parameter.data, 0.5)
        with torch.no_grad():
            loss(model, 2)
        return all(bool((weight == 0.5).all()) for weight in weights(model))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("setting", [setting for setting in BASIC if setting.orig], ids=str)
def test_data_that_were_set_after_a_forward_that_raises(setting):
    assert run_ranks(_data_after_a_forward_that_raises, 2, setting) == [True, True]


def _full_weights_after_an_interruption(setting, phase):
    """What docs/dropin-interruptions.md says to do before saving a checkpoint: a forward in no_grad."""
    with handle_of("flatparam"):
        model, _ = start(setting)
        before = weights(model)
        handle = type(model._handle)
        name = "unshard" if phase == "forward" else "prepare_gradient_for_backward"
        with pytest.raises(KeyboardInterrupt), mock.patch.object(handle, name, side_effect=KeyboardInterrupt):
            loss(model, 2).backward()
        with pytest.raises(AssertionError, match="forward/backward"):
            weights(model)
        with torch.no_grad():
            model(batch(2))
        return equal(before, weights(model))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("setting", BASIC, ids=str)
def test_weights_can_be_saved_after_a_forward(setting, phase):
    assert run_ranks(_full_weights_after_an_interruption, 2, setting, phase) == [True, True]


def test_the_bomb_goes_off_where_it_was_put():
    """The tests above would prove nothing if it did not."""
    assert run_ranks(_bombs, 2) == [True, True]


def _bombs():
    with handle_of("flatparam"):
        model = build(Setting())
        listing = Bomb([__file__, interrupted_step.__code__.co_filename])
        assert interrupted_step(model, listing) == "done"
        place = next(place for place in reversed(listing.places) if place[1] == "_user_hook")
        bomb = Bomb(listing.files, place)
        return interrupted_step(build(Setting()), bomb) == "backward" and bomb.exploded
