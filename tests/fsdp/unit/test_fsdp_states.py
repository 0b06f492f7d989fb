"""A unit's states: a move that is not possible raises with the unit's name, and the model trains on as if nothing was.

Oracle: the gradients of the unsharded module. The tables of moves by themselves: tests/c/test_state.c.

Promises:
- a move that a unit's state does not allow raises with its name, and the model trains on; no other thread ends a
  forward, or comes in while one begins
"""

import pytest
import torch
from fsdp_models import data, have_memory, loss_of, make, wrap_blocks
from gloo import fake_world
from test_fsdp_threads import ELSEWHERE, gradients, in_thread, unsharded
from torch import nn
from torch.utils import _pytree as pytree

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.fsdp.desync import torch_collectives

NAME = "the unit of Block at `blocks.1`"


def step_of(model):
    return model.module.blocks[1]._unit.core


def trains_as_before(model, use_orig_params):
    model.zero_grad()
    loss_of(model, data(0, 0)).backward()
    torch.testing.assert_close(gradients(model), unsharded(0)[0 if use_orig_params else 1])


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("when", ["after", "awaiting", "backward"])
def test_a_forward_ends_once(when, uo):
    with fake_world(1):
        model = wrap_blocks(make(), use_orig_params=uo)
        states = []

        def end_again(*ignored):
            with pytest.raises(RuntimeError, match=f"^{NAME}: end_forward is not possible in state ") as raised:
                step_of(model).post_forward(torch.ones(1))
            states.append(str(raised.value).split(" in state ")[1])

        if when == "after":
            with torch.no_grad():
                model.module.blocks[2].register_forward_pre_hook(end_again)
                model(data(0, 0))
        elif when == "awaiting":
            model.module.blocks[2].register_forward_pre_hook(end_again)
        else:
            model.module.blocks[0].register_forward_hook(lambda m, args, y: y.register_hook(end_again) and None)
        trains_as_before(model, uo)
        state = {"awaiting": "AWAITING_BACKWARD", "backward": "BACKWARD"}.get(when, "IDLE")
        assert states[0] == f"{state}, only in FORWARD, FORWARD_AGAIN, RECOMPUTING"


def test_a_unit_that_a_hook_frees_while_it_is_gathered_is_not_computed_with(monkeypatch):
    with fake_world(2):
        model = FSDP(nn.Linear(3, 2), sharding_strategy=ShardingStrategy.FULL_SHARD)
        unit = model._unit
        model(torch.ones(1, 3))
        unit.core.root.always_python()
        gather = torch_collectives.all_gather

        def free(output, own, group):
            gather(output, own, group)
            unit.core.release()

        monkeypatch.setattr(torch_collectives, "all_gather", free)
        with pytest.raises(RuntimeError, match=r"^the unit of Linear.*: it was freed while it was gathered"):
            model(torch.ones(1, 3))
        assert not all(have_memory(unit.core))
        monkeypatch.undo()
        model(torch.ones(1, 3)).sum().backward()
        assert unit.core.root.state == "IDLE"


def test_another_thread_does_not_end_a_forward():
    with fake_world(1):
        model = wrap_blocks(make(), use_orig_params=True)
        raised = []

        def intrude(*ignored):
            raised.append(in_thread(lambda: step_of(model).post_forward(torch.ones(1))))
            raised.append(in_thread(step_of(model).abort_forward))

        hook = model.module.blocks[1].module.register_forward_hook(intrude)
        loss_of(model, data(0, 0)).backward()
        hook.remove()
        assert NAME in str(raised[0])
        assert ELSEWHERE in str(raised[0])
        assert raised[1] is None  # it is what follows a refusal
        trains_as_before(model, True)


def test_no_other_thread_comes_in_while_an_iteration_begins(monkeypatch):
    """An iteration begins with a collective, which is waited for without the interpreter's lock."""
    with fake_world(2):
        model = FSDP(nn.Linear(3, 2), sharding_strategy=ShardingStrategy.ZERO_1)
        model(torch.ones(1, 3))
        model._unit.core.root.always_python()
        raised = []
        agree = torch_collectives.agree

        def meanwhile(output, own, group):
            if not raised:  # of the forward
                raised.append(in_thread(lambda: model(torch.ones(1, 3))))
            agree(output, own, group)

        monkeypatch.setattr(torch_collectives, "agree", meanwhile)
        model(torch.ones(1, 3)).sum().backward()
        assert ELSEWHERE in str(raised[0])


def test_a_forward_that_was_refused_has_nothing_to_abort():
    with fake_world(2):
        model = wrap_blocks(make(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        loss = loss_of(model, data(0, 0))
        units = [unit._unit.core for unit in FSDP.fsdp_modules(model)]
        full = [all(have_memory(unit)) for unit in units]
        assert any(full)
        for unit in units:
            unit.abort_forward()  # as that of another thread, which comes to it when this forward has ended
        assert [all(have_memory(unit)) for unit in units] == full
        loss.backward()


class Output:
    """What a forward returns; pytree looks into it by ``flatten``."""

    def __init__(self, tensor):
        self.tensor = tensor


class Returns(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x):
        return Output(self.inner(x))


def in_place(function):
    """Run it in this thread; what it has raised."""
    with pytest.raises(RuntimeError) as raised:
        function()
    return raised.value


looked = []  # what happens while pytree looks into an output


def look(output):
    looked.append(looked[0]() if looked and callable(looked[0]) else None)
    return [output.tensor], None


pytree.register_pytree_node(Output, look, lambda children, context: Output(*children))


def test_no_other_thread_comes_in_while_a_forward_ends():
    with fake_world(2):
        model = FSDP(Returns())
        looked[:] = [lambda: in_thread(lambda: model(torch.ones(1, 3)))]
        try:
            model(torch.ones(1, 3)).tensor.sum().backward()
        finally:
            raised, looked[:] = looked[1:], []
        assert ELSEWHERE in str(raised[0])
        assert model._unit.core.root.state == "IDLE"


def test_an_output_that_cannot_be_looked_into_leaves_the_model_usable():
    def fail():
        raise KeyError("in flatten")

    with fake_world(2):
        model = FSDP(Returns())
        looked[:] = [fail]
        try:
            with pytest.raises(KeyError, match="in flatten"):
                model(torch.ones(1, 3))
        finally:
            looked.clear()
        assert not all(have_memory(model._unit.core))
        model(torch.ones(1, 3)).tensor.sum().backward()
        assert model._unit.core.root.state == "IDLE"


@pytest.mark.parametrize("run", [in_thread, in_place])
def test_nothing_comes_in_while_all_is_gathered_anew(monkeypatch, run):
    with fake_world(2):
        model = FSDP(nn.Linear(3, 2), sharding_strategy=ShardingStrategy.ZERO_1)
        model(torch.ones(1, 3))
        root = model._unit.core.root
        root.always_python()
        raised = []
        agree = torch_collectives.agree

        def meanwhile(output, own, group):
            raised.append(run(lambda: model(torch.ones(1, 3))))
            agree(output, own, group)

        monkeypatch.setattr(torch_collectives, "agree", meanwhile)
        root.refresh()
        assert len(raised) == 1
        assert "the model is being recovered, or refreshed" in str(raised[0])
        assert root.state == "IDLE"
        monkeypatch.undo()
        model(torch.ones(1, 3)).sum().backward()
