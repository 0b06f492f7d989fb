"""Ctrl-C soon ends every wait for other ranks, and the call can be repeated: runtime, LayerZero, drop-in.

Promises:
- Ctrl-C ends a wait for other ranks within a second, in the runtime, LayerZero and the drop-in, and the interrupted
  call can be repeated
"""

import datetime
import functools
import os
import pathlib
import re
import signal
import tempfile
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gloo import handle_of, note, run_ranks, say, wait_until_said
from layer_zero_driver import State, reshard, unshard
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, load_safetensors
from flatparam.fsdp import OrderError
from flatparam.fsdp.wrapper import fully_sharded
from flatparam.layer_zero import FlatParamHandle, agree

pytestmark = pytest.mark.multiprocess

LIMIT = 20.0  # seconds that a collective of these groups may take
SOON = 8.0  # seconds from Ctrl-C to the end of a wait: 0.3, but for a busy machine


def new_group(limit=LIMIT):
    """One that cannot be used any more shall not disturb the others."""
    return dist.new_group(timeout=datetime.timedelta(seconds=limit))


def model_of(group, **kwargs):
    torch.manual_seed(0)
    return FSDP(
        nn.Sequential(*(FSDP(nn.Linear(4, 4), process_group=group, **kwargs) for _ in range(3)), nn.Linear(4, 1)),
        process_group=group,
        **kwargs,
    )


def trained(strategy="FULL_SHARD", limit=LIMIT):
    model = model_of(new_group(limit), sharding_strategy=ShardingStrategy[strategy])
    step(model)
    return model


def step(model):
    model(torch.ones(2, 4)).sum().backward()


def after_ctrl_c(call, begins=0.3):
    """Seconds from Ctrl-C, while ``call`` waits for another rank, to the KeyboardInterrupt.

    ``begins``: seconds in which it comes to wait.
    """
    pressed = []

    def press():
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(begins, press)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    return time.monotonic() - pressed[0]


def interrupted_first(call, others):
    """Rank 0 is interrupted in ``call``, and goes on; a second later the others come, to ``others``."""
    if dist.get_rank():
        wait_until_said("rank 0 was interrupted")
        time.sleep(1.0)
        others()
    else:
        after_ctrl_c(call, begins=1.0)
        say("rank 0 was interrupted")


def in_vain(waits):
    """Seconds that Ctrl-C took, by name, of those that rank 0 waits for alone; all ranks prepare them."""
    seconds = {}
    for what, wait in waits:
        note(what)
        if dist.get_rank() == 0:
            seconds[what] = after_ctrl_c(wait)
        dist.barrier()
    return seconds


def in_steps():
    model = trained()
    yield "forward", functools.partial(step, model)
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        loss = trained(strategy)(torch.ones(2, 4)).sum()
        yield f"backward of {strategy}", loss.backward


def in_constructors():
    group = new_group()
    yield "constructor", functools.partial(model_of, group)
    grid = (dist.new_group([dist.get_rank()], use_local_synchronization=True), group)
    yield "a pair of groups", functools.partial(model_of, grid, sharding_strategy=ShardingStrategy.LAYER_ZERO)
    build = functools.partial(FSDP, nn.Linear(4, 4), process_group=new_group(), sync_module_states=True)
    if dist.get_rank():
        with mock.patch.object(fully_sharded, "synchronize"):
            build()
    yield "sync_module_states", build


def in_states():
    def enter(model):
        with FSDP.summon_full_params(model):
            raise AssertionError("rank 1 has not come")

    yield "clip_grad_norm_", functools.partial(trained().clip_grad_norm_, 1.0)
    yield "state_dict", trained().state_dict
    yield "summon_full_params", functools.partial(enter, trained())
    state = model_of(new_group()).state_dict()
    yield "load_state_dict", functools.partial(trained().load_state_dict, state)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.safetensors")
        save_file(state, path)
        yield "load_safetensors", functools.partial(load_safetensors, trained(), path)


def of_the_runtime():
    return {**in_vain(in_steps()), **in_vain(in_constructors()), **in_vain(in_states())}


def test_waits_of_the_runtime():
    seconds = run_ranks(of_the_runtime, 2)[0]
    assert len(seconds) == 11
    assert max(seconds.values()) < SOON, seconds


def compared_by_torch():
    return {**in_vain(in_steps()), **in_vain(in_constructors())}


def test_waits_where_torch_compares_collectives():
    seconds = run_ranks(compared_by_torch, 2, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})[0]
    assert len(seconds) == 6
    assert max(seconds.values()) < SOON, seconds


def in_layer_zero():
    yield "constructor", functools.partial(one_handle, new_group())
    yield "agree", functools.partial(agree, [one_handle(new_group())])
    yield "unshard", functools.partial(unshard, one_handle(new_group()), State.FORWARD)
    handle = one_handle(new_group())
    unshard(handle, State.SUMMON_FULL_PARAMS)
    yield "unshard_grad", handle.unshard_grad
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return  # the reduction is the driver's, and torch waits in it
    group = new_group()
    yield "reduce-scatter", functools.partial(reduce_by_hand, one_handle(group), group, torch.ones(2), torch.ones(4))


def reduce_by_hand(handle, group, shard, whole):
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # before torch 2.13
    handle._rs_handle = reduce_scatter(shard, whole, group=group, async_op=True)
    handle.wait_reduce_scatter()


def one_handle(group, numel=4):
    torch.manual_seed(0)
    module = nn.ParameterDict({"weight": nn.Parameter(torch.randn(numel))})
    handle = FlatParamHandle(list(module.parameters()), module, torch.device("cpu"), None, None, group, group)
    handle.shard()
    handle.init_flat_param_attributes()
    handle.module = module
    return handle


def go_on_with_layer_zero():
    """The gather, and the reduction, that were given up end after all, and are waited for again."""
    group = new_group()
    handle = one_handle(group, 2**20)
    torch.manual_seed(0)
    expected = torch.randn(2**20)
    begin = functools.partial(unshard, handle, State.FORWARD)
    interrupted_first(begin, begin)
    assert handle.needs_unshard() or dist.get_rank()
    begin()
    assert torch.equal(handle.module["weight"], expected)
    reshard(handle)
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return
    shard, whole = torch.zeros(2**19), torch.arange(2.0**20)
    begin = functools.partial(reduce_by_hand, handle, group, shard, whole)
    interrupted_first(begin, begin)
    handle.wait_reduce_scatter()
    assert torch.equal(shard, 2 * whole.chunk(2)[dist.get_rank()])


def of_layer_zero():
    seconds = in_vain(in_layer_zero())
    go_on_with_layer_zero()
    return seconds


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_waits_of_layer_zero(debug):
    seconds = run_ranks(of_layer_zero, 2, environment={"TORCH_DISTRIBUTED_DEBUG": debug})[0]
    assert len(seconds) == (5 if debug == "OFF" else 4)
    assert max(seconds.values()) < SOON, seconds


def torch_model(group, numel=4, **kwargs):
    torch.manual_seed(0)
    return TorchFSDP(nn.Linear(numel, numel), process_group=group, device_id=torch.device("cpu"), **kwargs)


def in_dropin():
    def enter(model, **kwargs):
        with TorchFSDP.summon_full_params(model, **kwargs):
            raise AssertionError("rank 1 has not come")

    for orig in (False, True):
        model = torch_model(new_group(), use_orig_params=orig)
        yield f"forward, {orig}", functools.partial(step, model)
    group = new_group()
    inner = torch_model(group)
    model = TorchFSDP(nn.Sequential(nn.Linear(4, 4), inner), process_group=group, device_id=torch.device("cpu"))
    yield "backward", model(torch.ones(2, 4)).sum().backward
    yield "summon_full_params", functools.partial(enter, torch_model(new_group()))
    yield "state_dict", torch_model(new_group()).state_dict
    model = torch_model(new_group(), use_orig_params=True)
    step(model)
    yield "summon_full_params with_grads", functools.partial(enter, model, with_grads=True)


def gathers_and_fails(model, x):
    with pytest.raises(TypeError):
        model(x, "too many")


def go_on_with_the_dropin():
    """In the next forward, which begins while the gather that was given up still waits for the other rank."""
    numel = 512
    low = MixedPrecision(param_dtype=torch.bfloat16)
    for kwargs in ({}, {"use_orig_params": True}, {"mixed_precision": low}):
        note(kwargs)
        model = torch_model(new_group(), numel, **kwargs)
        x = torch.ones(2, numel)
        for _ in range(2):
            model(x).sum().backward()
            model.zero_grad()
        interrupted_first(functools.partial(model, x), functools.partial(gathers_and_fails, model, x))
        output = model(x)
        output.sum().backward()
        torch.manual_seed(0)
        plain = nn.Linear(numel, numel)
        if "mixed_precision" in kwargs:
            plain, x = plain.to(torch.bfloat16), x.to(torch.bfloat16)
        expected = plain(x)
        expected.sum().backward()
        assert torch.equal(output, expected)
        if "use_orig_params" in kwargs:
            with TorchFSDP.summon_full_params(model, with_grads=True):
                for param, value in zip(model.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(param, value)
                    assert torch.equal(param.grad, value.grad)


def of_the_dropin():
    with handle_of("flatparam"):
        seconds = in_vain(in_dropin())
        go_on_with_the_dropin()
    return seconds


def test_waits_of_the_dropin():
    seconds = run_ranks(of_the_dropin, 2)[0]
    assert len(seconds) == 6
    assert max(seconds.values()) < SOON, seconds


def small_units(min_unit_bytes):
    """The first gather of a step is that of all layers, if they are small."""
    torch.manual_seed(0)
    arguments = {"process_group": new_group(30.0), "min_unit_bytes": min_unit_bytes}
    return FSDP(nn.Sequential(*(FSDP(nn.Linear(4, 4), **arguments) for _ in range(5))), **arguments)


def go_on(make, *arguments):
    """The gather that was given up ends after all; then the model is as good as another that nobody interrupted."""
    model, other = (make(each) for each in arguments)
    for _ in range(3):
        step(model)
        step(other)
    interrupted_first(functools.partial(step, model), functools.partial(gathers_and_fails, model, torch.ones(2, 4)))
    for one in (model, other):
        one.zero_grad()
        step(one)
    for param, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad)


@pytest.mark.parametrize(
    ("make", "arguments"), [(functools.partial(trained, limit=30.0), ["FULL_SHARD"] * 2), (small_units, (2**20, 0))]
)
def test_a_model_goes_on_after_ctrl_c(make, arguments):
    run_ranks(go_on, 2, make, *arguments)


def begin_anew():
    """A forward that Ctrl-C has ended on rank 0 is called again there, while the others are in the middle of theirs."""
    model = trained()
    interrupted_first(functools.partial(step, model), lambda: None)
    begin = time.monotonic()
    with pytest.raises(OrderError) as raised:
        step(model)
    return str(raised.value), time.monotonic() - begin


def test_a_forward_called_again_after_ctrl_c_on_one_rank_is_told():
    results = run_ranks(begin_anew, 2)
    [text] = {text for text, _ in results}
    assert re.search(r"rank 0 gathers the unit of Sequential, in step 3; rank 1 gathers .*in step 2", text)
    assert max(seconds for _, seconds in results) < LIMIT / 2
