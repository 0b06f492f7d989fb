"""Drive one handle by hand, without the wrapper and in one process, under torch's handle and under ours in turn."""

import torch
import torch.distributed as dist
from gloo import fake_world
from torch.distributed.fsdp import _flat_param
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._flat_param import HandleShardingStrategy

import flatparam

TORCHS = _flat_param.FlatParamHandle
# (strategy, use_orig_params): the four ways in which views are made
MODES = [(strategy, orig) for strategy in ("NO_SHARD", "FULL_SHARD") for orig in (True, False)]
MODE_IDS = [f"{strategy.lower()}-{'orig' if orig else 'flat'}" for strategy, orig in MODES]


def make_handle(kind, module, mode=("NO_SHARD", True), parameters=None, device="cpu", param_dtype=None):
    """Return a handle of class ``kind`` over the module's parameters, just constructed."""
    strategy, use_orig_params = mode
    return kind(
        list(module.parameters()) if parameters is None else parameters,
        module,
        torch.device(device),
        HandleShardingStrategy[strategy],
        False,
        param_dtype,
        None,
        False,
        dist.group.WORLD,
        use_orig_params,
    )


def ready_for_forward(kind, module, mode, **settings):
    """Return a handle that is unsharded as in a forward: the module's attributes are views of the flat parameter."""
    handle = make_handle(kind, module, mode, **settings)
    handle.shard()
    handle.init_flat_param_attributes()
    unshard(handle, HandleTrainingState.FORWARD)
    return handle


def unshard(handle, state):
    handle._training_state = state
    handle.pre_unshard()
    handle.unshard()
    handle.post_unshard()


def reshard(handle, state):
    handle._training_state = state
    handle.reshard(handle.uses_sharded_strategy)
    handle.post_reshard()


def outcome(call, *args):
    """Return what a call gives: its result, or the type of its error and the message."""
    try:
        return "ok", call(*args)
    except Exception as error:
        return "error", error


def under_both(scenario, *args):
    """Call ``scenario(kind, *args)`` with torch's class and with ours, on the same seed; return both outcomes."""
    outcomes = []
    for kind in (TORCHS, flatparam.FlatParamHandle):
        torch.manual_seed(11)
        with fake_world():
            outcomes.append(outcome(scenario, kind, *args))
    return outcomes


def assert_same(scenario, *args):
    """Fail unless the scenario succeeds, with equal results, under torch's handle and under ours."""
    expected, got = under_both(scenario, *args)
    for state, result in (expected, got):
        if state == "error":
            raise result
    assert got[1] == expected[1]
    return expected[1]


def assert_same_outcome(scenario, *args):
    """Fail unless the results are equal, or the errors of one type. For what torch itself may not support."""
    expected, got = under_both(scenario, *args)
    if got[0] == "error" and expected[0] == "ok":
        raise got[1]
    assert got[0] == expected[0], f"torch: {expected}\nours: {got}"
    if expected[0] == "error":
        assert isinstance(got[1], type(expected[1])), f"torch: {expected[1]!r}\nours: {got[1]!r}"
    else:
        assert got[1] == expected[1]
    return expected


def assert_both_raise(error, pattern, scenario, *args):
    """Fail unless torch and we raise ``error``, each with a message in which ``pattern`` is found."""
    for whose, (state, result) in zip(("torch", "ours"), under_both(scenario, *args), strict=True):
        assert state == "error", f"{whose}: expected {error.__name__}, got the result {result}"
        assert isinstance(result, error), f"{whose}: expected {error.__name__}, got {result!r}"
        assert pattern in str(result), f"{whose}: expected {pattern!r} in {str(result)!r}"
