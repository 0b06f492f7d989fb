"""Uses of a wrapped model beyond training have, bit for bit, the results that they have with torch's handle."""

import copy
import warnings

import pytest
import torch
from dropin_behaviours import BEHAVIOURS, SETTINGS, Setting, run_all
from gloo import fake_world, handle_of, run_both
from recording import first_difference
from torch import nn

pytestmark = pytest.mark.multiprocess


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("strategy", "orig"), SETTINGS, ids=lambda value: str(value).lower())
@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.__name__)
def test_behaves_as_with_torchs_handle(behaviour, strategy, orig):
    name = f"{behaviour.__name__}-{strategy.lower()}-{'orig' if orig else 'flat'}"
    for rank, (expected, got) in enumerate(run_both(run_all, 2, [behaviour], [(strategy, orig)])):
        for whose, events in (("torch", expected[name]), ("ours", got[name])):
            raised = [values[0] for label, values in events if label == "raised"]
            assert not raised, f"rank {rank}, {whose}: {raised[0]}"
        difference = first_difference(expected[name], got[name])
        assert difference is None, f"rank {rank}: {difference}"
        assert expected[name]


CHANGES = {
    "another Parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(layer.weight.numel() + 3))),
    "other data": lambda layer: setattr(layer.weight, "data", torch.randn(layer.weight.numel() + 3)),
    "two dimensions": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(2, layer.weight.numel() + 1))),
}


@pytest.mark.parametrize(("strategy", "orig"), [setting for setting in SETTINGS if setting[1]])
@pytest.mark.parametrize("change", CHANGES)
def test_a_resized_parameter_is_refused_by_name(change, strategy, orig):
    """In the world of one process: on a rank that has none of the parameter torch sees nothing, and would wait."""
    for kind in ("torch", "flatparam"):
        with fake_world(2, 0), handle_of(kind):
            model = Setting(kind, strategy, orig).wrap(nn.Linear(5, 3), blocks=None)
            CHANGES[change](model.module)
            with pytest.raises(RuntimeError, match="Cannot writeback when the parameter shape changes") as caught:
                model(torch.randn(2, 5))
            assert ("`weight`" in str(caught.value)) == (kind == "flatparam")


def test_the_parameters_outlive_a_gradient_penalty():
    """torch takes forward's views, left in the modules by autograd.grad, for parameters, and has none from then on."""
    plain = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    with fake_world(1), handle_of("flatparam"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank: NO_SHARD is used
        model = Setting("flatparam", "NO_SHARD", True).wrap(copy.deepcopy(plain), blocks=None)
        parameters = list(model.parameters())
        for step in range(3):
            x = batch_for_penalty(step)
            plain.zero_grad()
            model.zero_grad()
            gradients = []
            for module in (plain, model):
                output = module(x)
                (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
                gradients.append(slope)
                (output.sum() + slope.square().sum()).backward()
            assert torch.equal(*gradients)
            found = model._handle._get_unflat_views(model._handle.flat_param.grad)
            for ours, expected in zip(found, plain.parameters(), strict=True):
                assert torch.equal(ours, expected.grad)
            with torch.no_grad():
                model(x)
            assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]


def batch_for_penalty(step):
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(step), requires_grad=True)
