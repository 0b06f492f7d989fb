"""_C.ModuleParams: attributes switched as nn.Module would; a failure leaves nothing half done, and no leak."""

import gc
import sys

import pytest
import torch
import torch.nn as nn

from benchmarks.c_testing import _C_testing
from flatparam import _C


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.bias = nn.Parameter(torch.arange(2.0))
        self.tied = self.weight


class Watched(Net):
    """Counts what goes through its own __setattr__."""

    seen = ()

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name in ("weight", "bias", "tied"):
            type(self).seen += (name,)


SHARD = ((True, 0, 4, 2, 5), (False, None, None, None, None))
LAYOUT = _C.Layout([6, 2], 2, 1, 8)


def make(net):
    """A unit of net's weight, at 0, and bias, at 8 (two elements of padding), and a flat tensor for it."""
    unit = _C.ModuleParams(
        [(net, "weight", (2, 3), None, 0), (net, "bias", (2,), None, 8)],
        [(net, "tied", 0)],
        10,
    )
    flat = nn.Parameter(LAYOUT.flatten([net.weight, net.bias], 42.0, 0, 10))
    return unit, flat


def calls(net, unit, flat):
    """Every method with good arguments, in an order that ends where it began."""
    params, shared = [net._parameters["weight"], net._parameters["bias"]], [net._parameters["tied"]]
    views, other = unit.views(flat), nn.Parameter(torch.zeros(4))
    return {
        "views": lambda: unit.views(flat),
        "flatten": lambda: LAYOUT.flatten(params, 42.0, 0, 10),
        "register_tensors": lambda: unit.register_tensors(views, True, False),
        "register_parameters": lambda: unit.register_parameters(params, shared, False),
        "use_parameters": lambda: unit.use_parameters(flat, params, shared, False),
        "use_sharded": lambda: unit.use_sharded(
            other, torch.arange(4.0), params, shared, tuple(map(tuple, SHARD)), False
        ),
        "use_unsharded": lambda: unit.use_unsharded(other, torch.arange(12.0), None, False, True, False),
        "use_unsharded again": lambda: unit.use_unsharded(other, torch.arange(12.0), views, True, True, False),
        "register_parameters again": lambda: unit.register_parameters(params, shared, False),
        "scan": lambda: unit.scan(params, flat, None, tuple(map(tuple, SHARD))),
        "set_grads": lambda: unit.set_grads(torch.zeros(10)),
        "use_parameters again": lambda: unit.use_parameters(flat, params, shared, False),
        "set_grad_pieces": lambda: unit.set_grad_pieces(
            params, torch.zeros(10), [False, True], False, ((True, 0, 6, 0, 5), SHARD[1])
        ),
    }


def state(net):
    """What a user sees of net: attributes, order, values, gradients."""
    return {
        name: (id(p), p.data_ptr(), tuple(p.shape), p.stride(), id(p.grad) if p.is_leaf else None)
        for name, p in net._parameters.items()
    }, {name: id(value) for name, value in vars(net).items() if isinstance(value, torch.Tensor)}


def test_flatten_puts_values_in_place_and_fill_between():
    net = Net()
    _, flat = make(net)
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 42.0, 42.0, 0.0, 1.0]


@pytest.mark.parametrize("cls", [Net, Watched])
def test_attributes_are_switched_as_setattr_does(cls):
    """The oracle is delattr and setattr on a second module."""
    net, oracle = cls(), cls()
    net.other, oracle.other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    unit, flat = make(net)
    params = dict(net._parameters)
    views = unit.views(flat)

    def put(module, name, value, listed):
        delattr(module, name)
        setattr(module, name, value)
        if listed:
            module._parameters[name] = value

    def same_names():
        assert list(net._parameters) == list(oracle._parameters)
        assert {k for k in vars(net) if k[0] != "_"} == {k for k in vars(oracle) if k[0] != "_"}

    for first in (True, False):  # the first round settles the order, as the handle's constructor does
        for listed in (True, False):
            for name, view in zip(("weight", "bias", "tied"), (*views, views[0]), strict=True):
                put(oracle, name, view, listed)
                if first:
                    put(net, name, view, listed)
            unit.register_tensors(views, listed, False)
            same_names()
            assert net.weight is views[0]
            assert net.tied is views[0]
            assert net.bias is views[1]
        for name in ("weight", "bias", "tied"):
            put(oracle, name, params[name], False)
        unit.register_parameters([params["weight"], params["bias"]], [params["tied"]], False)
        same_names()
        assert net.weight is params["weight"]
        assert net.tied is params["tied"]
    if cls is Watched:
        assert len(cls.seen) >= 2 * 3 * 3


def test_registration_hooks_see_the_parameters():
    net = Net()
    unit, _ = make(net)
    params = dict(net._parameters)
    names = []
    hook = nn.modules.module.register_module_parameter_registration_hook(lambda module, name, p: names.append(name))
    try:
        unit.register_parameters([params["weight"], params["bias"]], [params["tied"]], False)
    finally:
        hook.remove()
    assert names == ["weight", "bias", "tied"]


def test_a_class_that_changes_later_is_noticed():
    class Changing(Net):
        pass

    net = Changing()
    unit, flat = make(net)
    params = dict(net._parameters)
    unit.register_tensors(unit.views(flat), False, False)
    seen = []

    def setattr_(self, name, value):
        seen.append(name)
        Net.__setattr__(self, name, value)

    Changing.__setattr__ = setattr_
    unit.register_parameters([params["weight"], params["bias"]], [params["tied"]], False)
    assert seen == ["weight", "bias", "tied"]


def test_unsafe_registration_writes_the_dictionaries_of_any_class():
    net = Watched()
    unit, flat = make(net)
    params, before = dict(net._parameters), len(Watched.seen)
    unit.register_tensors(unit.views(flat), False, True)
    unit.register_parameters([params["weight"], params["bias"]], [params["tied"]], True)
    assert len(Watched.seen) == before
    assert net.__dict__["weight"] is net._parameters["weight"] is params["weight"]


def test_pieces_point_into_the_shard_and_the_rest_is_empty():
    net = Net()
    unit, flat = make(net)
    shard = flat.detach()[2:6].clone()
    assert unit.use_sharded(flat, shard, [net.weight, net.bias], [net.tied], SHARD, False)
    assert net.weight.tolist() == [2.0, 3.0, 4.0, 5.0]
    assert net.weight.data_ptr() == shard.data_ptr()
    assert net.bias.shape == (0,)
    assert unit.scan([net.weight, net.bias], shard, None, SHARD) == []


def test_whole_switches_are_their_parts():
    """The oracle is the same made of single steps, on a second module."""
    nets = [Net(), Net()]
    made = [make(net) for net in nets]
    held = [([net.weight, net.bias], [net.tied]) for net in nets]
    shards, padded = [torch.arange(4.0), torch.arange(4.0)], [torch.arange(12.0), torch.arange(12.0)]

    def same():
        seen = []
        for net, (_, flat) in zip(nets, made, strict=True):
            values = {name: (type(v), v.detach().tolist(), v.requires_grad) for name, v in net._parameters.items()}
            seen.append((flat.detach().tolist(), values, sorted(k for k in vars(net) if k[0] != "_")))
        assert seen[0] == seen[1]

    for listed in (True, False):
        (unit, flat), (oracle, oracle_flat) = made
        assert unit.use_sharded(flat, shards[0], *held[0], SHARD, False) is True
        oracle_flat.data = shards[1]
        oracle.register_parameters(*held[1], False)
        for param, piece in zip(
            (*held[1][0], *held[1][1]), (oracle_flat[:4], oracle_flat[:0], oracle_flat[:4]), strict=True
        ):
            param.data = piece.detach()
        same()
        views = unit.use_unsharded(flat, padded[0], None, False, listed, False)
        oracle_flat.data = padded[1][:10]
        oracle_views = oracle.views(oracle_flat)
        oracle.register_tensors(oracle_views, listed, False)
        same()
        assert nets[0].weight is views[0]
        assert views[0].grad_fn.name() == "FlatParamViewsBackward"
        other = torch.arange(20.0, 32.0)
        assert unit.use_unsharded(flat, other, views, True, listed, False) is views
        assert views[0].tolist() == [[20, 21, 22], [23, 24, 25]]


def test_whole_switches_do_nothing_where_torch_must():
    net = Net()
    unit, flat = make(net)
    params, shared, views = [net.weight, net.bias], [net.tied], unit.views(flat)
    before, data = state(net), flat.data_ptr()
    meta = torch.zeros(12, device="meta")
    assert unit.use_unsharded(flat, meta, None, False, True, False) is None
    assert unit.use_unsharded(flat, torch.zeros(12), [views[0], None], True, True, False) is None
    assert unit.use_sharded(flat, meta, params, shared, SHARD, False) is False
    assert unit.use_parameters(meta[:10], params, shared, False) is False
    assert unit.use_parameters(flat, [params[0], None], shared, False) is False
    assert unit.set_grad_pieces([net.weight, 3], torch.zeros(10), [False, False], False, SHARD) is False
    assert unit.set_grad_pieces(params, meta[:4], [False, False], False, SHARD) is False
    assert unit.use_sharded(flat, torch.zeros(4), [params[0], 3], shared, SHARD, False) is False
    with torch.overrides.BaseTorchFunctionMode():
        assert unit.use_unsharded(flat, torch.zeros(12), None, False, True, False) is None
        assert unit.use_sharded(flat, torch.zeros(4), params, shared, SHARD, False) is False
    with pytest.raises(ValueError, match="at least 10 elements"):
        unit.use_unsharded(flat, torch.zeros(9), None, False, True, False)
    assert (state(net), flat.data_ptr()) == (before, data)


def test_what_is_replaced_is_noticed():
    class Base:
        def one(self):
            pass

        two = property(lambda self: 2)

    class Sub(Base):
        pass

    own = {"one": Base.one, "two": Base.two}
    thing, other = Sub(), Sub()
    assert _C.is_as_defined(thing, own, ("one",))
    thing.one = lambda: None
    assert not _C.is_as_defined(thing, own, ("one",))
    assert _C.is_as_defined(thing, own, ())
    assert _C.is_as_defined(other, own, ("one",))
    original, Base.one = Base.one, lambda self: 1
    assert not _C.is_as_defined(other, own, ())
    Base.one = original
    assert _C.is_as_defined(other, own, ())
    Sub.two = 2
    assert not _C.is_as_defined(other, own, ())
    assert _C.is_as_defined(Base(), own, ("one",))
    del Sub.two
    more = {**own, "__repr__": Base.__repr__}
    for _ in range(3):  # a class that changes while it is looked at
        assert _C.is_as_defined(other, more, ())

    class Changes:
        def __get__(self, thing, cls):
            cls.one, cls.two = None, own["two"]
            return own["two"]

    Sub.two = Changes()
    _C.is_as_defined(other, more, ())
    assert not _C.is_as_defined(other, more, ())
    del Sub.one, Sub.two
    for _ in range(10):  # of other attributes each time, perhaps at the address of those that were asked for last
        assert _C.is_as_defined(other, {**own}, ())
        assert not _C.is_as_defined(other, {**own, "three": 3}, ())


def test_scan_finds_what_moved():
    net = Net()
    unit, flat = make(net)
    everywhere = ((True, 0, 6, 0, 5), (True, 8, 2, 0, 1))
    params = [net.weight, net.bias]
    assert unit.use_parameters(flat, params, [net.tied], False)
    assert unit.scan(params, flat, None, everywhere) == []
    net.bias.data = net.bias.data.clone()
    assert unit.scan(params, flat, None, everywhere) == [1]
    net.weight = nn.Parameter(net.weight.detach())
    assert unit.scan(params, flat, None, everywhere) == [0, 1]
    del net.weight
    assert unit.scan(params, flat, None, everywhere) == [1]
    assert unit.scan(params, flat, None, (SHARD[1], SHARD[1])) == []
    net.bias.grad = torch.zeros(2)
    assert unit.use_parameters(flat, params, [net.tied], False)
    del net.weight
    assert unit.scan(params, flat, None, everywhere) == [1]
    grad = torch.arange(flat.numel(), dtype=flat.dtype)
    net.bias.grad = grad[8:10]
    assert unit.scan(params, flat, grad, everywhere) == []
    net.bias.grad = grad[7:9]  # elsewhere in the same memory: it gets data of its own
    assert unit.scan(params, flat, grad, everywhere) == [1]
    assert net.bias.grad.tolist() == [7.0, 8.0]
    assert not _C.same_storage(net.bias.grad, grad)
    net.bias.data = flat[6:8]
    assert unit.scan(params, flat, None, everywhere) == [1]
    assert not _C.same_storage(net.bias, flat)


BAD_UNITS = [
    (TypeError, lambda net: ([(net, "weight", (2, 3), None)], [], 10)),
    (TypeError, lambda net: ([(net, 3, (2, 3), None, 0)], [], 10)),
    (TypeError, lambda net: ([(object(), "weight", (2, 3), None, 0)], [], 10)),
    (TypeError, lambda net: ([(net, "weight", 6, None, 0)], [], 10)),
    (TypeError, lambda net: ([(net, "weight", ("2", 3), None, 0)], [], 10)),
    (ValueError, lambda net: ([(net, "weight", (2, 3), (1,), 0)], [], 10)),
    (ValueError, lambda net: ([(net, "weight", (2, 3), (4, 1), 0)], [], 10)),
    (ValueError, lambda net: ([(net, "weight", (2, -3), None, 0)], [], 10)),
    (ValueError, lambda net: ([(net, "weight", (2, 3), None, -1)], [], 10)),
    (ValueError, lambda net: ([(net, "weight", (2, 3), None, 5)], [], 10)),
    (ValueError, lambda net: ([(net, "weight", (2**32, 2**32), None, 0)], [], 10)),
    (ValueError, lambda net: ([(net, "weight", (2, 3), None, 0), (net, "bias", (2,), None, 5)], [], 10)),
    (OverflowError, lambda net: ([(net, "weight", (2, 3), None, 0)], [], 2**64)),
    (TypeError, lambda net: ([(net, "weight", (2, 3), None, 0)], [(net, "tied")], 10)),
    (ValueError, lambda net: ([(net, "weight", (2, 3), None, 0)], [(net, "tied", 1)], 10)),
    (ValueError, lambda net: ([(net, "weight", (2, 3), None, 0)], [(net, "tied", -1)], 10)),
    (TypeError, lambda net: (5, [], 10)),
    (TypeError, lambda net: ([], 5, 10)),
    (TypeError, lambda net: ([], [], "10")),
]


@pytest.mark.parametrize(("error", "arguments"), BAD_UNITS)
def test_a_bad_unit_is_refused_and_keeps_nothing(error, arguments):
    net = Net()
    gc.collect()
    references, blocks = sys.getrefcount(net), _C_testing.alloc_live()
    for _ in range(10):
        with pytest.raises(error):
            _C.ModuleParams(*arguments(net))
    assert (sys.getrefcount(net), _C_testing.alloc_live()) == (references, blocks)


def test_lists_of_the_wrong_length_or_kind_are_refused():
    net = Net()
    unit, flat = make(net)
    params, before = [net.weight, net.bias], state(net)
    for bad in ([], params[:1], [*params, params[0]], None, 3):
        for call in (
            lambda bad=bad: LAYOUT.flatten(bad, 0.0, 0, 10),
            lambda bad=bad: unit.register_tensors(bad, True, False),
            lambda bad=bad: unit.register_parameters(bad, [net.tied], False),
            lambda bad=bad: unit.use_parameters(flat, bad, [net.tied], False),
            lambda bad=bad: unit.use_sharded(flat, flat[:4], bad, [net.tied], SHARD, False),
            lambda bad=bad: unit.scan(bad, flat, None, SHARD),
            lambda bad=bad: unit.set_grad_pieces(bad, flat, [False, False], False, SHARD),
            lambda bad=bad: unit.set_grad_pieces(params, flat.detach(), bad, False, SHARD),
            lambda bad=bad: unit.scan(params, flat, None, bad),
        ):
            with pytest.raises((TypeError, ValueError)):
                call()
    for bad in (torch.zeros(9), torch.zeros(10, 1), torch.zeros(20)[::2], torch.zeros(10, device="meta"), None, "flat"):
        for call in (unit.views, unit.set_grads):
            with pytest.raises((TypeError, ValueError)):
                call(bad)
    for bad in ((True, -1, 2), (True, 0, -2), (True, 2**63, 1), (True,), 5, (True, None, None)):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            unit.scan(params, flat, None, (bad, SHARD[1]))
    with pytest.raises(ValueError, match="outside"):
        unit.use_sharded(
            nn.Parameter(torch.zeros(1)), flat[:4], params, [net.tied], ((True, 1, 4, 0, 3), SHARD[1]), False
        )
    assert state(net) == before


def test_nothing_moves_when_one_tensor_cannot():
    """All targets are looked at before the first is changed."""
    net = Net()
    unit, flat = make(net)
    before = state(net)
    for call in (
        lambda: unit.use_parameters(flat, [net.weight, torch.zeros(2, device="meta")], [net.tied], False),
        lambda: unit.use_sharded(flat, flat[:4].detach(), [net.weight, None], [net.tied], SHARD, False),
    ):
        assert call() is False
    assert state(net) == before


def test_core_allocation_failures_leave_everything_as_it_was():
    net = Net()
    unit, flat = make(net)
    assert unit.use_parameters(flat, [net.weight, net.bias], [net.tied], False)
    failures = 0
    for name, call in calls(net, unit, flat).items():  # one after another: the last ones undo the first ones
        for k in range(1, 100):
            before, blocks = state(net), _C_testing.alloc_live()
            _C_testing.alloc_fail_at(k)
            try:
                call()
                break
            except MemoryError:
                failures += 1
                assert state(net) == before, name
                assert _C_testing.alloc_live() == blocks, name
            finally:
                _C_testing.alloc_fail_at(0)
        else:
            pytest.fail(f"{name} never succeeded")
    for k in range(1, 100):
        blocks = _C_testing.alloc_live()
        _C_testing.alloc_fail_at(k)
        try:
            make(net)
            break
        except MemoryError:
            failures += 1
            assert _C_testing.alloc_live() == blocks
        finally:
            _C_testing.alloc_fail_at(0)
    assert failures >= 10


def test_python_allocation_failures_leave_everything_as_it_was():
    """Each allocation of the interpreter's that a call makes fails once."""
    testcapi = pytest.importorskip("_testcapi")  # some distributions leave it out
    net = Net()
    unit, flat = make(net)
    assert unit.use_parameters(flat, [net.weight, net.bias], [net.tied], False)
    failures = {}
    gc.collect()
    gc.freeze()  # what other tests have left would be looked at in each of the collections below
    for name, call in {**calls(net, unit, flat), "make": lambda: make(net)}.items():
        for k in range(1, 100):
            gc.collect()
            before, references, blocks = state(net), sys.getrefcount(net), _C_testing.alloc_live()
            testcapi.set_nomemory(k, k + 1)
            try:
                call()
                break
            except (MemoryError, torch.OutOfMemoryError):  # torch's own where it cannot make a tensor's Python object
                failures[name] = k
            except RuntimeError as error:
                if "Failed to allocate a" not in str(error):  # which torch before 2.13 says there
                    raise
                failures[name] = k
            finally:
                testcapi.remove_mem_hooks()
            gc.collect()
            assert (sys.getrefcount(net), _C_testing.alloc_live()) == (references, blocks), name
            assert state(net) == before, name
        else:
            pytest.fail(f"{name} never succeeded")
    assert failures["views"] >= 3  # two objects, and what lists them
    assert sum(failures.values()) > 20


def test_good_and_bad_calls_leak_no_reference():
    net = Net()
    unit, flat = make(net)
    assert unit.use_parameters(flat, [net.weight, net.bias], [net.tied], False)

    def round_trip():
        for call in calls(net, unit, flat).values():
            call()
        for call in (
            lambda: unit.views(torch.zeros(3)),
            lambda: unit.scan([net.weight, net.bias], flat, None, ((1,), (2,))),
            lambda: unit.use_parameters(flat, [net.weight, 5, 6], [net.tied], False),
            lambda: unit.register_tensors([net.weight, net.bias], 3, False),
            lambda: unit.set_grads("grad"),
            lambda: unit.use_unsharded(flat, flat.detach(), [net.weight], True, True, False),
            lambda: unit.use_sharded(flat, flat.detach(), [net.weight, net.bias], [], SHARD, False),
        ):
            with pytest.raises((TypeError, ValueError)):
                call()

    def counts():
        gc.collect()
        tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
        objects = (net, unit, flat, net.weight, net.bias, None)
        return tensors, [sys.getrefcount(o) for o in objects[:-1]], _C_testing.alloc_live()

    for _ in range(5):
        round_trip()
    before = counts()
    for _ in range(50):
        round_trip()
    assert counts() == before


def test_a_unit_in_a_cycle_is_collected():
    net = Net()
    unit, _ = make(net)
    net.unit = unit
    blocks = _C_testing.alloc_live()
    del net, unit
    gc.collect()
    assert _C_testing.alloc_live() < blocks


def test_storage_is_resized_in_place_and_views_live_again():
    tensor = torch.arange(8.0)
    view = tensor[2:4]
    _C.free(tensor)
    assert tensor.untyped_storage().size() == 0
    assert _C.storage_numel(view) == 0
    _C.allocate(tensor, 8)
    tensor.copy_(torch.arange(8.0))
    assert view.tolist() == [2.0, 3.0]
    assert _C.same_storage(view, tensor)


def test_a_freed_storage_that_keeps_its_size_says_why_to_a_view_made_later():
    tensor = torch.arange(8.0)
    memory = tensor.untyped_storage()
    weight = tensor.view(2, 4)
    _C.free(tensor, "gone for a reason", True)
    assert memory.size() == 32
    assert _C.storage_numel(tensor) == 0
    with pytest.raises(RuntimeError, match="gone for a reason"):
        torch.ones(2, 4) @ weight.t()
    _C.free(tensor, "gone for a reason")
    assert memory.size() == 0
    _C.free(tensor, "gone for a reason", True)  # nothing to keep
    assert memory.size() == 0
    for keeps_size in (True, False, True):
        _C.allocate(tensor, 8)
        assert _C.storage_numel(tensor) == 8
        tensor.copy_(torch.arange(8.0))
        assert (torch.ones(2, 4) @ weight.t()).tolist() == [[6.0, 22.0]] * 2
        _C.free(tensor, "gone for a reason", keeps_size)
    other = torch.arange(8.0)
    _C.free(other, None, True)  # without a reason nothing would stop who reads it
    assert other.untyped_storage().size() == 0


def test_what_is_not_plain_or_has_other_room_is_left_to_torch():
    whole = torch.arange(8.0)
    assert _C.allocate(whole, 8) is False
    assert _C.allocate(whole, 4) is None
    assert _C.free(whole[2:]) is False
    assert whole.tolist() == list(range(8))
    for other in (torch.ones(8, device="meta"), torch.ones(2, 2).to_sparse(), None):
        assert _C.allocate(other, 8) is None
        assert _C.free(other) is False
    assert _C.free(whole) is True
    assert _C.allocate(whole, 8) is True


def test_a_storage_that_borrows_its_memory_is_left_alone():
    memory = bytearray(16)
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="cannot be resized"):
        _C.free(tensor)
    assert tensor.tolist() == [0.0] * 4
    for numel in (-1, 2**62):
        with pytest.raises(ValueError, match="cannot have"):
            _C.allocate(torch.zeros(4), numel)
