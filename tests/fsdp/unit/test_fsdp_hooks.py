"""Users' hooks in a backward, and their calls of _C objects: correct, or an error that names the unit; no crash.

Promises:
- hooks that call a unit's node, or give it gradients without memory, get an error; a dying gradient is not found in
  `.grad`
"""

import importlib.util
import weakref

import pytest
import torch
from gloo import fake_world
from torch import nn

from flatparam import _C
from flatparam import FullyShardedDataParallel as FSDP

GRADIENTS = {
    "smaller": (torch.ones(3, 3), torch.ones(8)),
    "larger": (torch.ones(1000, 1000), None),
    "other dimensions": (torch.ones(64), torch.ones(8)),
}


class CallsItsNode(nn.Linear):
    """A hook in backward calls the node behind its weights with gradients of its own."""

    gradients = ()

    def forward(self, x):
        node = self.weight.grad_fn

        def call(grad):
            node(*self.gradients)

        output = super().forward(x)
        output.register_hook(call)
        return output


@pytest.mark.parametrize("uo", [False, True])
def test_the_node_of_a_unit_called_with_other_gradients(uo):
    with fake_world(1):
        for gradients in GRADIENTS.values():
            model = FSDP(CallsItsNode(8, 8), use_orig_params=uo)
            model.module.gradients = gradients
            with pytest.raises(ValueError, match=r"CallsItsNode expected gradient 0 to have shape \[8, 8\]"):
                model(torch.ones(2, 8)).sum().backward()
            model.module.gradients = (torch.ones(8, 8), None)
            model(torch.ones(2, 8)).sum().backward()  # what a hook adds is added: of autograd come 2 in each place
            found = torch.cat([p.grad.flatten() for p in model.parameters()])
            assert found.tolist() == [3.0] * 64 + [2.0] * 8


def test_a_gradient_whose_memory_a_hook_has_freed():
    class Frees(nn.Linear):
        def forward(self, x):
            self.weight.grad_fn.register_prehook(self.free)
            return super().forward(x)

        def free(self, gradients):
            freed = gradients[0].clone()
            freed.untyped_storage().resize_(0)
            return freed, *gradients[1:]

    with fake_world(1):
        model = FSDP(Frees(8, 8), use_orig_params=True)
        with pytest.raises(ValueError, match="memory for its 64 elements, got one whose storage has 0 bytes"):
            model(torch.ones(2, 8)).sum().backward()


def test_a_unit_keeps_its_name():
    with fake_world(1):
        model = FSDP(nn.Linear(3, 3))
        step = model._unit.core
        name = step.name
        for change in (lambda: delattr(step, "name"), lambda: setattr(step, "name", 3)):
            with pytest.raises(TypeError, match="expected the name to be a str"):
                change()
        model(torch.ones(2, 3)).sum().backward()
        assert step.name.startswith(name)


def test_the_extension_may_be_executed_again():
    spec = importlib.util.spec_from_file_location("flatparam._C", _C.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.Root is not _C.Root
    with fake_world(1):
        model = FSDP(nn.Linear(3, 3))  # of the types that were there before
        model(torch.ones(2, 3)).sum().backward()
        assert model.params[0].grad.tolist() == [2.0] * 12


@pytest.mark.parametrize("uo", [False, True])
def test_a_gradient_that_goes_is_not_found_any_more(uo):
    """A callback of a weak reference to a gradient looks at ``.grad`` while the gradient is let go of."""
    with fake_world(1):
        model = FSDP(nn.Linear(3, 3), use_orig_params=uo)
        with model.no_sync():
            model(torch.ones(2, 3)).sum().backward()
        first = next(iter(model.parameters()))
        found = []
        watched = weakref.ref(first.grad, lambda ref: found.append(first.grad))
        with model.no_sync():
            model(torch.ones(2, 3)).sum().backward()
        assert watched() is None
        assert found == [None]
