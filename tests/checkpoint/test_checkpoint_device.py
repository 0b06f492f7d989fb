"""Checkpoints of models on a simulated accelerator with late streams: saved values, and the place of loaded states."""

import collections

import pytest
import simulated
import torch
from gloo import run_ranks
from torch import nn

from flatparam import checkpoint

pytestmark = pytest.mark.multiprocess


class Matrices(torch.optim.Optimizer):
    """Keeps one matrix a dimension, as Shampoo does, in a list, and more of them by name."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["of each"] = [torch.eye(size, device=param.device) for size in param.shape]
                state["named"] = {"sum": torch.zeros_like(param)}
            for i, matrix in enumerate(state["of each"]):
                flat = param.grad.movedim(i, 0).flatten(1)
                matrix.add_(flat @ flat.T)
            state["named"]["sum"].add_(param.grad)
            state.setdefault("counted", collections.Counter())["steps"] += 1
            param.sub_(state["of each"][0] @ state["named"]["sum"], alpha=0.1)


def made(optimizer):
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False).to("sim:0")
    return model, optimizer(model.parameters(), lr=0.1)


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3, device="sim:0")).sum().backward()
    optimizer.step()


def saved_in_the_background(library, folder):
    simulated.use(library)
    model = nn.Linear(300, 300).to("sim:0")
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3).add_(1)
    wanted = {name: value.cpu() for name, value in model.state_dict().items()}
    checkpoint.async_save(folder / "one", model).wait()
    found = nn.Linear(300, 300)
    checkpoint.load(folder / "one", found)
    for name, value in found.state_dict().items():
        assert torch.equal(value, wanted[name]), name


def test_what_is_saved_in_the_background_has_arrived_on_the_host(tmp_path):
    run_ranks(saved_in_the_background, 1, str(simulated.build()), tmp_path)


def loaded(library, folder):
    simulated.use(library)
    for kind, settings in ((Matrices, {}), (torch.optim.Adam, {"capturable": True}), (torch.optim.Adam, {})):
        model, optimizer = made(lambda params, lr, made=kind, given=settings: made(params, lr, **given))
        train(model, optimizer)
        checkpoint.save(folder / "one", model, optimizer, overwrite=True)
        again, of_again = made(kind)
        checkpoint.load(folder / "one", again, of_again)
        for one, its in ((model, optimizer), (again, of_again)):
            train(one, its)
        assert torch.equal(again.weight.cpu(), model.weight.cpu())
        state = of_again.state[again.weight]
        if kind is Matrices:
            assert state["counted"] == collections.Counter(steps=2)
            assert {value.device.type for value in [*state["of each"], *state["named"].values()]} == {"sim"}
        else:
            assert state["step"].device.type == ("sim" if settings else "cpu")


def test_states_are_loaded_to_the_device_where_their_optimizer_has_them(tmp_path):
    run_ranks(loaded, 1, str(simulated.build()), tmp_path)
