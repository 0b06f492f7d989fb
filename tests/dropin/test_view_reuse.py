"""A forward uses the views of the last forward again if no user can notice: the oracle is new views."""

import gc
import weakref

import pytest
import torch
import torch.nn as nn

from flatparam import _C


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.bias = nn.Parameter(torch.zeros(2))


class Forwards:
    """One unit of a Net whose forward begins again and again."""

    def __init__(self, listed):
        self.net, self.listed = Net(), listed
        self.unit = _C.ModuleParams([(self.net, "weight", (2, 3), None, 0), (self.net, "bias", (2,), None, 6)], [], 8)
        self.params = [self.net.weight, self.net.bias]
        self.padded = torch.arange(8.0)
        self.flat = nn.Parameter(self.padded)
        self.held = [None, None]

    def begin(self):
        """Where the views are now, by their id."""
        views = self.unit.use_unsharded(self.flat, self.padded, self.held, False, self.listed, False)
        assert self.net.weight is views[0]
        assert self.net.bias is views[1]
        if self.listed:
            self.held[:] = views
        return [id(view) for view in views]

    def end(self):
        if self.listed:
            self.unit.register_parameters(self.params, [], False)

    def again(self):
        self.end()
        return self.begin()

    def backward(self):
        """A step with the modules' parameters; its gradient is that of new views."""
        self.flat.grad = None
        (self.net.weight.sum() * 2 + (self.net.bias * torch.tensor([3.0, 4.0])).sum()).backward()
        assert self.flat.grad.tolist() == [2.0] * 6 + [3.0, 4.0]


@pytest.fixture(params=[True, False], ids=["orig", "flat"])
def forwards(request):
    made = Forwards(request.param)
    made.begin()
    return made


def test_the_same_objects_serve_every_forward(forwards):
    first = forwards.again()
    for _ in range(3):
        forwards.backward()
        assert forwards.again() == first
        assert forwards.net.weight.grad_fn.name() == "FlatParamViewsBackward"
        assert forwards.net.weight.grad_fn is forwards.net.bias.grad_fn
        assert forwards.net.weight._base is forwards.flat
    forwards.backward()


def keep_object(net, kept):
    kept.append(net.weight)


def keep_weakly(net, kept):
    kept.append(weakref.ref(net.weight))


def keep_graph(net, kept):
    kept.append((net.weight * net.weight).sum())


def keep_alias(net, kept):
    kept.append(net.weight.view(6))


def set_attribute(net, kept):
    net.weight.mark = 1


def register_hook(net, kept):
    net.weight.register_hook(lambda grad: kept.append("hook ran"))


def retain_grad(net, kept):
    net.weight.retain_grad()


def hook_node(net, kept):
    net.weight.grad_fn.register_hook(lambda *grads: kept.append("hook ran"))


def exchange_data(net, kept):
    net.weight.data = torch.ones(2, 3)


USES = [keep_object, keep_weakly, keep_graph, set_attribute, register_hook, retain_grad, exchange_data]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_view_that_somebody_can_recognize_is_not_taken_again(forwards, use):
    kept, before = [], forwards.again()
    use(forwards.net, kept)
    after = forwards.again()
    if use is keep_weakly:
        assert kept[0]() is None  # and another may have its address
    else:
        assert after[0] != before[0]
        if use not in (register_hook, retain_grad):  # those are the node's, and so every view's
            assert after[1] == before[1]
    assert forwards.net.weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not hasattr(forwards.net.weight, "mark")
    assert not forwards.net.weight.retains_grad
    kept.clear()
    forwards.backward()
    assert kept == []


def test_hooks_on_the_node_stay_with_its_graph(forwards):
    kept = []
    hook_node(forwards.net, kept)
    forwards.again()
    forwards.backward()
    assert kept == []


def test_a_graph_of_two_forwards_has_the_views_of_both(forwards):
    forwards.again()
    first = (forwards.net.weight * forwards.net.weight).sum()
    forwards.again()
    second = (forwards.net.weight * forwards.net.weight).sum()
    assert forwards.net.weight.grad_fn is not None
    (first + second).backward()
    assert forwards.flat.grad[:6].tolist() == [0, 4, 8, 12, 16, 20]


def test_an_alias_or_a_saved_node_keeps_nothing_alive_that_is_wrong(forwards):
    kept = []
    forwards.again()
    keep_alias(forwards.net, kept)
    node = forwards.net.weight.grad_fn
    forwards.again()
    assert forwards.net.weight.grad_fn is not node
    forwards.backward()
    kept[0].sum().backward()
    assert forwards.flat.grad.tolist() == [3.0] * 6 + [3.0, 4.0]


def test_frozen_and_moved_flats_get_views_that_fit(forwards):
    forwards.again()
    forwards.flat.requires_grad_(False)
    forwards.again()
    assert not forwards.net.weight.requires_grad
    forwards.flat.requires_grad_(True)
    forwards.padded = torch.arange(8.0, 16.0)
    forwards.again()
    assert forwards.net.weight.tolist() == [[8, 9, 10], [11, 12, 13]]
    forwards.backward()
    forwards.flat = nn.Parameter(forwards.padded.double())
    forwards.padded = forwards.flat.detach()
    forwards.again()
    assert forwards.net.weight.dtype == torch.float64
    assert forwards.net.weight._base is forwards.flat


def test_a_deleted_unit_drops_its_views(forwards):
    memory = weakref.ref(forwards.padded)
    forwards.again()
    forwards.end()
    gc.collect()
    assert sum(type(view) is torch.Tensor and view._base is forwards.flat for view in gc.get_objects()) == 2
    forwards.held[:] = [None, None]
    for name in ("weight", "bias"):
        if name in vars(forwards.net):
            delattr(forwards.net, name)
    forwards.unit = forwards.flat = forwards.padded = None
    assert memory() is None
