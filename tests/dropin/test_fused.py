"""Steps by few calls (flatparam/dropin/gathering.py) against the same steps one by one, and the two mixed at random."""

import os
import random
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from gloo import fake_world
from one_handle import assert_both_raise, assert_same, make_handle, reshard, unshard
from patching import MODES, train
from recording import first_difference
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.overrides import TorchFunctionMode

import flatparam
from flatparam.dropin import gathering

FORWARD, BACKWARD_PRE = HandleTrainingState.FORWARD, HandleTrainingState.BACKWARD_PRE
BACKWARD_POST = HandleTrainingState.BACKWARD_POST
STEPS = ("needs_unshard", "_get_padded_unsharded_flat_param", "_use_unsharded_flat_param", "_use_sharded_flat_param")

both = pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
MIXED = [*MODES, ("FULL_SHARD", False, "fp32"), ("FULL_SHARD", True, "bf16"), ("SHARD_GRAD_OP", False, "fp32")]


class Flipping:
    """True or false by chance, each time it is asked."""

    def __init__(self, seed):
        self.source = random.Random(seed)
        self.answers = set()

    def __bool__(self):
        answer = self.source.random() < 0.5
        self.answers.add(answer)
        return answer


def calls_in(run):
    """Run and return how often the fused steps did what was asked of them, and what run returned."""
    count = 0

    def note(frame, event, answer):
        nonlocal count
        if event == "return" and frame.f_code.co_name in ("_unshard_fused", "_reshard_fused") and answer:
            count += 1

    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return count, result


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", MIXED, ids=["-".join(map(str, mode)) for mode in MIXED])
def test_training_is_the_same_with_and_without(mode, monkeypatch):
    expected = train("torch", mode, {}, "class")
    monkeypatch.setattr(gathering, "fast_path_is_on", True)
    count, events = calls_in(lambda: train("flatparam", mode, {}, "class"))
    assert first_difference(expected, events) is None
    assert (count > 0) == (mode[0] != "NO_SHARD")
    monkeypatch.setattr(gathering, "fast_path_is_on", False)
    count, events = calls_in(lambda: train("flatparam", mode, {}, "class"))
    assert first_difference(expected, events) is None
    assert count == 0
    for seed in range(6):
        flipping = Flipping(seed)
        monkeypatch.setattr(gathering, "fast_path_is_on", flipping)
        assert first_difference(expected, train("flatparam", mode, {}, "class")) is None
        assert flipping.answers == {True, False}


@pytest.mark.thorough
@pytest.mark.multiprocess
def test_the_environment_turns_it_off():
    for value, expected in (("0", "False"), ("1", "True")):
        done = subprocess.run(
            [sys.executable, "-c", "import flatparam.dropin.gathering as g; print(g.fast_path_is_on)"],
            env={**os.environ, "FLATPARAM_FUSED": value},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected


def ready(kind, orig):
    """Return a handle that is sharded, as between two steps."""
    torch.manual_seed(5)
    handle = make_handle(kind, torch.nn.Linear(3, 5), ("FULL_SHARD", orig))
    handle.shard()
    handle.init_flat_param_attributes()
    return handle


@both
def test_memory_that_is_not_all_of_its_storage_is_not_freed(orig):
    """A user keeps the unsharded parameters of several units in one pool."""

    def scenario(kind):
        handle = ready(kind, orig)
        numel = handle.flat_param._full_param_padded.numel()
        pool.append(torch.zeros(2 * numel))
        handle.flat_param._full_param_padded = pool[-1][numel:]
        reshard(handle, FORWARD)

    pool = []
    assert_both_raise(AssertionError, "sole occupant", scenario)
    assert [tensor.untyped_storage().size() for tensor in pool] == [4 * tensor.numel() for tensor in pool]


@both
def test_a_storage_of_another_size_is_an_error_that_says_of_which_unit(orig):
    def scenario(kind):
        handle = ready(kind, orig)
        handle.flat_param._full_param_padded.untyped_storage().resize_(4)
        unshard(handle, FORWARD)

    assert_both_raise(AssertionError, "storage to be freed", scenario)
    with fake_world(), pytest.raises(AssertionError, match="weight, bias"):
        scenario(flatparam.FlatParamHandle)


@both
def test_what_is_gathered_into_may_move_in_its_storage(orig):
    """The oracle is torch's handle, which makes the chunks anew each time."""

    def scenario(kind):
        handle = ready(kind, orig)
        padded = handle.flat_param._full_param_padded
        numel = padded.numel()
        pool, seen = torch.zeros(4 * numel), []
        for place in (pool[:numel], pool[numel : 2 * numel], pool[::4], pool.double()[:numel], pool[:numel]):
            padded.data = place
            pool.zero_()
            handle._training_state = FORWARD
            try:
                handle._all_gather_flat_param(padded)
            except (RuntimeError, ValueError) as error:
                seen.append(type(error).__name__)
            seen.append(padded.tolist())
        return seen

    assert any(assert_same(scenario)[1])


class Marked(torch.Tensor):
    """What a mode gives for chunks."""


class Marking(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return [chunk.as_subclass(Marked) for chunk in result] if func.__name__ == "chunk" else result


@both
def test_chunks_made_under_a_mode_are_not_kept(orig, monkeypatch):
    def scenario(kind):
        seen, all_gather = [], dist.all_gather

        def watched(chunks, shard, **settings):
            seen.extend(type(chunk).__name__ for chunk in chunks)
            return all_gather(chunks, shard, **settings)

        handle = ready(kind, orig)
        padded = handle.flat_param._full_param_padded = torch.zeros(handle.flat_param.numel())
        with monkeypatch.context() as patch:
            patch.setattr(dist, "all_gather", watched)
            with Marking():
                handle._all_gather_flat_param(padded)
            handle._all_gather_flat_param(padded)
        return seen

    assert assert_same(scenario) == ["Marked", "Tensor"]


@both
def test_a_subclass_may_answer_for_its_methods(orig):
    """As users trace: every method that torch's handle looks up is seen."""

    def scenario(kind):
        class Tracing(kind):
            def __getattribute__(self, name):
                seen.append(name)
                return super().__getattribute__(name)

        seen = []
        handle = ready(Tracing, orig)
        for before, after in ((FORWARD, FORWARD), (BACKWARD_PRE, BACKWARD_POST)):
            unshard(handle, before)
            reshard(handle, after)
        return {name: seen.count(name) for name in STEPS}

    assert min(assert_same(scenario).values()) > 0
