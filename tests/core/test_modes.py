"""A mode of torch's that watches or changes calls, a default device among them, changes no result of training."""

import contextlib

import pytest
import torch
from gloo import both_handles, note, run_ranks
from torch import nn
from torch.distributed import fsdp
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import flatparam

pytestmark = pytest.mark.multiprocess

MODES = {
    "none": contextlib.nullcontext,
    "device": lambda: torch.device("cpu"),
    "function": BaseTorchFunctionMode,
    "flops": lambda: FlopCounterMode(display=False),
}


def train(wrap, mode, around):
    """Three steps, of which the second, or the whole life of the model, is under a mode; the losses and weights."""
    with MODES[mode]() if around == "all" else contextlib.nullcontext():
        torch.manual_seed(3)
        model = wrap(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            with MODES[mode]() if around == "a step" and step == 1 else contextlib.nullcontext():
                loss = model(torch.full((2, 4), step + 1.0)).pow(2).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            return losses, model(torch.ones(1, 4)).tolist()


def on_the_dropin(kind, orig):
    def wrap(module):
        low = fsdp.MixedPrecision(param_dtype=torch.bfloat16)
        cpu = torch.device("cpu")
        return fsdp.FullyShardedDataParallel(module, device_id=cpu, use_orig_params=orig, mixed_precision=low)

    return every(wrap)


def on_the_runtime(orig):
    return every(lambda module: flatparam.FullyShardedDataParallel(module, use_orig_params=orig))


def every(wrap):
    found = {}
    for mode in MODES:
        for around in ("a step", "all"):
            note(f"{mode} around {around}")
            found[mode, around] = train(wrap, mode, around)
    return found


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_the_dropin_trains_as_torchs_handle_under_a_mode(orig):
    for torchs, ours in run_ranks(both_handles, 2, on_the_dropin, orig):
        assert ours == torchs


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_the_runtime_trains_the_same_under_a_mode(orig):
    for found in run_ranks(on_the_runtime, 2, orig):
        expected = found["none", "all"]
        assert {key: value == expected for key, value in found.items()} == dict.fromkeys(found, True)
