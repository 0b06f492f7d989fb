"""Frozen data is freed when a backward has the gradients of the inputs: the moment, and the reasons to wait.

Promises:
- frozen data is freed after the last input to which a backward comes; the graph before it is freed with the output
"""

import gc
import weakref

import pytest
import torch
from fsdp_models import have_memory
from gloo import fake_world
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP


class Marked(torch.autograd.Function):
    """The identity, whose node holds ``mark``."""

    @staticmethod
    def forward(ctx, x, mark):
        ctx.mark = mark
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Mark:
    pass


class Sum(nn.Module):
    """Of its inputs, each times a frozen weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)

    def forward(self, *inputs):
        return sum(each * self.weight for each in inputs)


@pytest.fixture(autouse=True)
def world():
    with fake_world(2):
        yield


@pytest.mark.parametrize("with_backward", [True, False])
def test_the_graph_of_inputs_goes_with_the_output(with_backward):
    model = FSDP(Sum(), use_orig_params=True)
    gc.disable()
    try:
        mark = Mark()
        node = weakref.ref(mark)
        leaf = torch.ones(4, requires_grad=True)
        output = model(Marked.apply(leaf, mark), leaf * 2)
        if with_backward:
            output.sum().backward()
        del mark, output
        assert node() is None
    finally:
        gc.enable()


class Looks:
    """Three leaves, and whether the weight has memory when a backward has the gradient of each."""

    def __init__(self, model):
        self.found = {}
        self.leaves = [torch.ones(4, requires_grad=True) for _ in range(3)]
        for i, leaf in enumerate(self.leaves):
            leaf.register_hook(lambda grad, i=i: self.found.update({i: any(have_memory(model._unit.core))}))

    def inputs(self):
        """The first two are of one node; a backward comes to the third one before."""
        first, second, _ = self.leaves
        halves = torch.stack([first.clone(), second.clone()]).unbind()
        return (*halves, self.leaves[2].clone(), torch.ones(4))


@pytest.mark.parametrize(
    ("of", "found"),
    [
        ((0, 1, 2), {0: False, 1: False, 2: True}),  # the third one's gradient is there, the others' are needed
        ((2,), {2: False}),
        ((1,), {1: False}),
    ],
)
def test_it_is_freed_after_the_last_input_that_a_backward_comes_to(of, found):
    model = FSDP(Sum(), use_orig_params=True)
    looks = Looks(model)
    for _ in range(2):
        looks.found.clear()
        model(*looks.inputs()).sum().backward(inputs=[looks.leaves[i] for i in of])
        assert looks.found == found
        assert not any(have_memory(model._unit.core))
    assert all(torch.equal(looks.leaves[i].grad, torch.full((4,), 4.0)) for i in of)


def test_a_graph_that_is_gone_through_again_has_it_until_the_end():
    model = FSDP(Sum(), use_orig_params=True)
    looks = Looks(model)
    loss = model(*looks.inputs()).sum()
    for again in (False, True):
        loss.backward(retain_graph=True)
        assert looks.found == {0: again, 1: again, 2: True}
        assert not any(have_memory(model._unit.core))


def test_inputs_of_an_earlier_forward_tell_nothing():
    model = FSDP(Sum(), use_orig_params=True)
    looks = Looks(model)
    last, first = looks.leaves[2].clone(), looks.leaves[0].clone()  # as backwards come to them
    model(first).sum().backward(retain_graph=True)
    looks.found.clear()
    model(first, last).sum().backward()
    assert looks.found == {0: True, 2: False}


def test_of_an_input_that_is_a_parameter_of_a_unit_nothing_is_told():
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Parameter(torch.ones(4))
            self.inner = FSDP(Sum(), use_orig_params=True)

        def forward(self, x):
            return self.inner(self.own, x)

    model = FSDP(Shares(), use_orig_params=True)
    looks = Looks(model.module.inner)
    for _ in range(2):
        model(looks.leaves[0].clone()).sum().backward()
        assert looks.found == {0: True}
        assert not any(have_memory(model.module.inner._unit.core))


def test_bad_inputs_are_refused():
    step = FSDP(Sum(), use_orig_params=True)._unit.core
    with pytest.raises(TypeError, match="expected a list of tensors, got int"):
        step.expect_inputs(3)
    with pytest.raises(TypeError):
        step.expect_inputs([3])
