"""_C.ModuleParams against callbacks that change things meanwhile, and arguments that lie: nothing half done."""

import gc
import sys
import textwrap
import weakref

import forked_scripts
import numpy as np
import pytest
import torch
import torch.nn as nn
from test_module_params import SHARD, Net, make

from flatparam import _C


class Many(nn.Module):
    def __init__(self, n):
        super().__init__()
        for i in range(n):
            self.register_parameter(f"p{i}", nn.Parameter(torch.zeros(1)))


def unit_of(module):
    params = list(module.parameters())
    names = [name for name, _ in module.named_parameters()]
    unit = _C.ModuleParams([(module, name, (1,), None, i) for i, name in enumerate(names)], [], len(params))
    return unit, params


def on_release(callback):
    """A parameter whose memory is a numpy array: replacing its data calls ``callback``."""
    array = np.zeros(1, dtype=np.float32)
    param = nn.Parameter(torch.from_numpy(array))
    weakref.finalize(array, callback)
    return param


def test_a_callback_may_make_the_unit_read_other_shard_infos():
    module = Many(500)
    unit, params = unit_of(module)
    n = len(params)
    infos = tuple((True, i, 1) for i in range(n))
    other = tuple((False, None, None) for _ in range(n))
    called = []

    def callback():
        called.append(unit.scan(params, torch.zeros(1), None, other))
        [torch.full((n,), 7) for _ in range(100)]  # what was freed is used again

    params[0] = module.p0 = on_release(callback)
    shard = torch.arange(float(n))
    unit.use_sharded(nn.Parameter(torch.zeros(1)), shard, params, (), infos, False)
    assert called == [[]]
    assert torch.equal(torch.cat([p.detach() for p in params]), shard)


def test_a_callback_may_exchange_the_flat_tensor_s_data():
    module = Many(100)
    unit, params = unit_of(module)
    flat = nn.Parameter(torch.arange(100.0))
    params[0] = module.p0 = on_release(lambda: setattr(flat, "data", torch.zeros(1)))
    unit.use_parameters(flat, params, (), False)
    assert flat.numel() == 1
    assert torch.equal(torch.cat([p.detach() for p in params]), torch.arange(100.0))


def test_a_callback_may_exchange_the_tensor_that_is_being_pointed():
    """swap_tensors() refuses who is in use; had it not, the callback would drop what the loop goes on to write."""
    module = Many(3)
    unit, params = unit_of(module)
    flat = torch.arange(3.0)
    infos = tuple((True, i, 1) for i in range(3))
    calls = (
        lambda: unit.use_parameters(flat, params, (), False),
        lambda: unit.use_sharded(nn.Parameter(torch.zeros(3)), flat, params, (), infos, False),
    )
    for call in calls:
        others, refused = [nn.Parameter(torch.zeros(1))], []

        def callback(others=others, refused=refused):
            try:
                torch.utils.swap_tensors(params[0], others[0])
            except RuntimeError as error:
                refused.append(error)
            others.clear()
            [torch.full((1,), 7.0) for _ in range(100)]  # what was freed is used again

        params[0] = module.p0 = on_release(callback)
        call()
        assert len(refused) == 1
        assert torch.equal(torch.cat([p.detach() for p in params]), flat)
        module.p0 = None


def test_a_callback_may_look_for_the_gradient_that_is_being_dropped():
    seen = []
    for gradient in (False, True):
        param = nn.Parameter(torch.zeros(3))
        param.grad = torch.ones(3)
        weakref.finalize(param.grad, lambda param=param: seen.append(param.grad))
        if gradient:
            module = nn.Module()
            module.w = param
            unit = _C.ModuleParams([(module, "w", (3,), None, 0)], [], 3)
            assert unit.set_grad_pieces([param], torch.zeros(3), [True], False, ((True, 0, 3),))
        else:
            assert _C.clear_grads([param])
        assert param.grad is None
    assert seen == [None, None]


def test_the_views_node_looks_at_the_gradients_it_is_given():
    unit, flat = make(Net())
    node = unit.views(flat)[0].grad_fn
    for wrong in (torch.ones(1), torch.ones(3, 2), torch.ones(2, 3, 1)):
        with pytest.raises(ValueError, match=r"gradient 0 to have shape \[2, 3\]"):
            node(wrong, None)
    assert node(torch.ones(2, 3), None)[:6].tolist() == [1.0] * 6


def test_gradient_pieces_are_laid_out_as_the_parameters_are_in_the_flat_tensor():
    module = nn.Module()
    module.w = nn.Parameter(torch.arange(6.0).view(3, 2).t())
    unit = _C.ModuleParams([(module, "w", (2, 3), (1, 2), 0)], [], 6)
    grad = torch.arange(6.0)
    unit.set_grad_pieces([module.w], grad, [False], False, ((True, 0, 6),))
    assert torch.equal(module.w.grad, grad.as_strided((2, 3), (1, 2)))
    strided = nn.Parameter(torch.zeros(8_000_000)[::2_000_000])
    unit = _C.ModuleParams([(module, "w", (8,), None, 0)], [], 8)
    unit.set_grad_pieces([strided], torch.arange(4.0), [False], False, ((True, 0, 4),))
    assert strided.grad.stride() == (1,)
    with pytest.raises(ValueError, match="one dimension or its shape"):
        unit.set_grad_pieces([nn.Parameter(torch.zeros(2, 2))], grad, [False], False, ((True, 0, 4),))


def test_units_without_parameters_or_with_negative_sizes_are_refused():
    for numel in (0, 4, -5, -(2**63)):
        with pytest.raises(ValueError, match="at least one"):
            _C.ModuleParams((), (), numel)


def test_freed_memory_is_refused():
    net = Net()
    unit, _ = make(net)
    params, freed = [net.weight, net.bias], torch.zeros(10)
    freed_piece = torch.zeros(2, 3)
    for tensor in (freed, freed_piece):
        tensor.untyped_storage().resize_(0)
    for call in (
        lambda: unit.views(freed),
        lambda: unit.use_parameters(freed, params, [net.tied], False),
        lambda: unit.use_sharded(nn.Parameter(torch.zeros(1)), freed, params, [net.tied], SHARD, False),
        lambda: unit.set_grads(freed),
        lambda: _C.Layout([6, 2], 2, 1, 8).flatten([freed_piece, net.bias], 0.0, 0, 10),
    ):
        with pytest.raises(ValueError, match="freed"):
            call()


def test_nothing_moves_when_a_later_one_cannot():
    net = Net()
    unit, _ = make(net)
    plain = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    address = plain.data_ptr()
    whole = torch.zeros(10, dtype=torch.int64)
    with pytest.raises(TypeError, match="requires grad"):
        unit.use_parameters(whole, [plain, net.bias], [net.tied], False)
    assert plain.data_ptr() == address
    plain.requires_grad_()
    net.weight.grad = torch.ones(2, 3)
    with pytest.raises(ValueError, match="expected parameter 1"):
        unit.set_grad_pieces(
            [net.weight, nn.Parameter(torch.zeros(3))],
            torch.zeros(10),
            [False, False],
            False,
            ((True, 0, 6), (True, 8, 2)),
        )
    assert net.weight.grad.tolist() == [[1.0] * 3] * 2
    bias = net.bias
    with pytest.raises(TypeError, match=r"torch\.nn\.Parameter, got int"):
        unit.register_parameters([net.weight, 5], [net.tied], False)
    assert net._parameters["bias"] is bias
    assert "bias" not in vars(net)


def test_a_name_that_became_a_buffer_is_found():
    net = Net()
    unit, flat = make(net)
    params = [net.weight, net.bias]
    everywhere = ((True, 0, 6, 0, 5), (True, 8, 2, 0, 1))
    unit.use_parameters(flat, params, [net.tied], False)
    del net.bias
    net.register_buffer("bias", torch.zeros(2))
    assert unit.scan(params, flat, None, everywhere) == [1]
    unit.register_parameters(params, [params[0]], False)
    assert "bias" not in net._buffers
    assert net.bias is params[1]


def test_a_collection_may_look_at_anything_while_views_are_made():
    module = Many(200)
    unit, params = unit_of(module)
    flat = nn.Parameter(torch.zeros(len(params)))
    shortest = []

    def look(phase, info):
        for o in gc.get_objects():
            if type(o) is list and len(o) == len(params) and o is not params:
                shortest.append(o[0] is None)
                o.extend([0] * 1000)

    thresholds = gc.get_threshold()
    gc.callbacks.append(look)
    gc.set_threshold(5, 1, 1)
    try:
        assert len(unit.views(flat)) in (len(params), len(params) + 1000)
    finally:
        gc.callbacks.remove(look)
        gc.set_threshold(*thresholds)


@pytest.mark.multiprocess
def test_nn_module_methods_replaced_before_the_import_are_called(tmp_path):
    program = """
        import torch, torch.nn as nn
        original, seen = nn.Module.__setattr__, []
        def setattr_(self, name, value):
            seen.append(name)
            original(self, name, value)
        nn.Module.__setattr__ = setattr_
        from flatparam import _C
        m = nn.Linear(2, 2, bias=False)
        unit = _C.ModuleParams([(m, "weight", (2, 2), None, 0)], [], 4)
        weight = m.weight
        seen.clear()
        unit.register_tensors([torch.zeros(2, 2)], False, False)
        unit.register_parameters([weight], [], False)
        assert seen == ["weight", "weight"], seen
    """
    [done] = forked_scripts.run([(textwrap.dedent(program), [])], tmp_path)
    assert done.status == 0, done.err


class Keeps(nn.Module):
    """Has rules of its own: its parameters are found by __getattr__ alone."""

    def __getattr__(self, name):
        if name == "p2" and self.__dict__.get("refuses"):
            raise ValueError("not now")
        return super().__getattr__(name)


def test_an_attribute_that_cannot_be_read_leaves_those_before_it_as_they_are():
    module = Keeps()
    for i in range(4):
        module.register_parameter(f"p{i}", nn.Parameter(torch.zeros(1)))
    unit, params = unit_of(module)
    flat = nn.Parameter(torch.zeros(4))
    module.refuses = True
    counts = [sys.getrefcount(param) for param in params]
    for _ in range(10):
        with pytest.raises(ValueError, match="not now"):
            unit.scan(params, flat, None, tuple((True, i, 1) for i in range(4)))
    assert [sys.getrefcount(param) for param in params] == counts
